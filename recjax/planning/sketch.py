"""The graph of a training step from sizes alone: what a planner compares plans by, without compiling one.

It has the nodes that weigh: collectives, products, passes over rows, sorts, with the classes and sizes that the
compiled step has, and how many further small kernels go with them (`launches`, counted in compiled steps). So the cost
models and the schedule are those of a compiled step's graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from recjax.embedding.exchange.events import Event
from recjax.embedding.segment_sums import LEAST_TERMS
from recjax.planning.graph import Graph, Node
from recjax.planning.step_sizes import Buffer, DenseSizes, Owned, Rows, StepSizes, Vectors
from recjax.planning.work import Work, gather, matmul, scatter, sort
from recjax.utils.phases import Phase

_ID = 4.0  # bytes of an id
_ITEM = {"bf16": 2, "tf32": 4, "tf32x3": 4, "f32": 4, "f64": 8}  # bytes of an operand


class _Writer:
    """Appends nodes, each after those that it waits for."""

    def __init__(self, sizes: StepSizes, shared: bool) -> None:
        self.nodes: list[Node] = []
        self.sizes, self.shared = sizes, shared

    def kernel(self, name: str, part: str, works: Sequence[Work], after: Sequence[int], launches: int = 1) -> int:
        """Adds kernels that run one after the other."""
        place = len(self.nodes)
        self.nodes.append(
            Node(name, "fusion", part, "kernel", tuple(works), tuple(sorted(set(after))), launches=launches)
        )
        return place

    def collective(
        self, kind: str, part: str, moved: float, after: Sequence[int], devices: int = 0, hosts: int = 0
    ) -> int:
        """Adds a collective over the devices of a replica group, or those given.

        It says over how many hosts only where the mesh has several, as graphs of compiled steps do: else the machine
        says how many devices a host has.
        """
        devices = devices or self.sizes.devices
        if devices == 1:
            return self.kernel(kind, part, [_pass("copy", 2 * moved)], after)
        sizes = {"bytes": max(moved, 1.0), "devices": float(devices)}
        if hosts or self.sizes.hosts > 1:
            sizes["hosts"] = float(hosts or self.sizes.hosts)
        place = len(self.nodes)
        work = Work(kind, sizes, 0.0, moved)
        name = kind.replace("_", "-")
        self.nodes.append(Node(name, name, part, "collective", (work,), tuple(sorted(set(after)))))
        return place

    def over_all(self, kind: str, part: str, moved: float, after: Sequence[int]) -> int:
        """Adds a collective over the devices of all replica groups."""
        hosts = max(self.sizes.all_hosts, self.sizes.hosts)
        return self.collective(kind, part, moved, after, self.sizes.all_devices, hosts if hosts > 1 else 0)

    def exchange(self, events: Iterable[Event], after: Sequence[int]) -> int:
        """Adds collectives of an exchange, one by one; on a CPU a device first cuts what it sends into pieces."""
        for event in events:
            kind, N, H = event.kind.removeprefix("ragged-").replace("-", "_"), self.sizes.devices, self.sizes.hosts
            if self.shared and kind == "all_to_all":
                cut = [_pass("copy", 2 * event.padded_bytes)]
                after = [self.kernel("cut", event.phase, cut, after, launches=event.devices)]
            hosts = len({number // (N // H) for number in event.members}) if H > 1 else 0
            if event.across_groups:
                apart = self.sizes.all_hosts // H  # hosts of the devices that take part
                hosts = apart if apart > 1 else 0
            after = [self.collective(kind, event.phase, event.padded_bytes, after, event.devices, hosts)]
        (last,) = after
        return last


def _in(events: Iterable[Event], phase: Phase, inside: bool | None = None) -> list[Event]:
    """The events of a phase; those inside hosts, or the others, unless None."""
    return [event for event in events if event.phase == phase and inside in (None, event.inside)]


def sketch(sizes: StepSizes, dense: DenseSizes, shared: bool = False) -> Graph:
    """The graph of a step.

    Args:
      sizes: of the tables' part.
      dense: of the dense part.
      shared: whether devices compute on the cores of their host.
    """
    write = _Writer(sizes, shared)
    if not sizes.host_routes:
        entries = sizes.ids + sum(sizes.lists)
        works = [sort(max(2.0, entries), 2, 8 * entries), _pass("elementwise", 40 * entries)]
        write.kernel("route", "route", works, [], launches=30)
    looked_up = [(g.buffer, g.ids, g.bags, sizes.devices * g.list_rows, _fetch(write, g)) for g in sizes.rows]
    pooled = [_pooled_forward(write, v) for v in sizes.vectors]
    for c in sizes.copies:
        found = write.kernel(c.buffer.name, "gather", [_rows_gather(c.asked, c.buffer.value_bytes, c.buffer.rows)], [])
        looked_up.append((c.buffer, c.ids, c.bags, c.asked, found))
    vectors = []
    for buffer, ids, bags, fetched_rows, fetched in looked_up:
        row_bytes = buffer.width * sizes.item_bytes
        each, turns = _of_bags(ids, bags * sizes.samples)
        works = [_gather_fused(each, row_bytes, fetched_rows)] * turns
        vectors.append(write.kernel(buffer.name, "pool", works, [fetched], launches=2))
    backward, gradients = _dense(write, dense, [*vectors, *pooled])
    small = _copies_back(write, sizes, backward)
    summed = _dense_sums(
        write, dense, gradients, small, sum(c.buffer.rows * (c.buffer.width + 1) for c in sizes.copies)
    )
    sent = [_row_gradients(write, g, backward) for g in sizes.rows]
    returned = [write.exchange(_in(v.events, Phase.POOLED_GRAD_EXCHANGE), [backward]) for v in sizes.vectors]
    last = write.kernel(
        "check", "finite_check", [_pass("reduce.rows", sizes.item_bytes * dense.values)], summed, launches=20
    )
    good = write.over_all("all_reduce", "finite_check", 8.0, [last])
    for g, arrived in zip(sizes.rows, sent, strict=True):
        received = sizes.devices * g.list_rows
        merged = _coalesce(write, g.buffer, received, [arrived])
        if g.divided:
            merged = _statistic(write, g.buffer.name, received, g.divided, received, g.events, merged)
        summed_rows, merged = _of_groups(write, g.buffer, received, g.events, merged)
        _update(write, g.buffer, summed_rows, [merged, good])
    for v, arrived in zip(sizes.vectors, returned, strict=True):
        told = v.events  # a statistic of all groups travels together
        for own in v.groups:
            merged = _by_row(write, own, [arrived])
            if own.divided:
                ids = sizes.devices * own.list_ids
                merged = _statistic(write, own.buffer.name, ids, own.divided, own.distinct, told, merged)
                told = ()
            summed_rows, merged = _of_groups(write, own.buffer, own.distinct, own.agreed, merged)
            _update(write, own.buffer, summed_rows, [merged, good])
    for c in sizes.copies:
        table, slots = 1.0 * c.buffer.rows * c.buffer.width * sizes.item_bytes, c.buffer.rows * c.buffer.slot_bytes
        written = table + 2 * c.buffer.rows * c.buffer.value_bytes
        # Gradients are scaled, the squares of each row averaged, and all rows written, whether they change or not.
        works = [
            _pass("elementwise", 2 * table),
            _pass("reduce.rows", table),
            _pass("elementwise", written),
            _pass("elementwise", 4 * slots),
        ]
        launches = 4 + 2 * c.buffer.slots
        write.kernel(c.buffer.name, "sparse_update", works, [*summed, good], launches)
    share = sizes.all_devices if dense.sharded else 1
    passes = (3 + 2 * dense.slots) * sizes.item_bytes * dense.values / share
    write.kernel(
        "dense_update",
        "dense_update",
        [_pass("elementwise", passes)],
        [*summed, good],
        launches=max(1, (2 + dense.slots) * dense.leaves),
    )
    return Graph(tuple(write.nodes))


def _pass(kind: str, moved: float) -> Work:
    return Work(kind, {"bytes": max(moved, 1.0)}, moved / 8 if kind != "copy" else 0.0, moved)


def _rows_gather(rows: float, row_bytes: float, table_rows: float) -> Work:
    return gather(max(rows, 1.0), row_bytes, max(table_rows, 1.0) * row_bytes, _ID * rows)


def _gather_fused(rows: float, row_bytes: float, table_rows: float) -> Work:
    return dataclasses.replace(_rows_gather(rows, row_bytes, table_rows), kernel="gather.fused")


def _add(rows: float, row_bytes: float, table_rows: float, variant: str = "add") -> Work:
    return scatter(max(rows, 1.0), row_bytes, max(table_rows, 1.0) * row_bytes, _ID * rows, variant)


def _fetch(write: _Writer, g: Rows) -> int:
    """From ids to rows on the device that asked."""
    listed = write.sizes.devices * g.list_rows
    rows = _in(g.events, Phase.ROW_EXCHANGE, inside=False)
    gathered = [_rows_gather(listed / max(1, len(rows)), g.buffer.value_bytes, g.buffer.rows)]
    if not rows:
        return write.kernel(g.buffer.name, "gather", gathered, [])
    asked = write.exchange(_in(g.events, Phase.ID_EXCHANGE), [])
    arrived = [
        write.exchange([event], [write.kernel(g.buffer.name, "gather", gathered, [asked], launches=2)])
        for event in rows
    ]
    if len(arrived) > 1:
        moved = 2.0 * sum(event.padded_bytes for event in rows)
        arrived = [write.kernel("concatenate", "row_exchange", [_pass("copy", moved)], arrived)]
    return write.exchange(_in(g.events, Phase.ROW_EXCHANGE, inside=True), arrived)


def _pooled_forward(write: _Writer, v: Vectors) -> int:
    """From ids to vectors on the device that asked: the owner adds rows up."""
    sizes = write.sizes
    N = sizes.devices
    asked = write.exchange(_in(v.events, Phase.ID_EXCHANGE), [])
    summed = []
    for g in v.groups:
        ids, row_bytes, bags = N * g.list_ids, g.buffer.width * sizes.item_bytes, N * sizes.samples * g.bags
        each, turns = _of_pieces(ids, bags)
        works = [_pass("elementwise", 24 * ids), _pass("copy", bags * row_bytes)]
        added = _add(each, row_bytes, bags, "sorted_add")
        works += [_rows_gather(each, g.buffer.value_bytes, g.buffer.rows), added] * turns
        summed.append(write.kernel(g.buffer.name, "gather", works, [asked], launches=24 + 4 * turns))
    sent = _in(v.events, Phase.POOLED_EXCHANGE)
    moved = sum(event.padded_bytes for event in sent)  # of all devices: set to zero, and put in the order they leave in
    placed = write.kernel("vectors", "pooled_exchange", [_pass("copy", 3 * moved)], summed, launches=2)
    return write.exchange(sent, [placed])


def _dense(write: _Writer, dense: DenseSizes, after: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """The forward and backward pass: the node that gives gradients of pooled vectors, and (node, bytes) of each layer.

    Gradients of parameters come in the order in which the backward pass makes them.
    """
    b, item = write.sizes.samples, write.sizes.item_bytes
    waits, parts = list(after), dense.accumulate
    if dense.sharded:
        waits.append(write.over_all("all_gather", "dense_gather", item * dense.values, []))
    last = write.kernel("concatenate", "dense_forward", [_pass("elementwise", 2.0 * b * dense.columns * item)], waits)
    if dense.pairs:
        last = write.kernel("interaction", "dense_forward", [_pairs(dense, b, "nt")], [last], launches=3 * parts)
    for k, n in dense.layers:
        works = [_product(b, n, k, "nn", dense), _pass("elementwise", 2.0 * b * n * item)]
        last = write.kernel(f"layer {k}x{n}", "dense_forward", works, [last], launches=2 * parts)
    last = write.kernel("loss", "loss", [_pass("elementwise", 32.0 * b)], [last], launches=8 * parts)
    gradients = []
    for k, n in reversed(dense.layers):
        passed = write.kernel(
            f"layer {k}x{n}",
            "dense_backward",
            [_product(b, k, n, "nt", dense), _pass("elementwise", 3.0 * b * k * item)],
            [last],
            launches=2 * parts,
        )
        works = [_product(k, n, b, "tn", dense), _pass("reduce.columns", 1.0 * b * n * item)]
        made = write.kernel(f"layer {k}x{n}", "dense_backward", works, [last], launches=2 * parts)
        gradients.append((made, item * (k * n + n)))
        last = passed
    if dense.pairs:
        works = [_pairs(dense, b, "nn"), _pass("elementwise", 4.0 * b * dense.columns * item)]
        last = write.kernel("interaction", "dense_backward", works, [last], launches=4 * parts)
    return last, gradients


def _product(m: int, n: int, k: int, layout: str, dense: DenseSizes) -> Work:
    return matmul(m, n, k, 1, dense.dtype, layout, _ITEM[dense.dtype] * (m * k + k * n + m * n))


def _pairs(dense: DenseSizes, b: int, layout: str) -> Work:
    vectors, dim = dense.pairs or (0, 0)
    moved = (2.0 * b * vectors * dim + b * vectors * vectors) * _ITEM[dense.dtype]
    n, k = (dim, vectors) if layout == "nn" else (vectors, dim)
    return matmul(vectors, n, k, b, dense.dtype, layout, moved)


def _copies_back(write: _Writer, sizes: StepSizes, backward: int) -> list[int]:
    """Gradients of tables that every device holds, added up into arrays of these tables' size."""
    found = []
    for c in sizes.copies:
        row_bytes, rows = (c.buffer.width + 1) * sizes.item_bytes, c.buffer.rows
        each, turns = _of_bags(c.ids, c.bags * sizes.samples)
        pooled = [_pass("copy", 2.0 * c.asked * row_bytes), *[_add(each, row_bytes, c.asked)] * turns]
        added = write.kernel(c.buffer.name, "pool_backward", pooled, [backward], launches=1 + 2 * turns)
        works = [_pass("copy", rows * row_bytes), _add(c.asked, row_bytes, rows)]
        found.append(write.kernel(c.buffer.name, "grad_exchange", works, [added], launches=3))
    return found


