"""Runs an exported program whose tables are on disk: with the rows that a batch needs, or with its pooled bags.

Needs NumPy alone, and is copied beside the loader of an export that has such tables.

Of rows the program gets those that were exported, encoded as they are: the same bits come out as with whole tables.
Pooled bags come from a cache keyed by (table, sorted ids, their weights), as in Ardestani et al., "Supporting massive
DLRM inference through software defined memory" (2021): a bag that was there before costs neither reads nor sums. They
are given to a second program of the export, as float32 rows of bags of one id each. Their sums are rounded once, and
those of the first program at each term, so scores differ by rounding.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_ENTRY = 300  # bytes that Python takes for one, about, beside its key and its vector

Run = Callable[[Any], Any]


def components(lookups: Sequence[tuple[str, str]], tables: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """Tables on disk with the features that read them, such that no two groups share any.

    Within a group ids are replaced alike, so a feature's tables are all in one group, and a table's features too.

    Args:
      lookups: (feature, table) of each lookup.
      tables: those on disk.
    """
    groups: list[tuple[set[str], set[str]]] = []
    for feature, table in lookups:
        if table not in tables:
            continue
        touched = [group for group in groups if feature in group[0] or table in group[1]]
        groups = [group for group in groups if group not in touched]
        features, on_disk = ({x for group in touched for x in group[side]} for side in (0, 1))
        groups.append((features | {feature}, on_disk | {table}))
    return [(sorted(features), sorted(on_disk)) for features, on_disk in groups]


def runner(
    run: Run, manifest: Mapping[str, Any], stores: Any, pooled_bytes: int
) -> tuple[Run, Mapping[str, PooledBags]]:
    """Runs a program of an export: by `with_rows`, or of so many bytes for each table's bags by `with_pooled`.

    Returns:
      what runs it, and the caches by table.
    """
    lookups, tables = manifest["lookups"], manifest["tables"]
    if not pooled_bytes:
        dtypes = {name: np.dtype(tables[name]["dtype"]) for name in stores.files}
        return with_rows(run, [(each["feature"], each["table"]) for each in lookups], stores, dtypes), {}
    features = {feature["name"]: feature for feature in manifest["inputs"]["features"]}
    groups = poolable(lookups, features, list(stores.files))
    caches = {table: PooledBags(pooled_bytes) for _, names in groups for table in names}
    return with_pooled(run, lookups, groups, stores, tables, caches), caches


def with_rows(run: Run, lookups: Sequence[tuple[str, str]], stores: Any, dtypes: Mapping[str, Any]) -> Run:
    """Runs a program whose tables are on disk: it gets the rows that a batch needs, and ids that say which.

    It gets as many rows as there are ids, zeros after those that are needed, so that their number makes no new shape.

    Args:
      run: runs the program, with "tables" among its inputs.
      lookups: as for `components`.
      stores: rows by table, `row_cache.CachedRows`.
      dtypes: table on disk -> that of its encoded rows.
    """
    groups = components(lookups, list(dtypes))
    if not groups:
        return run
    named = [name for features, _ in groups for name in features]
    of_group = np.arange(len(groups) + 1, dtype=np.int64) << 32
    group_of = np.repeat(of_group[:-1], [len(features) for features, _ in groups])

    def call(inputs: Mapping[str, Any]) -> Any:
        ids, tables = dict(inputs["ids"]), dict(inputs.get("tables", {}))
        sizes = [ids[name].size for name in named]
        keys = np.concatenate([ids[name].ravel() for name in named]) + np.repeat(group_of, sizes)
        numbers, places = np.unique(keys, return_inverse=True)
        edges = np.searchsorted(numbers, of_group).tolist()
        asked, room, at = {}, {}, 0
        for (features, names), start, stop in zip(groups, edges, edges[1:], strict=False):
            mine = numbers[start:stop] & 0xFFFFFFFF
            for name in features:
                own = places[at : at + ids[name].size] - start
                ids[name], at = own.reshape(ids[name].shape).astype(np.int32), at + len(own)
            for name in names:
                asked[name] = mine[: np.searchsorted(mine, stores.files[name].records)]  # all that it is asked for
                room[name] = max(1, sum(ids[each].size for each in features))
        for name, rows in stores.rows(asked).items():
            whole = np.zeros((room[name], rows.shape[1]), np.uint8)
            whole[: len(rows)] = rows
            tables[name] = whole.view(dtypes[name])
        return run({**inputs, "ids": ids, "tables": tables})

    return call


class PooledBags:
    """Sums of bags of one table, in a cache of some bytes, from which the least recently used leave.

    Attributes:
      hits: bags that were found.
      misses: bags that were summed.
    """

    def __init__(self, cache_bytes: int) -> None:
        """An empty cache."""
        self.hits, self.misses = 0, 0
        self._left = cache_bytes
        self._sums: collections.OrderedDict[bytes, np.ndarray] = collections.OrderedDict()

    def get(self, key: bytes) -> np.ndarray | None:
        """The sum of a bag, float32 [D]; None if it is not there."""
        found = self._sums.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._sums.move_to_end(key)
        return found

    def put(self, key: bytes, sum_D: np.ndarray) -> None:
        """Keeps the sum of a bag that was not there."""
        self._sums[key] = sum_D.copy()
        self._left -= self._size(key, sum_D)
        while self._left < 0:
            oldest, its_sum_D = self._sums.popitem(last=False)
            self._left += self._size(oldest, its_sum_D)

    def _size(self, key: bytes, sum_D: np.ndarray) -> int:
        return len(key) + sum_D.nbytes + _ENTRY


class Bags:
    """The bags of one feature of a batch, without the empty ones.

    Attributes:
      ids_L: int [L], of all bags end to end, within each in order.
      weights_L: float32 [L], of these.
      starts: first place in `ids_L` of each bag, and L.
      keys: bytes that tell each bag from any other.
      at: index of each among the batch's bags, empty ones too.
    """

    def __init__(self, inputs: Mapping[str, Any], name: str) -> None:
        """Reads the inputs of a program."""
        ids, weights = inputs["ids"][name], inputs["weights"].get(name)
        lengths_B = inputs["lengths"][name] if ids.ndim == 1 else np.full(len(ids), ids.shape[1])
        L = int(lengths_B.sum())
        flat, of_flat = ids.ravel()[:L], None if weights is None else weights.ravel()[:L]
        self.at = np.flatnonzero(lengths_B)
        self.lengths = lengths_B[self.at]
        bag_L = np.repeat(np.arange(len(self.at)), self.lengths)
        order = np.lexsort((flat, bag_L) if of_flat is None else (of_flat, flat, bag_L))
        self.ids_L = flat[order]
        self.weights_L = np.ones(L, np.float32) if of_flat is None else of_flat[order]
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)]).tolist()
        texts = [self.ids_L.astype("<i4").tobytes()] + ([] if of_flat is None else [self.weights_L.tobytes()])
        edges = list(zip(self.starts, self.starts[1:], strict=False))
        self.keys = [b"".join(text[4 * a : 4 * b] for text in texts) for a, b in edges]


def poolable(
    lookups: Sequence[Mapping[str, str]], features: Mapping[str, Mapping[str, Any]], tables: Sequence[str]
) -> list[tuple[list[str], list[str]]]:
    """The groups of `components` whose bags may come pooled: none is asked for row by row, and one has several ids.

    Args:
      lookups: of the manifest: "feature", "table", "pooling".
      features: those of the signature, by name.
      tables: those on disk.
    """
    groups = components([(lookup["feature"], lookup["table"]) for lookup in lookups], tables)
    of = {lookup["feature"] for lookup in lookups if lookup["pooling"] == "none"}
    several = {name for name, feature in features.items() if feature["ids_per_bag"] != 1}
    # A pair that is looked up twice would need the same ids for a sum and for a mean.
    pairs = collections.Counter((lookup["feature"], lookup["table"]) for lookup in lookups)
    twice = {feature for (feature, _), count in pairs.items() if count > 1}
    return [(names, on_disk) for names, on_disk in groups if set(names) & several and not set(names) & (of | twice)]


def with_pooled(
    run: Run,
    lookups: Sequence[Mapping[str, str]],
    groups: Sequence[tuple[Sequence[str], Sequence[str]]],
    stores: Any,
    tables: Mapping[str, Mapping[str, Any]],
    caches: Mapping[str, PooledBags],
) -> Run:
    """Runs a program that takes float32 rows of the tables of `poolable` groups, with a row for each bag.

    Args:
      run: runs that program.
      lookups: as for `poolable`.
      groups: what it gives.
      stores: rows by table, `row_cache.CachedRows`.
      tables: of the manifest: "held", "dim", "dtype".
      caches: table of a group -> its bags.
    """
    pooling = {(lookup["feature"], lookup["table"]): lookup["pooling"] for lookup in lookups}
    others = [name for name in stores.files if name not in caches]
    rest = with_rows(
        run,
        [(lookup["feature"], lookup["table"]) for lookup in lookups if lookup["table"] in others],
        stores,
        {name: np.dtype(tables[name]["dtype"]) for name in others},
    )

    def call(inputs: Mapping[str, Any]) -> Any:
        ids, lengths, weights = (dict(inputs[kind]) for kind in ("ids", "lengths", "weights"))
        rows = dict(inputs.get("tables", {}))
        found: dict[str, tuple[Sums, dict[str, int]]] = {}
        for names, on_disk in groups:
            bags = {name: Bags(inputs, name) for name in names}
            room = sum(len(inputs["lengths"].get(name, inputs["ids"][name])) for name in names)
            start = 1  # row 0 is the sum of nothing
            starts = {}
            for name, of in bags.items():
                shape, starts[name] = ids[name].shape, start
                places = start + np.arange(len(of.at), dtype=np.int32)
                ids[name] = np.zeros(shape, np.int32)
                if len(shape) == 1:
                    ids[name][: len(places)] = places
                    lengths[name] = (inputs["lengths"][name] > 0).astype(np.int32)
                else:
                    ids[name][:, 0] = places
                if name in weights:
                    weights[name] = np.ones(weights[name].shape, np.float32)
                start += len(of.at)
            for table in on_disk:
                rows[table] = np.zeros((room + 1, tables[table]["dim"]), np.float32)
                asked = {name: of for name, of in bags.items() if (name, table) in pooling}
                found[table] = Sums(asked, tables[table], caches[table]), starts
        read = stores.rows({table: sums.numbers for table, (sums, _) in found.items() if len(sums.numbers)})
        for table, (sums, starts) in found.items():
            for name, of, made in sums.made(read.get(table)):
                if pooling[name, table] == "mean" and len(ids[name].shape) == 1:  # of fixed bags the program divides
                    made = made / of.lengths[:, None].astype(np.float32)
                rows[table][starts[name] : starts[name] + len(made)] = made
        return rest({**inputs, "ids": ids, "lengths": lengths, "weights": weights, "tables": rows})

    return call


class Sums:
    """Sums of the bags of each feature that asks a table: those that the cache has not are made and kept.

    Attributes:
      numbers: rows that have to be read, distinct, ascending.
    """

    def __init__(self, asked: Mapping[str, Bags], table: Mapping[str, Any], cache: PooledBags) -> None:
        """Looks the bags of each feature up; `table` is of the manifest."""
        self._asked, self._table, self._cache = asked, table, cache
        self._found = [np.zeros((len(bags.at), table["dim"]), np.float32) for bags in asked.values()]
        self._absent: dict[bytes, list[tuple[np.ndarray, int]]] = {}
        ids, self._weights, self._lengths = [np.zeros(0, np.int32)], [], []
        for bags, sums in zip(asked.values(), self._found, strict=True):
            for n, key in enumerate(bags.keys):
                if key in self._absent:
                    self._absent[key].append((sums, n))
                elif (kept := cache.get(key)) is not None:
                    sums[n] = kept
                else:
                    self._absent[key] = [(sums, n)]
                    a, b = bags.starts[n : n + 2]
                    ids.append(bags.ids_L[a:b])
                    self._weights.append(bags.weights_L[a:b])
                    self._lengths.append(b - a)
        self.numbers, self._places = np.unique(np.concatenate(ids), return_inverse=True)

    def made(self, raw: np.ndarray | None) -> Iterator[tuple[str, Bags, np.ndarray]]:
        """Yields each feature, its bags, and their sums, float32 [bags, D], of the bytes of the rows; None: of none."""
        if raw is not None:
            rows = decoded(raw, self._table["held"], self._table["dim"]).astype(np.float64)
            starts = np.cumsum([0, *self._lengths[:-1]])
            weighted = rows[self._places] * np.concatenate(self._weights)[:, None]
            sums = np.add.reduceat(weighted, starts, axis=0).astype(np.float32)
            for (key, wanted), one in zip(self._absent.items(), sums, strict=True):
                self._cache.put(key, one)
                for into, n in wanted:
                    into[n] = one
        return zip(self._asked, self._asked.values(), self._found, strict=True)


def decoded(raw: np.ndarray, held: str, dim: int) -> np.ndarray:
    """Rows as float32 [n, dim], of the bytes that a file holds, uint8 [n, row_bytes]."""
    if held == "float32":
        return raw.view("<f4")
    if held == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    scale, bias = np.ascontiguousarray(raw[:, -8:]).view("<f4").T
    levels = raw[:, :-8]
    if held == "int4":
        levels = np.stack([levels & 15, levels >> 4], axis=2).reshape(len(raw), -1)[:, :dim]
    decoded_: np.ndarray = bias[:, None] + levels.astype(np.float32) * scale[:, None]
    return decoded_
