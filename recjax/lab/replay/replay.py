"""Runs a trace's collectives again, without the model they came from.

The collectives of a step become one program: each waits for what it waited for in the trace, and those of one kind come
one after the other, as they do on a communicator. An all-to-all with true splits goes in equal blocks that hold them,
or ragged (`jax.lax.ragged_all_to_all`) on accelerators. Times come from the profiler, so nothing of the host's is in
them, and they compare with those of a trace that was measured likewise.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recjax.errors import ConfigError, DataError
from recjax.lab.replay import profile
from recjax.lab.replay.program import Slot

RANKS = "rank"  # the mesh axis
SCOPE = "collective_"
WARM = 2  # runs before those that count: the machine may have done something else before
MOST = 512  # collectives in one program
_SPIN_NS = 10**7  # of a calibration
_SPINS = 5  # of which the shortest counts
Splits = Literal["padded", "ragged"]


@dataclasses.dataclass(frozen=True)
class Times:
    """Measured times.

    Attributes:
      slots: ns of each slot, [repeats, ranks], nan for ranks that take no part; None without a profile.
      starts: when each rank began it, in ns, [repeats, ranks]; nan with several processes, each of which has a clock of
        its own. None without a profile.
      wall_ns: of each run of all programs.
    """

    slots: list[np.ndarray] | None
    starts: list[np.ndarray] | None
    wall_ns: list[float]


def ranks_mesh(devices: Sequence[Any]) -> Mesh:
    """One rank on each device."""
    return Mesh(np.array(devices), (RANKS,))


class Prepared:
    """Slots that are compiled."""

    def __init__(
        self,
        slots: Sequence[Slot],
        mesh: Mesh,
        splits: Splits = "padded",
        gaps: bool = False,
        between_bytes: int = 0,
        every: int = 1,
        name: str = "replay",
    ) -> None:
        """Compiles them.

        Args:
          slots: of a trace whose ranks are the devices of `mesh`.
          mesh: from `ranks_mesh`; its devices may belong to several processes, all of which do this.
          splits: how all-to-alls with true splits go.
          gaps: whether to compute between them for as long as the trace did.
          between_bytes: memory that each rank passes over before collectives, as computing does: what the collective
            reads and writes is then in no cache, and its ranks do not come at the same moment.
          every: before which collectives: each, or from the first on every so many-th.
          name: by which a profile knows it; no other's name may begin with it where several are measured together.

        Raises:
          ConfigError: ragged splits on CPU.
          DataError: a collective that cannot be run, such as one of some ranks alone, where the others do not form
            groups of that size.
        """
        if splits == "ragged" and mesh.devices.flat[0].platform == "cpu":
            raise ConfigError("--splits ragged: JAX has no ragged all-to-all on CPU. Use --splits padded.")
        turns_per_ns = _calibrate(mesh) if gaps and any(any(s.gap_ns.values()) for s in slots) else 0.0
        self._mesh = mesh
        self._parts = [slots[i : i + MOST] for i in range(0, len(slots), MOST)]
        self._names = [f"{name}_{number:04}" for number in range(len(self._parts))]
        self._programs = [
            _program(part, mesh, splits, turns_per_ns, of_part, between_bytes, every)
            for of_part, part in zip(self._names, _cut(self._parts), strict=True)
        ]

    def run(self) -> float:
        """Runs them once: how long it took, in ns."""
        began = time.perf_counter_ns()
        for call, _ in self._programs:
            done = call()
        jax.block_until_ready(done)
        return float(time.perf_counter_ns() - began)

    def times(self, by_module: Mapping[str, Sequence[profile.Happened]], wall_ns: list[float]) -> Times:
        """Times of the last of their runs, from a profile.

        Args:
          by_module: program -> its events in the profile.
          wall_ns: how long each of the last runs took.
        """
        found: list[np.ndarray] = []
        starts: list[np.ndarray] = []
        for of_part, (_, names), part in zip(self._names, self._programs, self._parts, strict=True):
            module = f"jit_{of_part}"
            happened = [event for name in by_module if name.startswith(module) for event in by_module[name]]
            lines = profile.timelines(happened, module, list(self._mesh.devices.flat), len(wall_ns))
            durations, begun = _measured(lines, names, part, len(wall_ns), self._mesh)
            found += durations
            starts += begun
        if all(np.isnan(ns).all() for ns in found):
            return Times(None, None, wall_ns)
        return Times(found, starts, wall_ns)


def measure(prepared: Sequence[Prepared], repeats: Sequence[int]) -> list[Times]:
    """Runs each `WARM` times and then as often as `repeats` says, one after the other, under one profile."""
    wall_ns: list[list[float]] = []

    def run() -> None:
        for one, count in zip(prepared, repeats, strict=True):
            for _ in range(WARM):
                one.run()
            wall_ns.append([one.run() for _ in range(count)])

    taken = profile.profile(run, None)
    by_module: dict[str, list[profile.Happened]] = {}
    try:
        for event in profile.events(taken):
            by_module.setdefault(str(event[3].get("hlo_module", "")), []).append(event)
    finally:
        profile.discard(taken)
    return [one.times(by_module, of_one) for one, of_one in zip(prepared, wall_ns, strict=True)]


def _cut(parts: Sequence[Sequence[Slot]]) -> list[list[Slot]]:
    """Slots by program, with dependencies within each alone: one program waits for all of the one before."""
    found, first = [], 0
    for part in parts:
        found.append([dataclasses.replace(s, deps=tuple(d - first for d in s.deps if d >= first)) for s in part])
        first += len(part)
    return found


def _program(
    slots: Sequence[Slot], mesh: Mesh, splits: Splits, turns_per_ns: float, name: str, between_bytes: int, every: int
) -> tuple[Callable[[], jax.Array], dict[int, list[str]]]:
    """A call that runs slots, and slot -> the names of its instructions."""
    ranks = mesh.devices.size
    shapes = [_Shape.of(slot, ranks, splits) for slot in slots]
    turns = np.zeros((ranks, len(slots)), np.int32)
    for i, slot in enumerate(slots):
        for rank, ns in slot.gap_ns.items():
            turns[rank, i] = min(2**31 - 1, int(ns * turns_per_ns))
    # What the compiler must not know, so that it neither drops a wait nor makes a collective of constants simpler.
    passed = np.zeros((ranks, between_bytes // 4), np.float32)
    given = [np.zeros((ranks, 1), np.int32), turns, passed, *(shape.sizes for shape in shapes)]
    sharding = NamedSharding(mesh, P(RANKS))
    arrays = [jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in given]

    def body(zero_1x1: jax.Array, turns_1xS: jax.Array, passed_1xM: jax.Array, *sizes: jax.Array) -> jax.Array:
        zero = zero_1x1[0, 0]
        done: list[jax.Array] = []
        last: dict[str, int] = {}
        for i, (slot, shape) in enumerate(zip(slots, shapes, strict=True)):
            before = sorted({*slot.deps, *([last[slot.kind]] if slot.kind in last else [])})
            ready = sum((done[d] for d in before), zero)
            if turns_per_ns:
                ready = _spin(ready, turns_1xS[0, i]) * zero
            if between_bytes and i % every == 0:
                ready = jnp.sum(passed_1xM + ready.astype(passed_1xM.dtype)).astype(jnp.int32) * zero
            with jax.named_scope(f"{SCOPE}{i}"):
                done.append(shape.run(slot.kind, ready, sizes[i][0]) * zero)
            last[slot.kind] = i
        return sum(done, zero).reshape(1)

    body.__name__ = name
    specs = (P(RANKS),) * len(arrays)
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(RANKS), check_vma=False))
    hlo = step.lower(*arrays).compile().as_text() or ""
    return lambda: step(*arrays), _instructions(hlo)


def _instructions(hlo: str) -> dict[int, list[str]]:
    """Slot -> its collectives in the program's text, by the scope: one, if the compiler combined all of it."""
    from recjax.planning.compiled_collectives import collectives

    names = {c.name for c in collectives(hlo)}
    found: dict[int, list[str]] = {}
    for name, slot in re.findall(rf'%(\S+) = .*op_name="[^"]*/{SCOPE}(\d+)/', hlo):
        if name in names:
            found.setdefault(int(slot), []).append(name)
    return found


