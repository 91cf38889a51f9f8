"""Tables whose rows are given to keys: their maps, and the rows that are drawn for the keys that come.

A batch's keys become numbers of rows before it is routed, in the order of the batches; whatever follows knows rows
alone. Before the step of the batch each row that was given gets the initial values of its key, which are those that the
row of this number would have in a table whose ids are numbers of rows, and its optimizer's state starts afresh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.data.batch import Batch
from recjax.embedding.buffers import GroupSlots, Tables, call_sizes, initial_rows_of_keys
from recjax.embedding.dynamic.id_map import Admitted, IdMap
from recjax.embedding.hot_rows import SegmentRows
from recjax.embedding.layout import BoundPlan
from recjax.embedding.quantize import nearest
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError, TrainingError
from recjax.utils.phases import Phase

DYNAMIC = "ids"  # name of the maps in a checkpoint

Maps = Mapping[str, Mapping[str, Any]]  # table -> name -> array, as `IdMap.state` has them


@dataclasses.dataclass(frozen=True)
class _Source:
    """A map, the features of the data whose ids it takes, and the tables whose rows it gives."""

    map: IdMap
    features: tuple[str, ...]
    tables: tuple[str, ...]


class DynamicTables:
    """The maps of all such tables of a run. It belongs to one state at a time, the newest."""

    def __init__(self, bound: BoundPlan, mesh: Mesh, seed: int, dtype: Any) -> None:
        """No key has a row.

        Args:
          bound: a plan with such tables, see `dynamic_tables`.
          mesh: its devices.
          seed: of the initial values.
          dtype: of tables that are not held in a reduced precision, and of slots.

        Raises:
          ConfigError: the plan does with them what they do not allow.
        """
        self._bound, self._mesh, self._seed, self._dtype = bound, mesh, seed, dtype
        require_possible(bound)
        tables = dynamic_tables(bound)
        self._sources: dict[str, _Source] = {}
        for table in tables:
            readers = tuple(dict.fromkeys(f.reads for f in bound.features if f.table == table))
            owner = next((of for of in self._sources.values() if readers[0] in of.features), None)
            if owner is None:
                options = bound.segments(table)[0][1].spec.ids
                assert options is not None
                self._sources[table] = _Source(IdMap(options), readers, (table,))
            else:  # weights of the first order, of the same ids
                self._sources[owner.tables[0]] = dataclasses.replace(owner, tables=(*owner.tables, table))
        self._make: dict[tuple[str, int], Any] = {}

    def clear(self) -> None:
        """Starts again from nothing."""
        for source in self._sources.values():
            source.map.clear()

    def find(self, batch: Batch) -> Batch:
        """The batch with the rows of its keys as they are now, those without one with the row of unknown keys."""
        bags = dict(batch.bags)
        for source in self._sources.values():
            for name in source.features:
                ids = bags[name].ids
                bags[name] = dataclasses.replace(bags[name], ids=source.map.find(keys_of(ids)).reshape(ids.shape))
        return batch.with_bags(bags)

    def advance(self, batch: Batch) -> tuple[Batch, dict[str, Admitted]]:
        """Takes in the next batch of the training, whole.

        Returns:
          the batch with rows in place of keys; and by the names of their tables those to be drawn.
        """
        bags, admitted = dict(batch.bags), {}
        for name, source in self._sources.items():
            keys = [keys_of(batch.bags[feature].ids) for feature in source.features]
            rows_L, admitted[name] = source.map.advance(keys[0] if len(keys) == 1 else np.concatenate(keys))
            cuts = np.cumsum([len(of) for of in keys])[:-1]
            for feature, of_feature in zip(source.features, np.split(rows_L, cuts), strict=True):
                ids = of_feature.reshape(batch.bags[feature].ids.shape)
                bags[feature] = dataclasses.replace(bags[feature], ids=ids)
        return batch.with_bags(bags), admitted

    def admit(self, state: Any, admitted: Mapping[str, Admitted]) -> Any:
        """Draws the rows that were given for a batch.

        Args:
          state: the `TrainState`, which is used up if there are any.
          admitted: what `advance` gave.
        """
        tables, slots = state.tables, state.slots
        for name, given in admitted.items():
            for start, size in call_sizes(len(given.rows_K)):
                of_call = slice(start, start + size)
                rows_C, keys_C = np.full(size, -1, np.int32), np.zeros(size, np.uint64)
                count = len(given.rows_K[of_call])
                rows_C[:count], keys_C[:count] = given.rows_K[of_call], given.keys_K[of_call].view(np.uint64)
                halves_2xC = np.stack([keys_C & np.uint64(2**32 - 1), keys_C >> np.uint64(32)]).astype(np.uint32)
                for table in self._sources[name].tables:
                    tables, slots = self._program(table, size)(tables, slots, self._homes(table, rows_C), halves_2xC)
        return state if tables is state.tables else dataclasses.replace(state, tables=tables, slots=slots)

    def _homes(self, table: str, rows_C: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(owner, home) of rows in each segment of a table and in its slots, int32 [2, C]; -1 where there is no row."""
        found = []
        for group, segment in self._bound.segments(table):
            owner_C, home_C, _ = segment.locate(np.maximum(rows_C, 0))
            own = group.slot_group
            slot_owner_C, slot_C = (owner_C, home_C) if own is group else divmod(home_C, own.rows)
            in_rows, in_slots = np.stack([owner_C, home_C]), np.stack([slot_owner_C, slot_C])
            none_C = rows_C < 0
            found.append(
                (np.where(none_C, -1, in_rows).astype(np.int32), np.where(none_C, -1, in_slots).astype(np.int32))
            )
        return found

    def _program(self, table: str, size: int) -> Any:
        """The jitted program that draws up to `size` rows of a table, in place."""
        if (table, size) not in self._make:
            self._make[table, size] = make_reset(self._bound, self._mesh, table, self._seed, self._dtype)
        return self._make[table, size]

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """All maps as arrays: table -> what `IdMap.state` gives."""
        return {name: source.map.state() for name, source in self._sources.items()}

    def load(self, state: Maps) -> None:
        """Goes on where the maps were that gave this `state`.

        Raises:
          TrainingError: a table has none there.
        """
        for name, source in self._sources.items():
            if name not in state:
                raise TrainingError(
                    f"the checkpoint does not say which keys have the rows of table {name!r}. It was written by a run "
                    "in which ids are numbers of rows: use the config in the run folder."
                )
            source.map.load({key: np.asarray(array) for key, array in state[name].items()})

    def figures(self) -> dict[str, dict[str, int]]:
        """By table: keys that have a row (`held`), keys that wait (`waiting`), and `IdMap.counts`."""
        maps = {name: source.map for name, source in self._sources.items()}
        return {name: {"held": of.held, "waiting": of.waiting, **of.counts} for name, of in maps.items()}


