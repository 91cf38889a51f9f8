"""Homes and slots: the way from a row to its home and back, and from slots to homes."""

import jax.numpy as jnp
import numpy as np

from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import RowIds, Segment
from recjax.embedding.sharding import homes_of
from recjax.embedding.spec import FeatureSpec, TableSpec

HOT = RowIds((0, 3, 4))
PLAN = Plan(
    {
        "a": (Segment("row_wise", HOT, owners=(2, 0)), Segment("row_wise", "rest")),
        "b": (Segment("table_wise", columns=(0, 2), owners=1), Segment("row_wise", columns=(2, 4))),
    }
)
TABLES = (TableSpec("a", 13, 2, Sgd()), TableSpec("b", 7, 4, Sgd()))
FEATURES = (FeatureSpec("f", "a"), FeatureSpec("g", "b"))


def test_every_home_leads_back_to_the_row_that_has_it():
    (group,) = bind(PLAN, TABLES, FEATURES, 3).groups
    assert len(group.segments) == 4
    found = set()
    for owner in range(3):
        homes = np.arange(group.rows, dtype=np.int32)
        segment, position, used = (np.asarray(x) for x in group.locator(jnp.int32(owner))(jnp.asarray(homes)))
        for home in homes[used]:
            of = group.segments[segment[home]]
            row = of.order.row(position[home])
            assert [x.item() for x in of.locate(np.array([row], np.int32))[:2]] == [owner, home]
            found.add((segment[home], int(row)))
    rows = {"a": (3, 10), "b": (7, 7)}
    assert len(found) == sum(rows["a"]) + sum(rows["b"])
    assert {row for segment, row in found if segment == 0} == set(HOT.ids)


def test_slots_beyond_a_part_have_homes_beyond_it():
    homes, slots = jnp.asarray([7, 3, -1], jnp.int32), jnp.asarray([0, 2, 3, 8], jnp.int32)
    assert homes_of(slots, homes).tolist() == [7, -1, 3, 8]
    assert homes_of(slots, homes, beyond=10).tolist() == [7, -1, 13, 18]
    assert homes_of(slots, None) is slots
