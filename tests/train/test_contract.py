"""The contract of every exchange: whatever the placement, what travels, and the mesh, numbers are the dense oracle's.

A case is a plan and a mesh: one program, which holds every optimizer, all poolings, and bags of all kinds. Contents are
drawn. Whole runs by a config and a plan file are compared, so nothing here knows how rows are exchanged.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.exactness import (
    OPTIMIZERS,
    STEPS,
    TRAIN,
    UNNAMED,
    Content,
    NetRun,
    V,
    config_of,
    contents,
    dim_of,
    lookups,
    new_weights,
    problem_of,
    source_of,
    train,
    truth_of,
    write_plan,
)
from support.problems import compare, run_oracle

from recjax import settings as overrides
from recjax.embedding import segment_sums
from recjax.embedding.plan import Plan
from recjax.embedding.row_order import RowOrder
from recjax.embedding.segment import EXACT, PLACEMENTS, Exchange, RowIds, Segment
from recjax.parallel.mesh import MeshConfig

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

POOLED = Exchange(kind="pooled")
MOST = 99  # columns, of which a table has fewer: up to its last
Ways = Sequence[tuple[Segment, ...]]  # how tables are held, one after the other


def whole(*placements: str, exchange: Exchange = EXACT) -> Ways:
    """Tables in one segment each."""
    return [(Segment(placement, exchange=exchange),) for placement in placements]


def parts(devices: int) -> Ways:
    """Rows apart, columns apart, and both, on owners of any kind."""
    hot, some = RowIds((0, 1, 2, 5, 30)), (devices - 1, 0)
    left, right = (0, 2), (2, MOST)
    return [
        (
            Segment("data_parallel", hot, right),
            Segment("table_wise", hot, left),
            Segment("column_wise", "rest", (0, 1)),
            Segment("row_wise", "rest", (1, MOST), some),
        ),
        (Segment("grid", columns=right), Segment("table_row_wise", columns=left)),
        (
            Segment("table_wise", columns=left, owners=devices - 1, exchange=POOLED),
            Segment("table_wise", columns=right, owners=0, exchange=POOLED),
        ),
        (Segment("table_wise", hot), Segment("column_wise", "rest", owners=some)),
        (Segment("data_parallel", hot), Segment("table_wise", "rest", exchange=POOLED)),
    ]


def touched() -> Ways:
    """Copies whose gradients are lists: of whole tables, and of columns whose rows go on elsewhere."""
    some = RowIds((0, 1, 2, 5, 30))
    return [
        (Segment("data_parallel_sparse"),),
        (
            Segment("data_parallel_sparse", some, (2, MOST)),
            Segment("table_wise", some, (0, 2)),
            Segment("column_wise", "rest"),
        ),
        (Segment("data_parallel_sparse", columns=(0, 2)), Segment("data_parallel", columns=(2, MOST))),
    ]


def hot(placement: str, exchange: Exchange = EXACT) -> Ways:
    """Hot rows of all numbers, and the others in some way."""
    rests = [(Segment("row_wise", "rest"),), (Segment("column_wise", "rest", exchange=exchange),)]
    sets = [(0, 3, 30), tuple(range(V)), (0,), tuple(range(V - 9)), ()]
    ways: list[tuple[Segment, ...]] = []
    for ids, rest in zip(sets * len(rests), rests * len(sets), strict=True):
        if not ids:
            ways.append(tuple(dataclasses.replace(segment, rows="all") for segment in rest))
        else:
            ways.append((Segment(placement, RowIds(ids)), *(rest if len(ids) < V else ())))
    return ways


def plan_of(ways: Ways, rows_of: dict[str, str]) -> Plan:
    """Tables held in these ways in turn, to whose widths ranges of columns are fitted; `rows_of` is table -> lookup."""
    tables = {}
    for name, segments in zip(OPTIMIZERS, itertools.cycle(ways), strict=False):
        fitted = []
        for segment in segments:
            if segment.columns != "all":
                first, last = segment.columns
                segment = dataclasses.replace(segment, columns=(first, min(last, dim_of(name))))
            if segment.exchange == POOLED and name in rows_of:
                segment = dataclasses.replace(segment, rows_of=(rows_of[name],))
            fitted.append(segment)
        tables[name] = tuple(fitted)
    return Plan(tables)


def one_of_two(content: Content) -> dict[str, str]:
    """Of tables with two lookups that are both pooled: table -> the second."""
    pooled = {name: lookup.table for name, lookup in lookups(content).items() if lookup.pooling != "none"}
    return {table: name for name, table in pooled.items() if name != table and table in pooled}


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan, a mesh, and settings that change no number.

    Attributes:
      ways: how tables are held.
      mesh: devices, hosts and replica groups.
      settings: as on the command line.
      rows_of_some: whether rows of one of two lookups travel where pooled vectors of the other do.
    """

    ways: Ways
    mesh: MeshConfig
    settings: tuple[str, ...] = ()
    rows_of_some: bool = False

    def config(self, content: Content, folder: Path) -> NetRun:
        """Returns the config of a run, whose plan file is put into a folder."""
        plan = plan_of(self.ways, one_of_two(content) if self.rows_of_some else {})
        config = dataclasses.replace(config_of(content), plan=write_plan(plan, folder), mesh=self.mesh)
        return overrides.override(config, self.settings)


