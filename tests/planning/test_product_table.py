"""The choice of who computes the products of dense layers, from tables written by hand."""

import dataclasses
import json

import pytest
from support.products import times, write_table

from recjax.errors import ConfigError
from recjax.models.dense import BY_KERNELS, BY_XLA, LayerShape, Products, Ways
from recjax.planning.product_table import Table, choose, far, parse, read

WIDE, NARROW = LayerShape(4096, 1024, 1024, "float32"), LayerShape(4096, 16, 1, "float32")
HERE = {"cpu": "one", "cores": "2", "jax": "0.12", "kernels": "avx2"}


def table(*layers):
    return Table(HERE, layers)


def test_each_product_is_computed_by_the_fastest():
    mixed = times(
        forward={"kernels": 10.0, "xla": 20.0},
        into_input={"kernels": 20.0, "xla": 10.0},
        into_kernel={"kernels": 10.0, "xla": 11.0},
    )
    given = table((WIDE, mixed), (NARROW, times(default={"kernels": 9.0, "xla": 3.0})))
    found = choose(given, [WIDE, NARROW, WIDE], "a table")
    assert found == Products(False, ((WIDE, Ways("kernels", "xla", "kernels")), (NARROW, BY_XLA)))


def test_what_differs_by_noise_alone_is_xlas():
    ties = times(
        forward={"kernels": 95.1, "xla": 100.0},
        into_input={"kernels": 94.9, "xla": 100.0},
        into_kernel={"kernels": 100.0, "xla": 100.0},
    )
    assert choose(table((WIDE, ties)), [WIDE], "a table").of(WIDE) == Ways("xla", "kernels", "xla")


def test_without_kernels_all_are_xlas():
    assert choose(table((WIDE, times(default={"xla": 5.0}))), [WIDE], "a table").of(WIDE) == BY_XLA


def test_the_nearest_measured_layer_of_the_same_dtype_decides():
    bf16 = dataclasses.replace(WIDE, dtype="bfloat16")
    slow = times(default={"kernels": 9.0, "xla": 3.0})
    given = table((WIDE, times()), (NARROW, slow), (bf16, slow))
    near, thin = LayerShape(2048, 700, 900, "float32"), LayerShape(512, 13, 2, "float32")
    found = choose(given, [near, thin], "a table")
    assert found.layers == ((near, BY_KERNELS), (thin, BY_XLA))
    # So it is with what was chosen, for batches of other sizes: that of an evaluation.
    assert found.of(dataclasses.replace(near, rows=17)) == BY_KERNELS
    assert found.of(dataclasses.replace(near, dtype="bfloat16")) == BY_XLA
    assert far(given, [near, thin]) == [thin]  # 4096 rows are eight times 512


def test_one_dnn_takes_xlas_place_if_the_whole_program_is_faster():
    """Kernels stay where they are the fastest; of a layer that is there three times the time counts three times."""
    better = times(default={"kernels": 50.0, "xla": 100.0, "onednn": 80.0}, forward={"xla": 90.0, "onednn": 45.0})
    worse = times(default={"kernels": 500.0, "xla": 10.0, "onednn": 30.0})
    given = table((WIDE, better), (NARROW, worse))
    # by XLA's: 90 + 50 + 50 for the wide one, kernels twice, and 30; by oneDNN's: 45 + 50 + 50, and 90
    assert not choose(given, [WIDE, NARROW], "a table").onednn
    found = choose(given, [WIDE] * 3 + [NARROW], "a table")
    assert found == Products(True, ((WIDE, Ways("xla", "kernels", "kernels")), (NARROW, BY_XLA)))
    assert found.in_words() == "by table: 2 of 6 by kernels, the others by oneDNN"
    unmeasured = table((WIDE, times()), (NARROW, worse))
    assert not choose(unmeasured, [WIDE] * 3 + [NARROW], "a table").onednn


def test_layers_of_a_dtype_without_times_are_refused():
    with pytest.raises(ConfigError, match="a table has no times of bfloat16 layers. Measure them"):
        choose(table((WIDE, times())), [dataclasses.replace(WIDE, dtype="bfloat16")], "a table")
    assert choose(table((WIDE, times())), [dataclasses.replace(WIDE, dtype="float64")], "a table") == Products()


def test_newer_times_take_the_place_of_older_ones():
    older = table((WIDE, times()), (NARROW, times()))
    newer = times(default={"kernels": 2.0, "xla": 1.0})
    assert older.joined(table((WIDE, newer))) == table((WIDE, newer), (NARROW, times()))


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = write_table(tmp_path / "table.json", times(), cpu="another")
    found = read(path)
    assert found.machine["cpu"] == "another" and found.layers == ((LayerShape(64, 16, 8, "float32"), times()),)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": "recjax machine"}, "recjax products"),
        ({"version": 2}, "version"),
        ({"machine": {}}, "KeyError"),
        ({"layers": [{"rows": 0, "terms": 1, "columns": 1, "dtype": "float32", "us": times()}]}, "0 is no size"),
        ({"layers": [{"rows": 1, "terms": 1, "columns": 1, "dtype": "float32", "us": {}}]}, "forward"),
        (
            {
                "layers": [
                    {"rows": 1, "terms": 1, "columns": 1, "dtype": "float32", "us": times(default={"kernels": 1})}
                ]
            },
            "times of forward",
        ),
        (
            {
                "layers": [
                    {"rows": 1, "terms": 1, "columns": 1, "dtype": "float32", "us": times(default={"xla": 10**400})}
                ]
            },
            "OverflowError",
        ),
    ],
)
def test_a_damaged_table_is_refused(change, why, tmp_path):
    path = write_table(tmp_path / "table.json", times())
    with pytest.raises(ConfigError, match=f"is no table of products .*{why}.*Delete it and measure again"):
        parse(json.loads(path.read_text()) | change, path)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory. Measure a table on this machine"):
        read(tmp_path / "none.json")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(ConfigError, match="half.json"):
        read(tmp_path / "half.json")
