"""Rows with their optimizer's state on the way between a cache on the devices and records on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.embedding.buffers import Draws, Form, call_sizes, initial_values
from recjax.parallel.mesh import put, sharded
from recjax.tiers.caches import ROWS, Arrays, CachedGroup
from recjax.utils.phases import Phase


class InitialRecords:
    """Records of rows that were never written: drawn by the device that would hold them, so that the bits are its."""

    def __init__(self, cached: CachedGroup, seed: int, device: Any) -> None:
        """Draws nothing yet; `device` is one of the mesh."""
        self._cached, self._seed, self._device = cached, seed, device

    def make(self, part: int, homes_K: np.ndarray) -> np.ndarray:
        """The records of some homes of a part of the buffer, uint8 [K, bytes]."""
        cached, slots = self._cached, self._cached.group.slots()
        records = np.empty((len(homes_K), cached.record_bytes), np.uint8)
        for start, size in call_sizes(len(homes_K)):
            padded, own = np.zeros(size, np.int32), homes_K[start : start + size]
            padded[: len(own)] = own
            drawn = self._draw(size)(jax.device_put(padded, self._device), np.int32(part))
            arrays = {ROWS: np.asarray(drawn)[: len(own)]}
            for name, slot in slots.items():
                arrays[name] = np.full((len(own), *slot.shape), slot.initial, cached.dtype)
            records[start : start + len(own)] = cached.join(arrays)
        return records

    @functools.cache  # noqa: B019  # lives as long as a training
    def _draw(self, size: int) -> Callable[..., jax.Array]:
        group = self._cached.group
        draws = jax.device_put(Draws.of(group, [self._seed]), self._device)
        return functools.partial(_drawing(Form.of(group, group.storage_dtype(self._cached.dtype)), size), draws)


@functools.lru_cache(maxsize=256)
def _drawing(form: Form, size: int) -> Callable[..., jax.Array]:
    """The program that draws so many rows of a part of a buffer: `Draws`, homes and the part -> values."""

    def draw(draws: Draws, homes_C: jax.Array, part: jax.Array) -> jax.Array:
        return initial_values(form, draws, part, size)(homes_C)

    return jax.jit(draw)


class Mover:
    """The programs that take rows out of a group's cache, and that put others there. One thread calls them.

    Of several processes all call them equally often, with slots of their own parts; none waits for another in them.
    """

    def __init__(self, cached: CachedGroup, mesh: Mesh) -> None:
        """Compiles nothing yet."""
        self._cached, axes = cached, cached.group.partition_axes
        self._sharding, spec = sharded(mesh, axes), P(axes)

        def take(buffers: Arrays, slots_C: jax.Array) -> Arrays:
            with jax.named_scope(Phase.TIER_SWAP):
                return {name: x.at[slots_C].get(mode="fill", fill_value=0) for name, x in buffers.items()}

        def put(buffers: Arrays, homes_R: Any, slots_C: Any, rows: Arrays, homes_C: Any) -> tuple[Arrays, Any]:
            def write(x: jax.Array, new: jax.Array) -> jax.Array:
                return x.at[slots_C].set(new, mode="drop", unique_indices=True)

            with jax.named_scope(Phase.TIER_SWAP):
                return {name: write(x, rows[name]) for name, x in buffers.items()}, write(homes_R, homes_C)

        def mapped(body: Callable[..., Any], donated: tuple[int, ...]) -> Any:
            made = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            return jax.jit(made, donate_argnums=donated)

        self._take, self._put = mapped(take, ()), mapped(put, (0, 1))

    def take(self, buffers: Arrays, slots: Sequence[np.ndarray], longest: int) -> list[tuple[int, Arrays]]:
        """Begins to copy rows to the host.

        Args:
          buffers: of the group, ROWS and slots.
          slots: of each part, which of its rows; those of other processes' parts may be left empty.
          longest: rows of the longest list.

        Returns:
          (first row of each part's list, arrays [parts * C, ...] with C of each) for each call.
        """
        found = []
        for start, size in call_sizes(longest):
            out = self._take(buffers, self._placed(self._slots(slots, start, size)))
            for array in out.values():
                array.copy_to_host_async()
            found.append((start, out))
        return found

    def put(
        self,
        buffers: Arrays,
        homes: Any,
        slots: Sequence[np.ndarray],
        come: Sequence[np.ndarray],
        records: Sequence[np.ndarray],
        longest: int,
    ) -> tuple[Arrays, Any]:
        """Writes rows to slots of a cache.

        Args:
          buffers: of the group; used up.
          homes: int32 [parts * R], beside them; used up.
          slots: of each part; those of other processes' parts may be left empty.
          come: of each part the homes of the new rows; likewise.
          records: of each part of this process those of the new rows, uint8 [K, record]; of others [0, record].
          longest: rows of the longest list of all parts.
        """
        for start, size in call_sizes(longest):
            at = self._placed(self._slots(slots, start, size))
            some = [own[start : start + size] for own in records]
            new = {
                name: self._placed(self._padded([self._cached.split(own, name) for own in some], 0, size))
                for name in buffers
            }
            buffers, homes = self._put(buffers, homes, at, new, self._placed(self._padded(come, start, size)))
        return buffers, homes

    def _slots(self, slots: Sequence[np.ndarray], start: int, size: int) -> np.ndarray:
        """Slots of all parts, int32 [parts * C]; beyond R, and all different, where there are none left."""
        out = np.tile(self._cached.group.rows + np.arange(size, dtype=np.int32), (len(slots), 1))
        for n, slots_K in enumerate(slots):
            own = slots_K[start : start + size]
            out[n, : len(own)] = own
        return out.ravel()

    @staticmethod
    def _padded(arrays: Sequence[np.ndarray], start: int, size: int) -> np.ndarray:
        out = np.zeros((len(arrays), size, *arrays[0].shape[1:]), arrays[0].dtype)
        for n, array in enumerate(arrays):
            own = array[start : start + size]
            out[n, : len(own)] = own
        return out.reshape(-1, *out.shape[2:])

    def _placed(self, x: np.ndarray) -> jax.Array:
        placed: jax.Array = put(x, self._sharding)
        return placed