TWO_HOSTS = MeshConfig(8, hosts=2)
CASES = {
    "one device": Case(whole(*PLACEMENTS), MeshConfig(1), ("train.accumulate=2",)),
    "rows": Case(whole("row_wise"), MeshConfig(2), ("train.accumulate=3",)),
    "rows in two steps": Case(whole("row_wise"), TWO_HOSTS, ("embedding.exchange.pieces=3",)),
    "columns": Case(whole("column_wise"), MeshConfig(2)),
    "columns pooled": Case(whole("column_wise", exchange=POOLED), MeshConfig(8), ("train.dense=sharded",)),
    "tables": Case(whole("table_wise"), MeshConfig(2), ("train.routing=device",)),
    "tables and rows pooled": Case(whole("table_wise", "row_wise", exchange=POOLED), MeshConfig(2), (), True),
    "hosts' tables pooled": Case(whole("table_row_wise", exchange=POOLED), TWO_HOSTS, ("train.accumulate=2",)),
    "grid": Case(whole("grid"), TWO_HOSTS),
    "copies": Case(whole("data_parallel"), MeshConfig(2), ("train.bucket_mib=0.0001",)),
    "copies by touched rows": Case(touched(), MeshConfig(4, hosts=2), ("embedding.dedup=false",)),
    "hot rows": Case(hot("hot"), MeshConfig(2), ("embedding.dedup=false",)),
    "hot rows of hosts": Case(hot("hot_per_host", POOLED), MeshConfig(4, hosts=2)),
    "parts of tables": Case(parts(4), MeshConfig(4, hosts=2), ("train.accumulate=2",)),
    "replica groups": Case([*whole(*PLACEMENTS), *parts(4)[:3]], MeshConfig(8, hosts=2, replicas=2)),
    "rows on the host": Case(whole("row_wise"), MeshConfig(2), ("tier.device_bytes=100KiB",)),
}


_sizes: dict[str, dict[str, int]] = {}  # of a case's arrays, so that other contents need no other program


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=2, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_it_equals_the_oracle(name: str, tmp_path: Path, data: Any) -> None:
    """From the initial state: losses, tables with their slots, and the dense part."""
    content = data.draw(contents(list(CASES).index(name) % 4))
    with jax.enable_x64(True):
        config = CASES[name].config(content, tmp_path)
        trained = train(config, source_of(content), new_weights(content), sizes=_sizes.get(name, {}))
        _sizes[name] = trained.sizes
        compare(trained.result(), truth_of(content), loss_rtol=1e-9, atol=1e-9)


