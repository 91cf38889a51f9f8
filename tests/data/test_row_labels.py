"""What the rows of a table stand for, against the values that were prepared."""

import collections

import pytest
from support.shop import Reader, prepare_shop, rows

from recjax.data.datasets.criteo import CriteoKaggle, open_raw
from recjax.data.datasets.options import prepare_as
from recjax.data.prepare.ids import Frequency, Hash
from recjax.data.row_values import meaning
from recjax.data.storage.blocks import open_prepared
from recjax.data.synthetic.clicks import Synthetic


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return prepare_shop(tmp_path_factory.mktemp("shop") / "data")


def seen(name):
    """The training values that occur at least twice, most frequent first (ties: ascending)."""
    values = [row[name] for row in rows()[:500]]
    counts = collections.Counter(v for value in values for v in (value if isinstance(value, list) else [value]))
    del counts[None]
    return [str(v) for v in sorted(counts, key=lambda v: (-counts[v], v)) if counts[v] > 1]


@pytest.mark.parametrize(
    ("name", "special"), [("user", ["unknown"]), ("city", ["unknown", "missing"]), ("tags", ["unknown"])]
)
def test_every_row_has_the_name_of_its_value(source, name, special):
    feature = source.schema.feature(name)
    found = meaning(source, feature)
    assert [found.name(row) for row in range(feature.rows)] == special + seen(name)
    assert found.shared == set(range(len(special)))


def test_the_names_are_those_of_the_rows_that_were_prepared(source):
    block = source.read("test", 0)
    found = meaning(source, source.schema.feature("city"))
    names = [found.name(int(row)) for row in block.bags["city"].ids[:, 0]]
    known = set(seen("city"))
    assert names == [
        row["city"] if row["city"] in known else "missing" if row["city"] is None else "unknown" for row in rows()[600:]
    ]


@pytest.mark.parametrize(("modulo", "names"), [(0, ["0000000f", "05db9164", "ffffffff"]), (100, ["15", "84", "95"])])
def test_hexadecimal_values_are_written_as_in_the_raw_data(tmp_path, modulo, names):
    """C1 is 05db9164 (98,275,684), f and ffffffff (4,294,967,295), in one row each of eight; seven train."""
    categories = ["05db9164", "f", "ffffffff", "", "", "", "", ""]
    lines = ["\t".join(["1", *("1",) * 13, first, *("",) * 25]) + "\n" for first in categories]
    (tmp_path / "train.txt").write_text("".join(lines))
    config = CriteoKaggle(ids=Frequency(modulo=modulo))
    source = prepare_as(config, open_raw(config, tmp_path), tmp_path / "data")
    found = meaning(source, source.schema.feature("C1"))
    assert [found.name(row) for row in range(5)] == ["unknown", "missing", *names]


def test_rows_without_vocabulary(tmp_path, good):
    hashed = prepare_shop(tmp_path / "hashed", Reader, Hash((10,)))
    city = meaning(hashed, hashed.schema.feature("city"))
    assert (city.shared, city.name(10), city.name(3)) == ({10}, "missing", "3")
    assert meaning(hashed, hashed.schema.feature("user")).shared == frozenset()
    for source in (open_prepared(good), Synthetic(rows=(9,)).open()):
        plain = meaning(source, source.schema.features[0])
        assert (plain.shared, plain.name(0)) == (frozenset(), "0")
