"""Arrays of a batch that travel to the devices as one."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.parallel.packed import PackedForm, pack_words

pytestmark = pytest.mark.light_compile

DTYPES = (np.int32, np.float32, np.bool_, np.int16)
SHAPES = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=2), st.integers(0, 3))


@pytest.mark.full
@settings(max_examples=12)
@given(st.lists(SHAPES, max_size=8), st.integers(1, 4))
def test_each_device_gets_its_part_of_each_array(leaves: list[Any], devices: int) -> None:
    rng = np.random.default_rng(0)
    made = [rng.integers(-9, 9, (devices * rows, *further)).astype(dtype) for dtype, further, rows in leaves]
    tree = {"first": made[:2], "rest": tuple(made[2:])}
    form = PackedForm.of(tree, devices)
    words_NxE = np.full((devices, sum(form.words)), 77, np.int32)
    pack_words(tree, form, words_NxE)
    for device in range(devices):
        parts = jax.tree.map(lambda x, n=device: np.split(x, devices)[n], tree)
        found = jax.jit(form.unpack)(words_NxE[device])
        assert str(jax.tree.structure(found)) == str(jax.tree.structure(tree))
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b, strict=True), found, parts)


@pytest.mark.parametrize(("dtype", "bits"), [(np.float32, np.uint32), (np.float64, np.uint64)])
def test_infinities_and_nan_keep_their_bits(dtype: Any, bits: Any) -> None:
    with jax.enable_x64(True):
        values = np.array([np.inf, -np.inf, np.nan, -0.0, np.finfo(dtype).tiny / 4], dtype)
        form = PackedForm.of(values, 1)
        words_NxE = np.empty((1, sum(form.words)), np.int32)
        pack_words(values, form, words_NxE)
        np.testing.assert_array_equal(np.asarray(form.unpack(words_NxE[0])).view(bits), values.view(bits))
