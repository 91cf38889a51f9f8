"""Exchanges without padding. CPUs have no ragged all-to-all: what its documentation says takes its place here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import SMALL, assert_refused, inside
from support.contract import STEPS, V, problem_of
from support.problems import Placed, Problem, trainer_of

from recjax.embedding.optim import PartialRowWiseAdam, RowWiseAdagrad
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, Segment
from recjax.embedding.spec import TableSpec
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

FEATURES: dict[str, tuple[str, str, Any]] = {
    "one": ("rows", "one", "sum"),
    "sequence": ("rows", "jagged", "none"),
    "weighted": ("vectors", "jagged_weighted", "mean"),
    "three": ("vectors", "three", "sum"),
}


@functools.cache
def make() -> Problem:
    tables = (TableSpec("rows", V, 4, RowWiseAdagrad(0.2)), TableSpec("vectors", V, 6, PartialRowWiseAdam(0.05)))
    return problem_of(tables, FEATURES)


def plan(placement: str) -> Plan:
    less = Exchange(forward="int8", backward="bfloat16")
    return Plan(
        {
            "rows": (Segment(placement, exchange=less),),
            "vectors": (Segment("column_wise", exchange=Exchange(kind="pooled")),),
        }
    )


def emulated(
    sent: list[Any], x_M: Any, out_P: Any, starts_N: Any, sizes_N: Any, lands_N: Any, received_N: Any, *, axis_name: Any
) -> Any:
    """Writes what each device sends this one over `out`; puts into `sent` the share of all rows that does travel."""
    of_all = [jax.lax.all_gather(x, axis_name) for x in (x_M, starts_N, sizes_N, lands_N)]
    this = jax.lax.axis_index(axis_name)
    jax.debug.callback(lambda *told: sent.append(told), sizes_N.sum(), (of_all[2][:, this] == received_N).all())
    for values_M, starts, sizes, lands in zip(*of_all, strict=True):
        at_P = jnp.arange(len(out_P)) - lands[this]
        arrives_P = (at_P >= 0) & (at_P < sizes[this])
        values_P = values_M.at[starts[this] + at_P].get(mode="fill", fill_value=0)
        out_P = jnp.where(arrives_P.reshape(-1, *[1] * (out_P.ndim - 1)), values_P, out_P)
    return out_P


@pytest.mark.parametrize(
    ("placement", "how"),
    [("row_wise", {"hosts": 2}), pytest.param("table_wise", {"replicas": 2}, marks=pytest.mark.wide)],
)
def test_nothing_but_padding_stays_behind(placement: str, how: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Any] = []
    sent: list[Any] = []
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", functools.partial(emulated, sent))
    in_pieces: list[Any] = []
    for ragged, pieces in ((False, 1), (True, 3), (True, 1)):
        in_pieces, sent[:] = list(sent), []
        placed = Placed.of(make(), trainer_of(make(), 4, plan(placement), ragged=ragged, pieces=pieces, **how))
        ends.append(jax.tree.map(np.ndarray.tobytes, load(placed.trainer.export(placed.steps(placed.start())))))
        assert bool(sent) == ragged
    assert ends[0] == ends[1] == ends[2]
    assert len(in_pieces) == len(sent) + 2 * 4 * STEPS and all(bool(agreed) for _, agreed in in_pieces)
    assert sum(int(n) for n, _ in in_pieces) == sum(int(n) for n, _ in sent)
    # Of ids, rows and gradients; and of ids and their weights.
    assert len(sent) == (3 + 2) * 4 * STEPS and all(bool(agreed) for _, agreed in sent)
    rows = sum(int(g.counts_NxO.sum()) for inputs in placed.inputs for g in inputs.routing.groups.values())
    lists = [routing for inputs in placed.inputs for routing in inputs.routing.pooled.values()]
    useful = 3 * rows + 2 * sum(int(routing.counts_NxO.sum()) for routing in lists)
    assert 0.9 * useful <= sum(int(n) for n, _ in sent) <= useful  # samples that pad a batch have no ids
    assert useful < 2 * sum(routing.ids_NxOxC.size for routing in lists)


def test_it_is_one_collective_of_the_compilers_for_accelerators() -> None:
    placed = Placed.of(make(), trainer_of(make(), 4, plan("row_wise"), ragged=True))
    traced = placed.trainer.step_program.trace(placed.start(), placed.inputs[0])
    for platform in ("cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("ragged_all_to_all") >= 5


def test_cpus_have_no_such_collective(preset: Any, tmp_path: Any) -> None:
    done = inside("train", preset, *SMALL, "embedding.ragged=true", "--out", tmp_path / "run")
    assert_refused(done, 2, "embedding.ragged=true, but the mesh is of CPU devices")
