"""Reduced precision on the way between devices: what arrives, in how many bytes, and who may ask for it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.problems import mesh_of

import recjax
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.bind import bind
from recjax.embedding.layout import Group
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan, make_plan
from recjax.embedding.plan_report import describe_plan, plan_table
from recjax.embedding.quantize import decode, encode
from recjax.embedding.routing.routed import GroupRouting, Routing
from recjax.embedding.segment import EXACT, Exchange, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.planning.compiled_collectives import collectives
from recjax.planning.wire_bytes import useful_bytes
from recjax.train.build import build_trainer

D, C = 14, 8
TABLE, FEATURE = TableSpec("t", 40, D, Sgd(0.1)), FeatureSpec("f", "t")
WAYS = (EXACT, Exchange("bfloat16", "float16"), Exchange("float16", "bfloat16"), Exchange("int8", "int8"))
WIRE = {"float32": ("f32", 0), "bfloat16": ("u16", 0), "float16": ("f16", 1), "int8": ("u8", 8)}  # type, more columns


def group_of(placement: str, devices: int, exchange: Exchange) -> Group:
    plan = Plan({"t": (Segment(placement, exchange=exchange),)})
    return bind(plan, (TABLE,), (FEATURE,), devices).groups[0]


def coded(x: np.ndarray, precision: Any) -> np.ndarray:
    """What a row is after the way, by the code that test_quantize.py tests."""
    return np.asarray(decode(encode(jnp.asarray(x, jnp.float32), precision), precision))


def pieces(group: Group, rows: np.ndarray, precision: Any) -> np.ndarray:
    """The same for rows [..., D] that travel in pieces of columns, padded with zeros."""
    out = []
    for n in range(group.devices):
        piece = rows[..., group.columns.start(n) : group.columns.start(n + 1)]
        padded = np.zeros((*rows.shape[:-1], group.width), np.float32)
        padded[..., : piece.shape[-1]] = piece
        out.append(coded(padded, precision)[..., : piece.shape[-1]])
    return np.concatenate(out, axis=-1)


@pytest.mark.parametrize(
    ("placement", "devices"), [("row_wise", 1), ("row_wise", 2), ("column_wise", 3), ("data_parallel", 2)]
)
def test_each_row_arrives_as_its_code_says_and_gradients_are_decoded_before_they_are_summed(placement, devices):
    groups = [group_of(placement, devices, way) for way in WAYS]
    group = groups[0]
    rng = np.random.default_rng(0)
    N, owners, R = devices, group.owners, group.rows
    whole = rng.uniform(-1, 1, size=(owners * R, D)).astype(np.float32)
    slots = np.sort(rng.permuted(np.tile(np.arange(R), (N, owners, 1)), axis=-1)[..., :C]).astype(np.int32)
    slots[:, :, -1] = R  # padding
    grads = rng.normal(size=(N, owners, C, D)).astype(np.float32)
    buffer = whole
    if placement == "column_wise":  # D = 14 over 3 devices: 5, 5 and 4 columns
        buffer = np.zeros((N, R, group.width), np.float32)
        for piece in group.pieces(group.segments[0]):
            buffer[piece.part, :, : piece.last - piece.first] = whole[:, piece.first : piece.last]
        buffer = buffer.reshape(-1, group.width)
    at = P() if placement == "data_parallel" else P(("replica", "host", "device"))
    each = P(("replica", "host", "device"))

    def exchange(table, slots, grads):
        out = []
        for one in groups:
            rows, asked = one.sharding.fetch(one, table, GroupRouting(slots, None))
            out.append((rows, *one.sharding.send_gradients(one, asked, grads[0].reshape(-1, D))))
        return out

    mapped = jax.shard_map(
        exchange, mesh=mesh_of(devices), in_specs=(at, each, each), out_specs=[(each, at, at)] * len(groups)
    )
    compiled = jax.jit(mapped).lower(buffer, slots, grads).compile()
    found = [[np.asarray(x) for x in one] for one in compiled(buffer, slots, grads)]

    held = slots < R
    number = np.where(held, slots + R * np.arange(owners)[:, None], 0)
    truth = np.where(held[..., None], whole[number], 0)
    for way, one, (rows, touched, sums) in zip(WAYS, groups, found, strict=True):
        travels = devices > 1 and placement != "data_parallel"
        code = (lambda x, p, one=one: pieces(one, x, p)) if placement == "column_wise" else coded
        forward, backward = (way.forward, way.backward) if travels else ("float32", "float32")
        # bit for bit; of int8, XLA may or may not round the product in bias + q * scale
        ulp = 2.0**-23 if forward == "int8" else 0
        np.testing.assert_allclose(rows.reshape(truth.shape), code(truth, forward), rtol=0, atol=ulp)
        arrived = code(grads, backward).astype(np.float64)
        expected = np.zeros((owners * R, D))
        np.add.at(expected, number[held], arrived[held])
        if placement == "data_parallel":
            np.testing.assert_allclose(sums, expected, rtol=0, atol=1e-6)
            continue
        got = np.zeros((owners * R, D))
        touched, sums = touched.reshape(N, -1), sums.reshape(N, -1, one.width)
        for n in range(N):
            used = touched[n] < R
            if placement == "column_wise":
                first, last = one.columns.start(n), one.columns.start(n + 1)
                got[touched[n][used], first:last] = sums[n][used][:, : last - first]
            else:
                got[n * R + touched[n][used]] = sums[n][used]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
        if way.backward == "int8" and travels:
            assert np.abs(got - expected).max() < 1e-6 < np.abs(arrived - grads).max()
    if devices > 1 and placement != "data_parallel":
        moved = [c for c in collectives(compiled.as_text()) if c.kind == "all-to-all"]
        for phase, direction in (("row_exchange", "forward"), ("grad_exchange", "backward")):
            sent = sorted((c.shapes[0][0], c.result_bytes) for c in moved if c.phase == phase)
            wire = [WIRE[getattr(way, direction)] for way in WAYS]
            size = {"f32": 4, "u16": 2, "f16": 2, "u8": 1}
            assert sent == sorted((kind, N * C * (group.width + more) * size[kind]) for kind, more in wire)


def test_tables_of_another_precision_exchange_apart_and_replicated_ones_do_not_care():
    tables = tuple(TableSpec(n, 9, 4, Sgd(0.1)) for n in "abcde")
    features = tuple(FeatureSpec(n, n) for n in "abcde")
    way = Exchange("int8", "bfloat16")
    plan = make_plan(
        "row_wise", (*tables[:3], *(dataclasses.replace(t, placement="data_parallel") for t in tables[3:]))
    )
    reduced = {"b": (Segment("row_wise", exchange=way),), "c": (Segment("table_wise", exchange=way),)}
    bound = bind(Plan({**plan.tables, **reduced}), tables, features, 2)
    assert {g.name: [t.spec.name for t in g.segments] for g in bound.groups} == {
        "row_wise_D4_sgd": ["a"],
        "row_wise+table_wise_D4_sgd_int8_bfloat16": ["b", "c"],
        "data_parallel_D4_sgd": ["d", "e"],
    }
    assert [g.exchange for g in bound.groups] == [EXACT, way, EXACT]


def test_a_plan_gets_the_exchange_of_the_config_but_for_replicated_tables():
    tables = (TableSpec("a", 10, 4, Sgd(0.1)), TableSpec("b", 10**6, 4, Sgd(0.1)))
    way = Exchange("float16", "bfloat16")
    plan = make_plan("auto", tables, way)
    assert [plan.tables[n][0].exchange for n in "ab"] == [EXACT, way]
    assert [s.exchange for (s,) in make_plan("column_wise", tables, way).tables.values()] == [way, way]
    features = tuple(FeatureSpec(t.name, t.name) for t in tables)
    described = describe_plan(plan, tables, features, 2, 8)
    assert described["tables"]["b"]["exchange"] == {"forward": "float16", "backward": "bfloat16", "kind": "rows"}
    assert "\nb      row_wise, float16 / bfloat16  1,000,000" in plan_table(described)


def test_a_plan_file_has_its_own_exchange(tmp_path):
    tables = (TableSpec("a", 10, 4, Sgd(0.1)), TableSpec("b", 10, 4, Sgd(0.1)))
    way = Exchange("int8", "bfloat16")
    path = tmp_path / "plan.json"
    plan = Plan({"a": (Segment("row_wise", exchange=way),), "b": (Segment("data_parallel"),)})
    path.write_text(plan.to_json())
    assert make_plan(str(path), tables) == make_plan(str(path), tables, way) == plan
    words = (
        r"plan\.json exchanges rows of table 'a' in int8 and gradients in bfloat16, but .* says int8 and int8. Leave"
    )
    with pytest.raises(ConfigError, match=words):
        make_plan(str(path), tables, Exchange("int8", "int8"))


@pytest.mark.parametrize("preset", ["synthetic", "movietweetings"])
def test_settings(preset):
    config = recjax.load(preset, "embedding.exchange.forward=int8", "embedding.exchange.backward=bfloat16")
    assert config.embedding.exchange == Exchange("int8", "bfloat16", "auto")
    assert recjax.load(preset).embedding.exchange == Exchange(kind="auto")
    with pytest.raises(ConfigError, match="embedding.exchange.forward=int4"):
        recjax.load(preset, "embedding.exchange.forward=int4")


def test_float64_refuses_to_round():
    config = recjax.load("synthetic", "compute_dtype=float64", "plan=row_wise", "embedding.exchange.backward=float16")
    with pytest.raises(ConfigError, match="compute_dtype is float64, but .* table 'sparse_0' .* reduced precision"):
        build_trainer(config, Synthetic(rows=(30,), train_rows=10).open())


def test_useful_bytes_know_the_precision():
    """Two devices, each of which asks 3 rows of itself and 4 of the other."""
    counts = np.array([[3, 4], [4, 3]], np.int32)
    for placement, columns in (("row_wise", D), ("column_wise", D // 2)):
        group = group_of(placement, 2, Exchange("int8", "float16"))
        bound = dataclasses.replace(bind(make_plan(placement, (TABLE,)), (TABLE,), (FEATURE,), 2), groups=(group,))
        asked = counts if placement == "row_wise" else np.array([[4], [4]], np.int32)
        routing = Routing({group.name: GroupRouting(np.zeros((2, len(asked[0]), C)), asked)}, {})
        useful = {phase: size for (phase, *_), size in useful_bytes(bound, routing, 4, 0).items()}
        assert useful == {"id_exchange": 16, "row_exchange": 4 * (columns + 8), "grad_exchange": 4 * (columns + 1) * 2}
    narrow = dataclasses.replace(TABLE, dtype="bfloat16")  # whose rows are narrow as they are, and its gradients not
    bound = bind(make_plan("row_wise", (narrow,)), (narrow,), (FEATURE,), 2)
    routing = Routing({bound.groups[0].name: GroupRouting(np.zeros((2, 2, C)), counts)}, {})
    useful = {phase: size for (phase, *_), size in useful_bytes(bound, routing, 4, 0).items()}
    assert useful == {"id_exchange": 16, "row_exchange": 8 * D, "grad_exchange": 16 * D}