@pytest.mark.wide  # tests/embedding/test_segment_sums.py has sums alone, test_gpu.py a GPU's
@pytest.mark.parametrize(
    ("devices", "changes"),
    [(2, "embedding.dedup=false"), (1, "train.routing=device"), (3, "train.routing=device")],
)
def test_sums_by_segments_as_on_a_gpu(
    devices: int, changes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where additions in any order would make runs differ: bags, rows of the owners, and copies; by one sort of ids."""
    monkeypatch.setattr(segment_sums, "target_platform", lambda: "gpu")
    content = Content(1)
    ways = [*whole("row_wise", "data_parallel", "column_wise"), *whole("table_wise", exchange=POOLED), *hot("hot")]
    case = Case(ways, MeshConfig(devices), (changes,))
    with jax.enable_x64(True):
        trained = train(case.config(content, tmp_path), source_of(content), new_weights(content))
        compare(trained.result(), truth_of(content), loss_rtol=1e-9, atol=1e-9)


def test_a_training_goes_on_with_another_plan_on_another_mesh(tmp_path: Path) -> None:
    """In the middle, and then over the end of an epoch."""
    content = Content(1)
    steps, names = (2, STEPS + 2), ("columns", "rows")
    with jax.enable_x64(True):
        arrays, losses, before = dict(new_weights(content)), list[float](), 0
        for name, last in zip(names, steps, strict=True):
            config = overrides.override(CASES[name].config(content, tmp_path), (f"train.steps={last}",))
            trained = train(config, source_of(content), arrays, before)
            arrays, before, losses = trained.arrays, last, losses + trained.losses
        problem = problem_of(config, source_of(content))
        compare(
            dataclasses.replace(trained.result(), losses=losses),
            run_oracle(problem, np.float64),
            loss_rtol=1e-9,
            atol=1e-9,
        )


def test_rows_that_nobody_names_keep_their_bits(tmp_path: Path) -> None:
    """Values that any arithmetic, or a copy of another width, would alter; and the slots beside them."""
    content, rng = Content(0), np.random.default_rng(0)
    odd = np.array([-0.0, 5e-324, 3.0])
    with jax.enable_x64(True):
        start = jax.tree.map(np.copy, new_weights(content))
        lazy = [name for name, rule in OPTIMIZERS.items() if not rule.every_row]
        last = RowOrder(V).position(np.arange(V - UNNAMED, V))
        for name in lazy:
            for array in start["tables"][name].values():
                array[last] = rng.choice(odd, array[last].shape)
        config = CASES["one device"].config(content, tmp_path)
        after = train(config, source_of(content), start).arrays["tables"]
    for name in lazy:
        for key, array in start["tables"][name].items():
            assert after[name][key][last].tobytes() == array[last].tobytes(), (name, key)


def test_contents_show_what_they_should() -> None:
    """The contract would say little if nothing were clipped, every row touched, or no weight of FTRL exactly 0."""
    content = Content(0)
    with jax.enable_x64(True):
        truth, before = truth_of(content), new_weights(content)["tables"]
    assert min(truth.norms) < TRAIN.clip_norm < max(truth.norms)
    for name, rule in OPTIMIZERS.items():
        bags = [
            bags for block in source_of(content).blocks for f, bags in block.bags.items() if f.split(".")[0] == name
        ]
        named = np.unique(np.concatenate([each.ids.ravel() for each in bags]))
        untouched = np.setdiff1d(np.arange(V), named)
        assert len(untouched) >= UNNAMED
        same = truth.tables[name]["rows"][untouched] == before[name]["rows"][RowOrder(V).position(untouched)]
        assert not same.any() if rule.every_row and rule.l2 else same.all()
        if name == "ftrl":
            assert (truth.tables[name]["rows"][named] == 0).any()