def refuse_dynamic(tables_of_run: Sequence[TableSpec], what: str) -> None:
    """Refuses what needs ids that are numbers of rows (ConfigError).

    Args:
      tables_of_run: of a run.
      what: is asked for, as a clause: "an exported model ...".
    """
    if table := next((table.name for table in tables_of_run if table.ids), None):
        raise ConfigError(
            f"embedding.tables.{table}.ids=dynamic: {what}, and has no map from keys to rows yet. `recjax predict` and "
            "`recjax eval` have it: use these on the run folder."
        )


def dynamic_tables(bound: BoundPlan) -> list[str]:
    """Names of the tables whose rows are given to keys, in the order of the features."""
    return [table for table in dict.fromkeys(f.table for f in bound.features) if bound.segments(table)[0][1].spec.ids]


def keys_of(ids: np.ndarray) -> np.ndarray:
    """Ids as int64 [L]; unsigned ones beyond that range by their bits."""
    flat: np.ndarray = np.ascontiguousarray(ids).ravel()
    return flat.view(np.int64) if flat.dtype == np.uint64 else flat.astype(np.int64, copy=False)


def make_reset(bound: BoundPlan, mesh: Mesh, table: str, seed: int, dtype: Any) -> Any:
    """The jitted program that draws rows of a table. It donates tables and slots; devices exchange nothing.

    Returns:
      reset(tables, slots, homes, halves) -> (tables, slots), of homes as `DynamicTables._homes` gives them and the
      lower and upper 32 bits of keys, uint32 [2, C].
    """
    parts = bound.segments(table)
    spec = parts[0][1].spec

    def body(tables: Tables, slots: GroupSlots, homes: Sequence[Any], halves_2xC: jax.Array) -> tuple[Any, Any]:
        with jax.named_scope(Phase.TIER_SWAP):
            tables, slots = dict(tables), {name: dict(of) for name, of in slots.items()}
            values_CxD = initial_rows_of_keys(seed, table, halves_2xC[0], halves_2xC[1], spec.dim, spec.scale)
            for (group, segment), (home_2xC, slot_2xC) in zip(parts, homes, strict=True):
                values = nearest(values_CxD, group.storage_dtype(dtype))
                rows = SegmentRows(group, segment)
                tables[group.name] = rows.put(tables[group.name], values, home_2xC)
                initial = group.slots()
                for name, block in slots[group.name].items():
                    shape = (len(values), spec.dim)[: block.ndim]
                    new = jnp.full(shape, initial[name].initial, block.dtype)
                    slots[group.name][name] = rows.of_slots.put(block, new, slot_2xC)
        return tables, slots

    embeddings: Any = ShardedEmbeddings(bound)
    specs = embeddings.partition_specs(), embeddings.slot_specs()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(*specs, P(), P()), out_specs=specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=(0, 1))


def require_possible(bound: BoundPlan) -> None:
    """Refuses a plan that does with tables whose rows are given to keys what these do not allow (ConfigError)."""
    for table in dynamic_tables(bound):
        where = f"embedding.tables.{table}.ids=dynamic"
        for what, found in (
            ("several processes", jax.process_count() > 1),
            ("replica groups (mesh.replicas)", bound.replicas > 1),
            ("rows on the host (tier.device_bytes)", bool(bound.cached)),
            ("hot rows (embedding.hot), or segments by rows of a plan", _divided(bound, table)),
        ):
            if found:
                raise ConfigError(
                    f"{where}: rows that are given to keys do not go with {what} yet. Leave that out, or leave "
                    "out ids=dynamic and prepare the data with a vocabulary (or with data.ids=hash)."
                )
        if any(group.optimizer.every_row for group, _ in bound.segments(table)):
            raise ConfigError(
                f"{where}: its optimizer has every_row=true, which would move rows that no key has. Set "
                f"embedding.tables.{table}.optimizer.every_row=false."
            )


def _divided(bound: BoundPlan, table: str) -> bool:
    return any(segment.band.chosen is not None for _, segment in bound.segments(table))
