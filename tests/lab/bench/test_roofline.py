"""Counts of what a step must do, against numbers worked out by hand and by brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.routing import locate

from recjax import kernels
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.data.batch import Batch
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.bind import bind
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import make_plan
from recjax.embedding.routing import capacity
from recjax.embedding.routing.host import pack, route_on_host
from recjax.embedding.routing.routed import Routing
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.lab.bench import roofline
from recjax.planning.compiled_collectives import wire_bytes
from recjax.train.table_specs import specs


def test_flops_of_products_alone_and_in_loops() -> None:
    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    assert roofline.matmul_flops(jax.make_jaxpr(lambda: a @ b)().jaxpr) == 2 * 3 * 5 * 7
    batched = jax.make_jaxpr(lambda x: jnp.einsum("bid,bjd->bij", x, x))(jnp.ones((4, 3, 6))).jaxpr
    assert roofline.matmul_flops(batched) == 2 * 4 * 3 * 3 * 6

    def looped(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c @ b @ b.T, None), x, length=9)[0]

    assert roofline.matmul_flops(jax.make_jaxpr(jax.jit(looped))(a).jaxpr) == 9 * (2 * 3 * 5 * 7) * 2


@pytest.mark.skipif(not kernels.installed(), reason="not installed: pip install ./kernels")
def test_a_dense_layer_counts_the_same_with_the_kernels() -> None:
    x, weights, bias = jnp.ones((6, 5)), jnp.ones((5, 7)), jnp.ones(7)

    def of(wanted: tuple[int, ...]) -> int:
        grads = jax.grad(lambda *given: kernels.dense(*given, relu=True).sum(), wanted)
        return roofline.matmul_flops(jax.make_jaxpr(lambda: grads(x, weights, bias))().jaxpr)

    assert of((0, 1, 2)) == 3 * (2 * 6 * 5 * 7)


def test_useful_bytes_are_those_of_rows_that_leave_a_device() -> None:
    devices = 3
    source = ZipfStream(rows=(50, 2000), ids_per_bag=(1, 4), distinct_blocks=1).open()
    batch: Batch = source.read("train", 0)
    config = RunConfig(embedding=EmbeddingConfig(8, "sum", RowWiseAdagrad()))
    tables, features = specs(config, source.schema)
    bound = bind(make_plan("row_wise", tables), tables, features, devices)
    counted = route_on_host(batch, bound, 4096)
    routing = pack(counted, bound, capacity.grow({}, counted.required_capacities))

    pairs = set()  # (device that asks, device that has it, table, row)
    (group,) = bound.groups
    for f in features:
        ids = batch.bags[f.name].ids
        owners, _ = locate(group, f.table, ids.ravel().astype(np.int64))
        for sample, row, owner in zip(np.repeat(np.arange(4096), ids.shape[1]), ids.ravel(), owners, strict=True):
            pairs.add((sample // counted.local, int(owner), f.table, int(row)))
    away = sum(asks != has for asks, has, _, _ in pairs)

    line = (
        "  %all-to-all.1 = f32[3,704,8]{2,1,0} all-to-all(%x), channel_id=1, replica_groups=[1,3]<=[3], "
        'metadata={op_name="jit(train_step)/row_exchange/all_to_all"}'
    )
    reduce = (
        "  %psum.1 = f32[10]{0} all-reduce(%x), channel_id=1, replica_groups=[1,3]<=[3], "
        'metadata={op_name="jit(train_step)/dense_grads/psum"}'
    )
    scatter = reduce.replace("all-reduce", "reduce-scatter")
    rows, grads, shards = wire_bytes(f"{line}\n{reduce}\n{scatter}", bound, routing, item_bytes=4)
    assert rows["useful_bytes"] == pytest.approx(away * 8 * 4 / devices)
    assert rows["padded_bytes"] == pytest.approx(2 / 3 * 3 * 704 * 8 * 4)
    assert (grads["kind"], grads["count"]) == ("all-reduce", 1)
    assert grads["useful_bytes"] == grads["padded_bytes"] == pytest.approx(4 / 3 * 10 * 4)
    assert shards["useful_bytes"] == shards["padded_bytes"] == pytest.approx(2 * 10 * 4)  # of 30, a third stays at home
    # each id's row and each bag's result, in float32
    assert roofline.lookup_bytes(bound, routing, 4096) == 4096 * (1 + 4 + 2) * 8 * 4


def test_what_crosses_hosts_is_read_from_the_groups() -> None:
    """By hand, 2 hosts of 2 devices. A ring that goes round host by host has two of its four links between hosts."""
    tables = (TableSpec("t", 40, 8, RowWiseAdagrad()),)
    bound = bind(make_plan("data_parallel", tables), tables, (FeatureSpec("f", "t"),), 4, hosts=2)
    template = (
        "  %x.1 = f32[10]{{0}} {}(%x), channel_id=1, replica_groups={}, "
        'metadata={{op_name="jit(train_step)/dense_grads/psum"}}'
    )
    cases = {
        ("all-reduce", "[1,4]<=[4]"): ("both", 1.5 * 40, 0.75 * 40),
        ("all-gather", "[1,4]<=[4]"): ("both", 0.75 * 40, 0.5 * 40),
        ("all-gather", "[2,2]<=[4]"): ("devices", 0.5 * 40, 0),
        ("all-gather", "[2,2]<=[2,2]T(1,0)"): ("hosts", 0.5 * 40, 0.5 * 40),
    }
    for case, expected in cases.items():
        (line,) = wire_bytes(template.format(*case), bound, Routing({}, {}), item_bytes=4)
        assert (line["between"], line["padded_bytes"], line["across_padded_bytes"]) == expected


def test_a_joined_all_reduce_is_that_of_most_of_its_bytes() -> None:
    """XLA joins the gradients of a small replicated table, 40 bytes, with those of the dense part, 4,000."""
    tables = (TableSpec("t", 10, 1, RowWiseAdagrad()),)
    bound = bind(make_plan("data_parallel", tables), tables, (FeatureSpec("f", "t"),), 2)
    line = (
        "  %x.1 = (f32[1000]{0}, f32[10]{0}) all-reduce(%x, %y), channel_id=1, replica_groups=[1,2]<=[2], "
        'metadata={op_name="jit(train_step)/(dense_grads/psum:t/grad_exchange/psum)"}'
    )
    (found,) = wire_bytes(line, bound, Routing({}, {}), item_bytes=4)
    assert (found["phase"], found["padded_bytes"]) == ("dense_grads", 4040)
