"""Programs whose tables are on disk: bags that come pooled from a cache, and which tables go together."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.exports import exported, rows_of, untrained

import recjax
from recjax.embedding.quantize import encode
from recjax.errors import ConfigError
from recjax.serving import loader
from recjax.serving.export import write
from recjax.serving.on_disk import PooledBags, components, decoded, poolable

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]


def test_tables_that_share_a_feature_go_together():
    lookups = [("u", "U"), ("u", "u.linear"), ("i", "I"), ("j", "I"), ("k", "K"), ("j", "j.linear"), ("m", "M")]
    groups = components(lookups, ["U", "u.linear", "I", "j.linear", "M"])
    assert sorted(groups) == [(["i", "j"], ["I", "j.linear"]), (["m"], ["M"]), (["u"], ["U", "u.linear"])]
    assert components(lookups, []) == []


def test_bags_that_may_come_pooled():
    """Of sums and means, where a bag has several ids, and no feature of the group is asked for row by row."""
    names = [("a", "A", "sum"), ("b", "A", "mean"), ("c", "C", "none"), ("d", "C", "sum"), ("e", "E", "sum")]
    lookups = [dict(zip(("feature", "table", "pooling"), each, strict=True)) for each in names]
    features = {name: {"ids_per_bag": None if name == "b" else 1} for name in "abcde"}
    assert poolable(lookups, features, ["A", "C", "E"]) == [(["a", "b"], ["A"])]
    assert poolable(lookups, features, ["C", "E"]) == []
    twice = [*lookups, {"feature": "a", "table": "A", "pooling": "mean"}]
    assert poolable(twice, features, ["A"]) == [], "as ids of a sum and of a mean would differ"


def test_the_least_recently_used_bags_leave():
    sums = {key: np.full(5, n, np.float32) for n, key in enumerate((b"aaaa", b"bbbb", b"cccc"))}
    cache = PooledBags(2 * (4 + 20 + 300))
    for key in (b"aaaa", b"bbbb"):
        assert cache.get(key) is None
        cache.put(key, sums[key])
    np.testing.assert_array_equal(cache.get(b"aaaa"), sums[b"aaaa"])
    cache.put(b"cccc", sums[b"cccc"])
    assert cache.get(b"bbbb") is None and cache.get(b"aaaa") is not None and cache.get(b"cccc")[0] == 2
    assert (cache.hits, cache.misses) == (3, 3)


def mixed(given, rng):
    """The same bags with their ids in another order: two of a fixed and of a jagged feature, with their weights."""
    ids, weights = ({name: array.copy() for name, array in given[kind].items()} for kind in ("ids", "weights"))
    for name, array in ids.items():
        lengths = given["lengths"].get(name)
        edges = None if lengths is None else np.concatenate([[0], np.cumsum(lengths)])
        for bag in range(50):
            part = (bag,) if edges is None else slice(edges[bag], edges[bag + 1])
            order = rng.permutation(len(array[part]))
            array[part] = array[part][order]
            if name in weights:
                weights[name][part] = weights[name][part][order]
    return given | {"ids": ids, "weights": weights}


@pytest.mark.parametrize(("held", "levels"), [("float32", np.inf), ("bfloat16", 0), ("int8", 255), ("int4", 15)])
def test_rows_are_decoded_as_they_were_encoded(held, levels):
    """To half a level, as `recjax.embedding.quantize` says."""
    rows = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    encoded = np.ascontiguousarray(encode(jnp.asarray(rows), held)).view(np.uint8)
    spread = rows.max(axis=1) - rows.min(axis=1)
    most = (spread / levels / 2 * 1.001)[:, None] if levels else 2.0**-8 * np.abs(rows)
    assert (np.abs(decoded(encoded, held, 5) - rows) <= most).all()


@pytest.mark.full
def test_pooled_bags_give_the_same_scores(tmp_path):
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    trainer, state = untrained("model=deepfm", "embedding.pooling=mean")
    _, given = rows_of(trainer)
    how = ("int4", ["cpu"], None, "stablehlo", ["sparse_2"])
    truth = exported(trainer, state, tmp_path / "memory", *how)(**given)
    write(trainer, state, 0, tmp_path / "disk", *how, disk=["all"])
    model = loader.load(tmp_path / "disk", pooled_bytes=2**20)
    found = model(**given)
    np.testing.assert_allclose(found, truth, rtol=1e-6)
    assert len(model.pooled) == 6, "all but the one whose bags have one id, with its first-order weights"
    asked = {name: model.stores.hits[name] + model.stores.misses[name] for name in model.pooled}
    misses = sum(bags.misses for bags in model.pooled.values())
    again = model(**mixed(given, np.random.default_rng(0)))
    np.testing.assert_array_equal(again, found, "keys do not depend on the order of ids")
    assert asked == {name: model.stores.hits[name] + model.stores.misses[name] for name in model.pooled}
    assert sum(bags.misses for bags in model.pooled.values()) == misses > 0
    weights = {name: array * np.float32(1.5) for name, array in given["weights"].items()}
    others = model(**given | {"weights": weights})
    memory = loader.load(tmp_path / "memory", pooled_bytes=0)
    np.testing.assert_allclose(others, memory(**given | {"weights": weights}), rtol=1e-6)
    assert np.abs(others / found - 1).max() > 0.01, "weights are part of the key"
    with pytest.raises(loader.ExportError, match="no table on disk with bags of several ids"):
        loader.load(tmp_path / "memory", pooled_bytes=1)


def test_mistakes_in_tables_on_disk(tmp_path):
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    trainer, state = untrained()
    with pytest.raises(ConfigError, match="the model has no table 'sparse_9'. Did you mean sparse_3"):
        write(trainer, state, 0, tmp_path / "made", disk=["sparse_9"])
    with pytest.raises(ConfigError, match="--disk is for --format stablehlo|by the package onnx"):
        recjax.export(tmp_path / "run", tmp_path / "made", format="onnx", disk="all")
