"""Reads the text workloads of ASTRA-sim 1: a parallelism, and a line for each layer.

    HYBRID_DLRM 4                          the parallelism, and for this one the last bottom layer
    8                                      layers
    Embedding -1 300 ALLTOALL 98304 300 ALLTOALL 98304 300 NONE 0 98

A layer's line: name, a reserved number; forward time, collective and bytes; input gradient likewise; weight gradient
likewise; the update's time. Times are cycles of 1 ns. See `layers` for what waits for what. The bytes of an all-gather
are a rank's input there, and its output here.

DATA, MODEL, HYBRID_DATA_MODEL (model parallel in the first dimension, data parallel in the others), HYBRID_MODEL_DATA
(the reverse), HYBRID_TRANSFORMER with `model_parallel_NPU_group: n` (n neighbouring ranks) and HYBRID_DLRM are read.
"""

from __future__ import annotations

import math
from pathlib import Path

from recjax.errors import DataError
from recjax.lab.simulate.layers import Comm, Layer, training_loop
from recjax.lab.simulate.topology import Topology
from recjax.lab.simulate.workload import Workload

_COLLECTIVES = {
    "ALLREDUCE": "all_reduce",
    "ALLTOALL": "all_to_all",
    "ALLGATHER": "all_gather",
    "REDUCESCATTER": "reduce_scatter",
}
_KINDS = ("DATA", "MODEL", "HYBRID_DATA_MODEL", "HYBRID_MODEL_DATA", "HYBRID_TRANSFORMER", "HYBRID_DLRM")
_GROUP = "model_parallel_NPU_group:"

# Who takes part in a collective: dimensions, None for all ranks, or groups of ranks.
_Who = tuple[tuple[int, ...] | None, tuple[tuple[int, ...], ...], int]  # group, ranks, members


def read_text(path: Path, topology: Topology, iterations: int = 1) -> Workload:
    """A workload of a file.

    Args:
      path: of the file.
      topology: that it will run on; it decides who is in a group.
      iterations: of the training loop.

    Raises:
      DataError: the file cannot be read as such a workload; with the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a text workload: {error}.") from error
    words = [line.split() for line in lines]
    if not words or not words[0] or words[0][0] not in _KINDS:
        raise DataError(
            f"{path}, line 1: an ASTRA-sim text workload starts with its parallelism, one of {', '.join(_KINDS)}, not "
            f"{' '.join(words[0][:1]) if words and words[0] else 'an empty line'!r}."
        )
    kind, count = words[0][0], _number(path, 2, words[1][0] if len(words) > 1 and words[1] else "")
    body = [(i + 1, line) for i, line in enumerate(words) if i > 1 and line]
    if len(body) < count or count < 1:
        raise DataError(f"{path}, line 2: it announces {count} layers; {len(body)} lines follow.")
    activations, weights = _who(path, kind, words[0], topology)
    layers = [_layer(path, number, line, activations, weights) for number, line in body[:count]]
    last_bottom = None
    if kind == "HYBRID_DLRM":
        last_bottom = _number(path, 1, words[0][1] if len(words[0]) > 1 else "")
        if not 0 < last_bottom < count - 1:
            raise DataError(
                f"{path}, line 1: the last bottom layer is {last_bottom}; it must lie within 1..{count - 2}."
            )
    return training_loop(path.stem, layers, iterations, kind in ("DATA", "HYBRID_DLRM"), last_bottom)


def _layer(path: Path, number: int, words: list[str], activations: _Who, weights: _Who) -> Layer:
    if len(words) < 12:
        raise DataError(
            f"{path}, line {number}: a layer has 12 fields (see ASTRA-sim's workload README), not {len(words)}."
        )

    def comm(at: int, who: _Who) -> Comm | None:
        name, size = words[at], float(_number(path, number, words[at + 1]))
        if name == "NONE" or not size:
            return None
        if name not in _COLLECTIVES:
            raise DataError(
                f"{path}, line {number}: collective {name!r} is unknown: {', '.join(_COLLECTIVES)} or NONE."
            )
        group, ranks, members = who
        collective = _COLLECTIVES[name]
        return Comm(collective, size * members if collective == "all_gather" else size, group, ranks)

    forward, back, weight, update = (float(_number(path, number, words[at])) for at in (2, 5, 8, 11))
    return Layer(words[0], forward, comm(3, activations), back, comm(6, activations), weight, comm(9, weights), update)


def _who(path: Path, kind: str, header: list[str], topology: Topology) -> tuple[_Who, _Who]:
    """Ranks that take part in the collectives of activations and in those of weights."""
    inner, outer = (0,), tuple(range(1, len(topology.dims)))
    by_dims = {(): 1, inner: topology.shape[0], outer: math.prod(topology.shape[1:])}
    everyone: _Who = (None, (), topology.size)
    if kind == "HYBRID_DATA_MODEL":
        return (inner, (), by_dims[inner]), (outer, (), by_dims[outer])
    if kind == "HYBRID_MODEL_DATA":
        return (outer, (), by_dims[outer]), (inner, (), by_dims[inner])
    if kind != "HYBRID_TRANSFORMER":
        return everyone, everyone
    size = _number(path, 1, header[header.index(_GROUP) + 1] if _GROUP in header[:-1] else "")
    if size < 1 or topology.size % size:
        raise DataError(f"{path}, line 1: groups of {size} ranks do not divide {topology.size} ranks.")
    for d in range(len(topology.dims) + 1):
        if math.prod(topology.shape[:d]) == size:
            dims = tuple(range(len(topology.dims)))
            return (dims[:d], (), size), (dims[d:], (), topology.size // size)
    groups = [tuple(range(start, start + size)) for start in range(0, topology.size, size)]
    return (None, tuple(groups), size), (None, tuple(zip(*groups, strict=True)), len(groups))


def _number(path: Path, line: int, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DataError(f"{path}, line {line}: {text!r} stands where a whole number should.") from None