def _dense_sums(
    write: _Writer, dense: DenseSizes, gradients: Sequence[tuple[int, int]], tables: Sequence[int], table_values: int
) -> list[int]:
    """The sums of dense gradients over the devices, in buckets; those of replicated tables join the last one."""
    if write.sizes.all_devices == 1:
        return [made for made, _ in gradients] + list(tables)
    kind = "reduce_scatter" if dense.sharded else "all_reduce"
    joins = write.shared and (dense.bucket_bytes or dense.sharded)  # a CPU takes time to make one array of a bucket

    def flat(made: list[int], moved: float) -> list[int]:
        works = [_pass("copy", 2 * moved)]
        return [write.kernel("join", "dense_grads", works, made, launches=len(made))] if joins else made

    summed: list[int] = []
    waiting: list[int] = []
    moved = 0.0
    for made, size in gradients:
        waiting.append(made)
        moved += size
        if dense.bucket_bytes and moved >= dense.bucket_bytes:
            summed.append(write.over_all(kind, "dense_grads", moved, [*flat(waiting, moved), *summed[-1:]]))
            waiting, moved = [], 0.0
    extra = table_values * write.sizes.item_bytes
    if waiting or tables:
        if dense.bucket_bytes and tables:  # buckets are arrays of their own
            summed.append(write.over_all("all_reduce", "grad_exchange", extra, [*tables, *summed[-1:]]))
            extra = 0
        if waiting:
            after = [*flat(waiting, moved), *tables, *summed[-1:]]
            summed.append(write.over_all(kind, "dense_grads", moved + extra, after))
    if tables:  # sums without the counts of devices beside them
        moved = 2.0 * table_values * write.sizes.item_bytes
        summed = [write.kernel("slice", "grad_exchange", [_pass("copy", moved)], summed)]
    return [
        write.kernel(
            "divide",
            "dense_grads",
            [_pass("elementwise", 2 * write.sizes.item_bytes * dense.values)],
            summed,
            launches=max(1, dense.leaves),
        )
    ]


