"""The scale of clipping, by hand and against the oracle's."""

import jax.numpy as jnp
import numpy as np
import pytest

from recjax.embedding import reference
from recjax.train.clipping import clip_scale


@pytest.mark.parametrize(
    ("squares", "clip_norm", "expected"), [(25, 10, 1), (25, 5, 1), (100, 5, 0.5), (0, 5, 1), (9, 0.75, 0.25)]
)
def test_scale_by_hand(squares, clip_norm, expected):
    scale = clip_scale(jnp.float32(squares), clip_norm)
    assert scale.dtype == jnp.float32 and float(scale) == expected


def test_the_oracle_by_hand():
    gradients = [np.array([[3.0, 0.0], [0.0, 0.0]]), np.array([4.0])]
    same, half = reference.clip(gradients, 5), reference.clip(gradients, 2.5)
    assert [g.tolist() for g in same] == [g.tolist() for g in reference.clip(gradients, 0)] == [[[3, 0], [0, 0]], [4]]
    assert [g.tolist() for g in half] == [[[1.5, 0], [0, 0]], [2]]