def _spin(start: jax.Array, turns: jax.Array) -> jax.Array:
    """Computes for some turns; what comes of it depends on all of them."""
    return jax.lax.fori_loop(0, turns, lambda _, x: x * 1664525 + 1013904223, start)


def _calibrate(mesh: Mesh) -> float:
    """Turns of `_spin` in a nanosecond on a device of this process that nothing interrupts."""
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    spin = jax.jit(_spin)

    def took_ns(turns: int) -> int:
        args = jax.device_put((np.int32(0), np.int32(turns)), device)
        spin(*args).block_until_ready()
        began = time.perf_counter_ns()
        spin(*args).block_until_ready()
        return time.perf_counter_ns() - began

    turns = 1024
    while took_ns(turns) <= _SPIN_NS and turns < 2**30:
        turns *= 4
    return turns / min(took_ns(turns) for _ in range(_SPINS))  # other programs can only make it longer


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Shape of a slot's buffers.

    Attributes:
      groups: of all ranks, also of those that take no part: equally many in each.
      dtype: of the elements.
      length: of a rank's buffer before, in elements.
      sizes: [ranks, ...], what of it means something: send sizes, receive sizes and offsets of a ragged all-to-all,
        [ranks, 4, n]; otherwise [ranks, 1].
      ragged: elements of the result of a ragged all-to-all, else 0.
      parts: elements of the arrays of an all-reduce, if it is of several.
    """

    groups: list[list[int]]
    dtype: Any
    length: int
    sizes: np.ndarray
    ragged: int = 0
    parts: tuple[int, ...] = ()

    @staticmethod
    def of(slot: Slot, ranks: int, splits: Splits) -> _Shape:
        dtype = jnp.dtype("uint8" if slot.dtype in ("", "bool") else slot.dtype)
        if dtype.itemsize == 8 and not jax.config.values["jax_enable_x64"]:
            dtype = jnp.dtype({"int64": "int32", "uint64": "uint32", "float64": "float32"}[slot.dtype])
        item, n = dtype.itemsize, len(slot.groups[0])
        groups = _all(slot, ranks)
        first = next(iter(slot.events.values()))
        none = np.zeros((ranks, 1), np.int32)
        if slot.kind == "all_to_all" and splits == "ragged" and first.sends:
            return _ragged(slot, groups, dtype, ranks)
        if slot.kind == "all_to_all":
            return _Shape(groups, dtype, n * max(1, -(-slot.block_bytes // item)), none)
        longest = max(e.in_bytes for e in slot.events.values())
        if slot.kind == "reduce_scatter":
            return _Shape(groups, dtype, n * max(1, -(-longest // (item * n))), none)
        parts = tuple(max(1, -(-size // item)) for size in first.parts)
        return _Shape(groups, dtype, max(1, -(-longest // item)), none, parts=parts)

    def run(self, kind: str, ready: jax.Array, sizes: jax.Array) -> jax.Array:
        """The collective, after `ready`; a number of its result."""
        x = jnp.full(self.length, ready.astype(self.dtype)).at[0].set(ready.astype(self.dtype) + 1)
        groups: Any = {"axis_index_groups": self.groups if len(self.groups) > 1 else None}
        if self.ragged:
            out = jnp.zeros(self.ragged, self.dtype)
            sends, receives, starts, lands = sizes
            y = jax.lax.ragged_all_to_all(x, out, starts, sends, lands, receives, axis_name=RANKS, **groups)
        elif kind == "all_to_all":
            y = jax.lax.all_to_all(x, RANKS, 0, 0, tiled=True, **groups)
        elif kind == "all_gather":
            y = jax.lax.all_gather(x, RANKS, axis=0, tiled=True, **groups)
        elif kind == "reduce_scatter":
            y = jax.lax.psum_scatter(x, RANKS, scatter_dimension=0, tiled=True, **groups)
        elif self.parts:
            # all different, or the compiler would send equal ones once
            arrays = [x[:1] + jnp.arange(i, i + size).astype(self.dtype) for i, size in enumerate(self.parts)]
            y = sum(y[:1] for y in jax.lax.psum(arrays, RANKS, **groups))
        else:  # all_reduce, and what XLA has no collective for on all back ends: broadcast, reduce, barrier
            y = jax.lax.psum(x, RANKS, **groups)
        return y[0].astype(jnp.int32)


def _all(slot: Slot, ranks: int) -> list[list[int]]:
    """The groups, and the ranks that take no part in groups as large: XLA wants all in one."""
    n = len(slot.groups[0])
    rest = [r for r in range(ranks) if not any(r in group for group in slot.groups)]
    if slot.kind in ("send", "recv", "collective_permute", "gather", "scatter"):
        raise DataError(f"{slot.kind} ({slot.name}) cannot be replayed, only collectives of whole groups.")
    if len(rest) % n:
        raise DataError(
            f"{slot.kind} of {n} ranks ({slot.name or slot.phase}): the other {len(rest)} of {ranks} do not form "
            "groups of that size, which XLA asks for."
        )
    return [list(group) for group in slot.groups] + [rest[i : i + n] for i in range(0, len(rest), n)]


def _ragged(slot: Slot, groups: list[list[int]], dtype: Any, ranks: int) -> _Shape:
    """True splits, in elements: sizes [ranks, 4, n] of what goes, what comes, where it starts, and where it lands."""
    item, n = dtype.itemsize, len(groups[0])
    sizes = np.zeros((ranks, 4, n), np.int32)
    for group in slot.groups:
        for rank in group:
            event = slot.events[rank]
            sizes[rank, 0] = [-(-b // item) for b in event.sends]
            sizes[rank, 1] = [-(-b // item) for b in event.receives]
            sizes[rank, 2] = np.cumsum(sizes[rank, 0]) - sizes[rank, 0]
        for place, rank in enumerate(group):  # on each peer it lands after what comes from ranks before this one
            sizes[rank, 3] = sizes[list(group[:place]), 0].sum(axis=0)
    length, result = (max(1, int(sizes[:, side].sum(axis=1).max())) for side in (0, 1))
    return _Shape(groups, dtype, length, sizes, result)


def _measured(
    lines: dict[tuple[int, int], tuple[profile.Span, ...]],
    names: dict[int, list[str]],
    slots: Sequence[Slot],
    repeats: int,
    mesh: Mesh,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Time that each slot took, and its beginning, in ns, [repeats, ranks]; from several processes only the first."""
    found = np.full((len(slots), repeats, mesh.devices.size), np.nan)
    begun = found.copy()
    for (rank, run), spans in lines.items():
        starts = {span.name: span.start for span in reversed(spans)}
        ends = {span.name: span.end for span in spans}
        for i, slot in enumerate(slots):
            own = [name for name in names.get(i, ()) if name in starts]
            if own and rank in slot.events:
                end = max(ends.get(re.sub(r"-start\b", "-done", name), ends[name]) for name in own)
                begun[i, run, rank] = min(starts[name] for name in own)
                found[i, run, rank] = end - begun[i, run, rank]
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        found = np.nanmax(multihost_utils.process_allgather(np.nan_to_num(found, nan=-1)), axis=0)
        found[found < 0] = np.nan
        begun[:] = np.nan
    return list(found), list(begun)