def _row_gradients(write: _Writer, g: Rows, backward: int) -> int:
    """Gradients of a device's rows, added up over its bags and sent to the owners."""
    sizes = write.sizes
    listed, row_bytes = sizes.devices * g.list_rows, g.buffer.width * sizes.item_bytes
    each, turns = _of_bags(g.ids, g.bags * sizes.samples)
    works = [_pass("copy", 2.0 * listed * row_bytes), *[_add(each, row_bytes, listed)] * turns]
    added = write.kernel(g.buffer.name, "pool_backward", works, [backward], launches=1 + 2 * turns)
    return write.exchange(_in(g.events, Phase.GRAD_EXCHANGE), [added])


def _coalesce(write: _Writer, buffer: Buffer, rows: float, after: Sequence[int]) -> int:
    """Gradients of the same row, from all devices, added up: put in order, and added to zeros that are copied first."""
    row_bytes = buffer.width * write.sizes.item_bytes
    works = [
        *_sorted(rows),
        _pass("copy", 3.0 * rows * row_bytes),
        _rows_gather(rows, row_bytes, rows),
        _add(rows, row_bytes, rows, "sorted_add"),
    ]
    return write.kernel(buffer.name, "sparse_update", works, after, launches=24)


def _by_row(write: _Writer, own: Owned, after: Sequence[int]) -> int:
    """Gradients of the bags of an owner, added up by row, piece by piece of the ids in the order of their rows."""
    sizes = write.sizes
    ids, row_bytes = sizes.devices * own.list_ids, own.buffer.width * sizes.item_bytes
    bags, (each, turns) = sizes.devices * sizes.samples * own.bags, _of_pieces(ids, own.distinct)
    works = [*_sorted(ids), _pass("copy", 1.0 * own.distinct * row_bytes)]
    summed = _add(each, row_bytes, own.distinct, "sorted_add")
    works += [_rows_gather(each, row_bytes, bags), summed] * turns
    return write.kernel(own.buffer.name, "sparse_update", works, after, launches=22 + 4 * turns)


