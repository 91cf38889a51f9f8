"""Kernels of PyTorch's profiler (Kineto), from its Chrome traces: when the collectives of an execution trace ran.

An execution trace says what every rank sent and not when; the profile of the same steps says when kernels ran and, of
older versions, not what they sent. Read are NCCL's kernels in the order in which they were launched, and all other work
on the GPU. A file is of the rank in its `distributedInfo`, or else of the first number in its name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recjax.errors import DataError
from recjax.lab.formats.fields import Fields, parse_file
from recjax.lab.formats.files import GZIPPED
from recjax.lab.formats.names import kind_of
from recjax.lab.formats.trace import MAX_EVENTS, MAX_RANKS

_NCCL = re.compile(r"nccl(?:Dev)?Kernel_?([A-Za-z]+)")
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_SEND_RECV = ("all_to_all", "send", "recv", "gather", "scatter")  # NCCL has one kernel for them
_LATEST_US = 2**53


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a collective.

    Attributes:
      name: of the kernel.
      kinds: of the events that it may be of.
      start_ns, end_ns: on a clock that all files of a machine share.
    """

    name: str
    kinds: tuple[str, ...]
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class Profile:
    """The work of one rank's GPU.

    Attributes:
      source: its file, for messages.
      collectives: NCCL's kernels, in the order of their launch.
      others: (start, end) in ns of all other work, by its beginning.
    """

    source: str
    collectives: tuple[Kernel, ...]
    others: tuple[tuple[int, int], ...]


def read(folder: Path) -> dict[int, Profile]:
    """Returns rank -> its profile, of all .json and .json.gz files in a folder.

    Raises:
      DataError: no such folder or file, two files of a rank, or one that is damaged or no such profile.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder. Name the one that holds the profiler's files, one for each rank.")
    found: dict[int, Profile] = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob(f"*.json{GZIPPED}")]):
        rank, profile = _read(path)
        if rank in found:
            raise DataError(f"{folder}: {Path(found[rank].source).name} and {path.name} are both of rank {rank}.")
        found[rank] = profile
    if not found:
        raise DataError(f"{folder}: there is no .json file (or .json.gz) of PyTorch's profiler in it.")
    return found


def _read(path: Path) -> tuple[int, Profile]:
    whole = Fields(parse_file(path), str(path))
    events = whole.items("traceEvents")
    if len(events) > MAX_EVENTS:
        raise DataError(f"{path}: {len(events):,} events, more than the {MAX_EVENTS:,} that a profile may have.")
    base_ns = whole.whole("baseTimeNanoseconds", 0)
    launched: dict[Any, float] = {}  # correlation -> when
    kernels: list[tuple[Any, Kernel]] = []
    others: list[tuple[int, int]] = []
    for number, values in enumerate(events):
        event = Fields(values, f"{path}, event {number}")
        category = event.values.get("cat")
        if event.values.get("ph") != "X" or category not in (*_GPU, *_LAUNCHES):
            continue
        start_us, took_us = (_microseconds(event, key) for key in ("ts", "dur"))
        args = event.values.get("args")
        correlation = args.get("correlation") if isinstance(args, Mapping) else None
        correlation = correlation if isinstance(correlation, (int, str)) else None
        if category in _LAUNCHES:
            launched[correlation] = start_us
            continue
        start_ns = base_ns + round(start_us * 1000)
        end_ns = start_ns + round(took_us * 1000)
        name = event.text("name")
        if nccl := _NCCL.search(name):
            kinds = _SEND_RECV if nccl[1] == "SendRecv" else (kind_of(nccl[1], event.place),)
            kernels.append((correlation, Kernel(name, kinds, start_ns, end_ns)))
        else:
            others.append((start_ns, end_ns))
    kernels.sort(key=lambda one: (launched.get(one[0], one[1].start_ns / 1e3 - base_ns / 1e3), one[1].start_ns))
    return _rank(whole, path), Profile(str(path), tuple(k for _, k in kernels), tuple(sorted(others)))


def _microseconds(event: Fields, key: str) -> float:
    value = event.values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LATEST_US:
        event.refuse(key, value, "a time in microseconds")
    return float(value)


def _rank(whole: Fields, path: Path) -> int:
    if "distributedInfo" in whole.values:
        rank = whole.fields("distributedInfo").whole("rank")
    elif number := re.search(r"\d{1,9}", path.name):
        rank = int(number[0])
    else:
        raise DataError(f"{path}: neither its distributedInfo nor its name says which rank it is of.")
    if rank >= MAX_RANKS:
        raise DataError(f"{path}: rank {rank:,}, but a trace has at most {MAX_RANKS:,} ranks.")
    return rank
