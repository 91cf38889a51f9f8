"""Homes and slots: the way from a row to its home and back, and maps of slots."""

import jax.numpy as jnp
import numpy as np
import pytest

from recjax.embedding.address import SlotMap, homes_of, identity, locator, make_homes
from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import RowIds, Segment
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
        segment, position, used = (np.asarray(x) for x in locator(group, jnp.int32(owner))(jnp.asarray(homes)))
        for home in homes[used]:
            of = group.segments[segment[home]]
            row = of.order.row(position[home])
            assert [x.item() for x in of.locate(np.array([row], np.int32))[:2]] == [owner, home]
            found.add((segment[home], int(row)))
    rows = {"a": (3, 10), "b": (7, 7)}
    assert len(found) == sum(rows["a"]) + sum(rows["b"])
    assert {row for segment, row in found if segment == 0} == set(HOT.ids)


def test_a_map_of_slots_and_its_inverse():
    bound = bind(PLAN, TABLES, FEATURES, 3, mapped=True)
    (group,) = bound.groups
    R = group.rows
    turned = SlotMap(np.stack([(np.arange(R, dtype=np.int32) + k) % R for k in (1, 2, 3)]))
    homes = make_homes(bound, {group.name: turned})[group.name]
    for owner in range(3):
        of_owner = homes[owner * R : (owner + 1) * R]
        assert of_owner[turned.slots_OxR[owner]].tolist() == list(range(R))
        slots = jnp.asarray([0, R - 1, R, R + 5], jnp.int32)
        assert homes_of(slots, jnp.asarray(of_owner)).tolist() == [of_owner[0], of_owner[R - 1], R, R + 5]
    assert homes_of(slots, None) is slots
    assert make_homes(bound, None)[group.name].tolist() == list(range(R)) * 3
    assert identity(bind(PLAN, TABLES, FEATURES, 3)) == {}


@pytest.mark.parametrize("slots", [[[0, 1, 1]], [[0, 1, 3]], [[0, 1, 2], [1, 2, -1]]])
def test_maps_in_which_a_row_would_be_lost_are_refused(slots):
    with pytest.raises(ValueError, match="share a slot, or a slot lies beyond the buffer"):
        SlotMap(np.array(slots, np.int32))