def _of_groups(write: _Writer, buffer: Buffer, rows: float, events: Iterable[Event], after: int) -> tuple[float, int]:
    """Gradients of the rows of all replica groups that hold the same, gathered and added up: how many, and the node."""
    gathered = _in(events, Phase.REPLICA_EXCHANGE)
    if not gathered:
        return rows, after
    groups = write.sizes.replicas
    return groups * rows, _coalesce(write, buffer, groups * rows, [write.exchange(gathered, [after])])


def _sorted(rows: float) -> list[Work]:
    """Row numbers sorted with their places, and the distinct ones found."""
    numbered = _add(rows, _ID, rows, "sorted_add")
    return [sort(max(2.0, rows), 1, _ID * rows), _pass("elementwise", 60 * rows), numbered]


def _of_bags(ids: float, bags: float) -> tuple[float, int]:
    """Ids that are looked up at a time to sum bags, one of each, and how often: see `pooling.sum_bags`."""
    turns = max(1, round(ids / max(1.0, bags)))
    return ids / turns, turns


def _of_pieces(ids: float, sums: float) -> tuple[float, int]:
    """Ids that are added up at a time, about as many as there are sums, and how often: see `segment_sums`."""
    each = min(max(1.0, ids), max(sums, LEAST_TERMS))
    return each, math.ceil(ids / each) if ids else 1


