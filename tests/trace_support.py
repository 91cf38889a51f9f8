"""A small communication trace made by hand, and traces in a folder."""

from __future__ import annotations

from pathlib import Path

from recjax.comms.formats import FORMATS
from recjax.comms.trace import COMPUTE, Event, Trace

ALL, HALVES = (0, 1, 2, 3), ((0, 1), (2, 3))


def by_hand() -> Trace:
    """Four ranks, two steps' worth of kinds: a ragged all-to-all over all, all-reduces in halves, and computing."""
    ranks = {}
    for rank in ALL:
        half = HALVES[rank // 2]
        sends = tuple(8 * (rank + peer) for peer in ALL)  # symmetric: what r sends to p, p sends to r
        ranks[rank] = (
            Event(0, COMPUTE, start_ns=0, duration_ns=4000),
            Event(2, "all_to_all", "row_exchange", "tables", "all-to-all.1", 0, "float32", ALL, 256, 256, sends, sends,
                  deps=(0,), start_ns=5000, duration_ns=7000),
            Event(3, "all_reduce", "dense_grads", "", "all-reduce", 0, "float32", half, 400, 400),
            Event(4, "all_gather", "id_exchange", "", "all-gather", 0, "int32", ALL, 16, 64),
            Event(5, "reduce_scatter", "dense_grads", "", "rs", 1, "bfloat16", half, 64, 32, deps=(2,)),
            Event(6, COMPUTE, step=1, deps=(5,), start_ns=13000, duration_ns=2000),
            Event(7, "all_reduce", "finite_check", "", "psum", 1, "int32", ALL, 4, 4, deps=(4, 6), start_ns=16000,
                  duration_ns=1000),
        )  # fmt: skip
    return Trace(4, ranks, {"source": "by hand", "config": {"train.batch_size": "8"}})


def save(trace: Trace, folder: Path, format: str = "recjax") -> Path:
    """Writes a trace as `recjax trace --format` does."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FORMATS[format].write(trace).items():
        (folder / name).write_bytes(content)
    return folder
