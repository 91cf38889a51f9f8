"""Bytes in a trace against those counted by brute force from the batch, placement by placement."""

import collections
import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from support.routing import locate

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import TrainConfig
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.exchange.wire import cuts
from recjax.embedding.layout import ACROSS
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.routing import capacity
from recjax.embedding.segment import Exchange
from recjax.lab.formats.trace import Event
from recjax.lab.trace.record import Recording, step_events, true_counts
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig
from recjax.train.build import build_trainer
from recjax.train.compile_only import compile_step

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

B, D = 97, 8
DATA = Synthetic(
    rows=(900, 37, 300), ids_per_bag=(1, 3, 0), weighted=(False, True, False), train_rows=500, test_rows=9, dense=3
)
CONFIG = RunConfig(
    data=DATA,
    model=DLRMConfig(bottom=(16, D), top=(16, 1)),
    embedding=EmbeddingConfig(dim=D, optimizer=RowWiseAdagrad(learning_rate=0.05), exchange=Exchange()),
    train=TrainConfig(batch_size=B),
)


@pytest.fixture(scope="module", autouse=True)
def all_devices():
    jax.devices()  # starts the back end with all of them, before a mesh of fewer can


class Traced:
    """The events of one step, and what the batch asks for, found without the router."""

    def __init__(self, devices: int, plan: str, hosts: int = 1, **embedding: Any) -> None:
        mesh = MeshConfig(devices=devices, platform="cpu", hosts=hosts)
        own = dataclasses.replace(CONFIG.embedding, **embedding)
        config = dataclasses.replace(CONFIG, mesh=mesh, plan=plan, embedding=own)
        self.trainer = build_trainer(config, splits=("train",))
        self.N, self.hosts, self.E = devices, hosts, devices // hosts
        batch = next(self.trainer.routed_batches())
        self.capacities = capacity.grow({}, batch.routed.required_capacities)
        hlo = compile_step(self.trainer, self.capacities).as_text() or ""
        self.events = step_events(self.trainer, hlo, true_counts(self.trainer, batch), self.capacities)
        b = -(-B // devices)
        self.wanted: list[set[tuple[str, int]]] = [
            set() for _ in range(devices)
        ]  # (table, row) that each device's samples name
        for feature in self.trainer.bound.features:
            bags = batch.batch.bags[feature.reads]
            lengths = np.full(len(bags.ids), bags.ids.shape[1]) if bags.lengths is None else bags.lengths
            for sample, row in zip(np.repeat(np.arange(len(lengths)), lengths), bags.ids.ravel(), strict=True):
                self.wanted[sample // b].add((feature.table, int(row)))
        self.group = self.trainer.bound.groups[0]

    def owner(self, key: tuple[str, int]) -> int:
        """Where the plan puts a row: the device, or its place within a host."""
        return int(locate(self.group, key[0], np.array([key[1]], np.int32))[0][0])

    def exchanges(self, phase: str, neighbours: bool | None = None) -> list[Event]:
        """[event of each rank] of the exchanges of a phase; inside hosts, across them, or all."""
        found = []
        for rank, events in self.events.items():
            for event in events:
                inside = event.group[1] - event.group[0] == 1
                if event.phase == phase and event.kind != "all_reduce" and neighbours in (None, inside):
                    found.append((rank, event))
        assert len(found) == self.N
        return [event for _, event in sorted(found, key=lambda one: one[0])]

    def check(self, phase: str, truth: Any, padded: int, neighbours: bool | None = None) -> None:
        """`truth(n, m)`: bytes that n has for m. `padded`: of the larger buffer."""
        for n, event in enumerate(self.exchanges(phase, neighbours)):
            assert event.sends == tuple(truth(n, m) for m in event.group), (phase, n)
            assert event.receives == tuple(truth(m, n) for m in event.group), (phase, n)
            assert event.padded_bytes == padded
            assert event.scope == self.group.name

    def dense(self) -> None:
        """One all-reduce of all dense gradients and two sums: 3-16-8 below, then 8 + 4 * 3 / 2 numbers-16-1."""
        parameters = (3 * 16 + 16) + (16 * 8 + 8) + ((8 + 6) * 16 + 16) + (16 + 1)
        found = [e for e in self.events[0] if e.phase == "dense_grads"]
        assert [(e.kind, e.padded_bytes, e.sends) for e in found] == [("all_reduce", (parameters + 2) * 4, ())]
        assert sum(found[0].parts) == found[0].padded_bytes and len(found[0].parts) == 4 * 2 + 2


def test_pooled_vectors():
    """Every device has two of the eight columns of three tables: six columns of each sample go to each other device."""
    t = Traced(4, "column_wise", exchange=Exchange(kind="pooled"))
    (exchange,), b = t.trainer.bound.pooled, -(-B // 4)
    for phase in ("pooled_exchange", "pooled_grad_exchange"):
        for event in t.exchanges(phase):
            assert event.sends == event.receives == (b * 6 * 4,) * 4
            assert (event.padded_bytes, event.scope) == (4 * b * 6 * 4, exchange.name)
    asked = [e for rank in range(4) for e in t.events[rank] if e.phase == "id_exchange"]
    assert {(e.padded_bytes, e.scope) for e in asked} == {(4 * t.capacities[exchange.name] * 4, exchange.name)}
    assert len(asked) == 8  # ids, and weights beside them


@pytest.mark.parametrize("devices", [3, pytest.param(8, marks=pytest.mark.wide)])
@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_spread_rows(plan, devices):
    t = Traced(devices, plan)
    if plan == "table_wise":  # all rows of a table on one device
        for table in t.group.segments:
            assert len({t.owner((table.spec.name, row)) for row in range(table.spec.rows)}) == 1
    asked = collections.Counter((n, t.owner(key)) for n in range(devices) for key in t.wanted[n])
    C = t.capacities[t.group.name]
    t.check("id_exchange", lambda n, m: asked[n, m] * 4, devices * C * 4)
    t.check("row_exchange", lambda n, m: asked[m, n] * D * 4, devices * C * D * 4)
    t.check("grad_exchange", lambda n, m: asked[n, m] * D * 4, devices * C * D * 4)
    t.dense()


@pytest.mark.parametrize(
    ("devices", "widths"), [(3, (3, 3, 2)), *(pytest.param(n, (8 // n,) * n, marks=pytest.mark.wide) for n in (2, 8))]
)
def test_spread_columns(devices, widths):
    t = Traced(devices, "column_wise")
    asked = [len(keys) for keys in t.wanted]
    C, W = t.capacities[t.group.name], max(widths)
    t.check("id_exchange", lambda n, m: asked[n] * 4, devices * C * 4)
    t.check("row_exchange", lambda n, m: asked[m] * widths[n] * 4, devices * C * W * 4)
    t.check("grad_exchange", lambda n, m: asked[n] * widths[m] * 4, devices * C * W * 4)
    t.dense()
    assert {e.kind for e in t.events[0] if e.phase == "id_exchange"} == {"all_gather"}


@pytest.mark.parametrize("devices", [3, pytest.param(8, marks=pytest.mark.wide)])
def test_copies(devices):
    """One all-reduce of [rows, D + 1], which XLA may send together with the dense gradients."""
    t = Traced(devices, "data_parallel")
    assert {e.kind for e in t.events[0]} == {"all_reduce"}
    parameters = (3 * 16 + 16) + (16 * 8 + 8) + ((8 + 6) * 16 + 16) + (16 + 1)
    total = sum(e.padded_bytes for e in t.events[0])
    assert total == ((900 + 37 + 300) * (D + 1) + parameters + 2) * 4
    assert all(e.useful_bytes == e.padded_bytes and e.group == tuple(range(devices)) for e in t.events[0])


@pytest.mark.parametrize("devices", [pytest.param(4, marks=pytest.mark.wide), 8])
@pytest.mark.parametrize("plan", ["table_row_wise", "row_wise"])
def test_two_hosts_rows(plan, devices):
    """Relay (h, e) asks owner (h', e) for what any device of host h wants, and hands it out inside."""
    t = Traced(devices, plan, hosts=2)
    E = devices // 2
    across, inside = collections.Counter(), collections.Counter()
    for h in range(2):
        for key in set().union(*t.wanted[h * E : (h + 1) * E]):
            owner = t.owner(key)
            across[h * E + owner % E, owner] += 1
        for n in range(h * E, (h + 1) * E):
            for key in t.wanted[n]:
                inside[h * E + t.owner(key) % E, n] += 1
    if plan == "table_row_wise":  # a table's rows on one host alone
        for table in t.group.segments:
            assert len({t.owner((table.spec.name, row)) // E for row in range(table.spec.rows)}) == 1
    C, K = t.capacities[t.group.name], t.capacities[t.group.name + ACROSS]
    t.check("id_exchange", lambda n, m: across[n, m] * 4, 2 * K * 4)
    t.check("row_exchange", lambda n, m: across[m, n] * D * 4, 2 * K * D * 4, neighbours=False)
    t.check("grad_exchange", lambda n, m: across[n, m] * D * 4, 2 * K * D * 4, neighbours=False)
    t.check("row_exchange", lambda n, m: inside[n, m] * D * 4, E * C * D * 4, neighbours=True)
    t.check("grad_exchange", lambda n, m: inside[m, n] * D * 4, E * C * D * 4, neighbours=True)


@pytest.mark.parametrize("devices", [pytest.param(4, marks=pytest.mark.wide), 8])
def test_two_hosts_grid(devices):
    """Half of the columns on each host, rows over the devices of each: relay (h, e) gathers from (0, e) and (1, e)."""
    t = Traced(devices, "grid", hosts=2)
    E = devices // 2
    gathered, inside = collections.Counter(), collections.Counter()
    for h in range(2):
        for key in set().union(*t.wanted[h * E : (h + 1) * E]):
            gathered[h * E + t.owner(key)] += 1
        for n in range(h * E, (h + 1) * E):
            for key in t.wanted[n]:
                inside[h * E + t.owner(key), n] += 1
    C, K = t.capacities[t.group.name], t.capacities[t.group.name + ACROSS]
    t.check("id_exchange", lambda n, m: gathered[n] * 4, 2 * K * 4)
    t.check("row_exchange", lambda n, m: gathered[m] * D // 2 * 4, 2 * K * D // 2 * 4, neighbours=False)
    t.check("grad_exchange", lambda n, m: gathered[n] * D // 2 * 4, 2 * K * D // 2 * 4, neighbours=False)
    t.check("row_exchange", lambda n, m: inside[n, m] * D * 4, E * C * D * 4, neighbours=True)
    t.check("grad_exchange", lambda n, m: inside[m, n] * D * 4, E * C * D * 4, neighbours=True)


def test_reduced_precision():
    """A row of int8 is D + 8 bytes, one of bfloat16 2 D; ids stay as they are."""
    t = Traced(4, "row_wise", exchange=Exchange("bfloat16", "int8"))
    asked = collections.Counter((n, t.owner(key)) for n in range(4) for key in t.wanted[n])
    C = t.capacities[t.group.name]
    t.check("id_exchange", lambda n, m: asked[n, m] * 4, 4 * C * 4)
    t.check("row_exchange", lambda n, m: asked[m, n] * D * 2, 4 * C * D * 2)
    t.check("grad_exchange", lambda n, m: asked[n, m] * (D + 8), 4 * C * (D + 8))
    assert [e.dtype for e in t.events[0] if e.phase in ("row_exchange", "grad_exchange")] == ["uint16", "uint8"]


def test_what_waits_for_what():
    """Ids before rows before gradients; the last check waits for both sums, and nothing else for the dense one."""
    t = Traced(3, "row_wise")
    events = {e.phase: e for e in t.events[2]}
    ids = {phase: e.id for phase, e in events.items()}
    assert events["id_exchange"].deps == ()
    assert events["row_exchange"].deps == (ids["id_exchange"],)
    assert events["grad_exchange"].deps == (ids["row_exchange"],)
    assert events["dense_grads"].deps == (ids["row_exchange"],)
    assert set(events["finite_check"].deps) == {ids["dense_grads"], ids["grad_exchange"]}
    assert all(a.id < b.id for a, b in itertools.pairwise(t.events[2]))


@pytest.mark.parametrize("hosts", [1, 2])
def test_rows_in_pieces(hosts):
    """A list is filled from its first place on, so that the last pieces hold less of use; the sums are those of one."""
    whole, cut = (Traced(4, "row_wise", hosts, exchange=Exchange(pieces=pieces)) for pieces in (1, 3))
    for neighbours in (False, True) if hosts > 1 else (None,):
        C = whole.capacities[whole.group.name + (ACROSS if neighbours is False else "")]
        for (one,), pieces in zip(*(of_rows(t, neighbours) for t in (whole, cut)), strict=True):
            lists = [got // (D * 4) for got in one.receives]  # rows that come from each
            truth = []
            for first, last in cuts(C, 3):
                useful = [min(max(rows - first, 0), last - first) * D * 4 for rows in lists]
                truth.append((tuple(useful), len(lists) * (last - first) * D * 4))
            assert sorted((piece.receives, piece.padded_bytes) for piece in pieces) == sorted(truth)
            assert sum(piece.padded_bytes for piece in pieces) == one.padded_bytes
            assert np.sum([piece.sends for piece in pieces], axis=0).tolist() == list(one.sends)
    others = [
        [(e.phase, e.sends, e.padded_bytes) for e in t.events[0] if e.phase != "row_exchange"] for t in (whole, cut)
    ]
    assert others[0] == others[1]


def of_rows(traced, neighbours):
    """[exchanges of rows of each rank]: inside hosts, across them, or all."""
    return [
        [e for e in events if e.phase == "row_exchange" and neighbours in (None, e.group[1] - e.group[0] == 1)]
        for _, events in sorted(traced.events.items())
    ]


def test_a_recording_goes_on_and_takes_placed_batches_again():
    """Two batches: what the fourth step sends is what the second did, and not what the third did."""
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(devices=2, platform="cpu"), plan="row_wise")
    recording = Recording(config, placed=2)
    recording.train(1)
    second, after = recording.record(1), recording.record(2)

    def sent(trace, step):
        return [e.sends for r in range(2) for e in trace.ranks[r] if e.kind == "all_to_all" and e.step == step]

    assert len(sent(second, 0)) > 0 and sent(second, 0) == sent(after, 1) != sent(after, 0)