def _statistic(
    write: _Writer, name: str, ids: float, streams: int, rows: float, events: Iterable[Event], after: int
) -> int:
    """Means over rows whose columns lie with several owners: a number for each id, back and forth, stream by stream."""
    squares = write.kernel(
        name, "row_statistic", [_rows_gather(ids, _ID, rows), _pass("elementwise", 4 * _ID * ids)], [after], launches=6
    )
    sent = _in(events, Phase.ROW_STATISTIC)
    there, back = sent[: len(sent) // 2], sent[len(sent) // 2 :]
    works = [w for _ in range(max(1, streams)) for w in (_gather_fused(ids, _ID, rows), _pass("elementwise", 20 * ids))]
    summed = write.kernel(
        name,
        "row_statistic",
        [*works, *[_add(ids, _ID, ids)] * 3, _gather_fused(ids, _ID, ids)],
        [write.exchange(there, [squares])],
        launches=3 * streams + 12,
    )
    return write.exchange(back, [summed])


def _update(write: _Writer, buffer: Buffer, rows: float, after: Sequence[int]) -> int:
    """Rows of the buffer and their slots, read, stepped and written."""
    values, table_rows = buffer.value_bytes, buffer.rows
    stepped = _pass("elementwise", 4 * rows * buffer.width * write.sizes.item_bytes)
    works = [_gather_fused(rows, values, table_rows), stepped, _add(rows, values, table_rows, "sorted")]
    if buffer.slots:
        each = buffer.slot_bytes / buffer.slots
        works += [_rows_gather(rows, each, table_rows), _add(rows, each, table_rows, "sorted")] * buffer.slots
    return write.kernel(buffer.name, "sparse_update", works, after, launches=8 + 3 * buffer.slots)
