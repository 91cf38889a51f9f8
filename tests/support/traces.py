"""A small communication trace made by hand, and traces in a folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from recjax.lab.formats import FORMATS
from recjax.lab.formats.trace import COMPUTE, Event, Trace

ALL, HALVES = (0, 1, 2, 3), ((0, 1), (2, 3))


def by_hand() -> Trace:
    """Four ranks, two steps' worth of kinds: a ragged all-to-all over all, all-reduces in halves, and computing."""
    ranks = {}
    for rank in ALL:
        half = HALVES[rank // 2]
        sends = tuple(8 * (rank + peer) for peer in ALL)  # symmetric: what r sends to p, p sends to r
        ranks[rank] = (
            Event(0, COMPUTE, start_ns=0, duration_ns=4000),
            Event(
                2,
                "all_to_all",
                "row_exchange",
                "tables",
                "all-to-all.1",
                0,
                "float32",
                ALL,
                256,
                256,
                sends,
                sends,
                deps=(0,),
                start_ns=5000,
                duration_ns=7000,
            ),
            Event(3, "all_reduce", "dense_grads", "", "all-reduce", 0, "float32", half, 400, 400),
            Event(4, "all_gather", "id_exchange", "", "all-gather", 0, "int32", ALL, 16, 64),
            Event(5, "reduce_scatter", "dense_grads", "", "rs", 1, "bfloat16", half, 64, 32, deps=(2,)),
            Event(6, COMPUTE, step=1, deps=(5,), start_ns=13000, duration_ns=2000),
            Event(
                7,
                "all_reduce",
                "finite_check",
                "",
                "psum",
                1,
                "int32",
                ALL,
                4,
                4,
                deps=(4, 6),
                start_ns=16000,
                duration_ns=1000,
            ),
        )
    return Trace(4, ranks, {"source": "by hand", "config": {"train.batch_size": "8"}})


def longer(trace: Trace, times: int) -> Trace:
    """The trace again and again, its steps one after the other."""
    ranks = {}
    for rank, events in trace.ranks.items():
        steps, ids = events[-1].step + 1, events[-1].id + 1
        ranks[rank] = tuple(
            dataclasses.replace(e, id=e.id + n * ids, step=e.step + n * steps, deps=tuple(d + n * ids for d in e.deps))
            for n in range(times)
            for e in events
        )
    return dataclasses.replace(trace, ranks=ranks)


def save(trace: Trace, folder: Path, format: str = "recjax") -> Path:
    """Writes a trace as `recjax trace --format` does."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FORMATS[format].write(trace).items():
        (folder / name).write_bytes(content)
    return folder


def node(id: int, parent: int, name: str, inputs=(), types=(), outputs=(), output_types=()) -> dict[str, Any]:
    """A node as PyTorch's own schema 1.0.1 has them."""
    return {
        "name": name,
        "id": id,
        "rf_id": id,
        "parent": parent,
        "fw_parent": 0,
        "seq_id": -1,
        "scope": 0,
        "tid": 1,
        "fw_tid": 0,
        "op_schema": "",
        "inputs": list(inputs),
        "input_types": list(types),
        "input_shapes": [[] for _ in inputs],
        "outputs": list(outputs),
        "output_types": list(output_types),
        "output_shapes": [[] for _ in outputs],
    }


def pytorch(rank: int) -> dict[str, Any]:
    """What a DLRM of TorchRec records in one step on two GPUs, cut down to what matters: ids, rows, gradients."""
    ints = "GenericList[Int,Int]"
    rows = [4, 6] if rank == 0 else [3, 5]
    got = [4, 3] if rank == 0 else [6, 5]
    nodes = [
        node(2, 1, "[pytorch|profiler|execution_graph|thread]"),
        node(3, 2, "## sparse_data_dist ##"),
        node(4, 3, "## all2all_data:kjt values ##"),
        # the operation around it is written behind it, as PyTorch does
        node(
            6,
            5,
            "record_param_comms",
            [[9, 9, 0, sum(rows), 8, "cuda:0"], 70, 940, rank, "all_to_allv", rows, got],
            ["Tensor(long int)", "Int", "Int", "Int", "String", ints, ints],
            [[10, 10, 0, sum(got), 8, "cuda:0"]],
            ["Tensor(long int)"],
        ),
        node(5, 4, "c10d::alltoall_base_"),
        node(8, 2, "record_param_comms", [70, 0, rank, "wait", [], []], ["Int", "Int", "Int", "String"]),
        node(9, 2, "All2All_Pooled_Req"),
        node(10, 9, "## alltoall_fwd_single ##"),
        node(
            11,
            10,
            "record_param_comms",
            [[1, 1, 0, 64, 4, "cuda:0"], 71, 940, rank, "all_to_allv", [], [32, 32]],
            ["Tensor(float)", "Int", "Int", "Int", "String", "GenericList[]", ints],
            [[2, 2, 0, 64, 4, "cuda:0"]],
            ["Tensor(float)"],
        ),
        node(12, 2, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"),
        node(
            13,
            12,
            "record_param_comms",
            [[[3, 3, 0, 100, 4, "cuda:0"]], 72, 940, rank, "allreduce", [], []],
            ["GenericList[Tensor(float)]", "Int", "Int", "Int", "String", "GenericList[]", "GenericList[]"],
            [[[3, 3, 0, 100, 4, "cuda:0"]]],
            ["GenericList[Tensor(float)]"],
        ),
    ]
    return {"schema": "1.0.1", "pid": 1, "time": "", "start_ts": 1, "nodes": nodes, "finish_ts": 2}


def chakra_graph(rank: int) -> dict[str, Any]:
    """A trace of one of two ranks in the JSON of ASTRA-sim's feeder, its nodes out of order.

    Both ranks compute 3 us and sum 8,000 bytes; then the first one sends the other 500.
    """
    ends = {"comm_size": 500, "comm_src": 0, "comm_dst": 1, "comm_tag": 4}
    nodes = [
        {
            "Id": 7,
            "Name": "sum",
            "NodeType": 7,
            "is_cpu_op": False,
            "data_deps": [3],
            "comm_type": 0,
            "comm_size": 8000,
            "comm_priority": 0,
            "tensor_size": 8000,
        },
        {"Id": 3, "Name": "layer", "NodeType": 4, "is_cpu_op": False, "runtime": 3, "data_deps": []},
        {"Id": 9, "Name": "hand over", "NodeType": 6 if rank else 5, "is_cpu_op": False, "data_deps": [7], **ends},
    ]
    return {"workload_graph": nodes}


SEND, REDUCE = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
# (name, launched at, begins at, for so long), in us: ids, rows, gradients, and computing. Rank 1 is late for rows.
RAN = {
    0: [(SEND, 1, 10, 20), ("gemm", 2, 40, 30), (SEND, 3, 100, 60), (REDUCE, 5, 200, 15), ("adam", 6, 150, 100)],
    1: [(SEND, 1, 12, 18), ("gemm", 2, 40, 110), (SEND, 3, 155, 5), (REDUCE, 5, 201, 14)],
}


def profile(rank: int) -> dict[str, Any]:
    """What PyTorch's profiler writes of the step of `pytorch`."""
    events = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python3"}}]
    for number, (name, launched, start, took) in enumerate(RAN[rank]):
        args = {"correlation": number + 7}
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": 1000 + start, "dur": took, "args": args})
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": 1000 + launched,
                "dur": 1,
                "args": args,
            }
        )
    whole = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
    return whole | {"traceEvents": events}
