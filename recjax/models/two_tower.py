"""Models of two sides, a vector for the user and one for the item: they find candidates among all items.

The score of a pair is the product of the two vectors, so that items have theirs once and for all users.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.errors import ConfigError
from recjax.models.batch_losses import AnyBatchLoss, BatchSoftmax
from recjax.models.dense import full_precision
from recjax.models.layers import Mlp, check_widths, input_names


@dataclasses.dataclass(frozen=True)
class Side:
    """The part of a row that one side of a model sees.

    Attributes:
      features: categorical features; the first tells users, or items, apart.
      dense: places of its columns among the dense features.
    """

    features: tuple[str, ...]
    dense: tuple[int, ...] = ()


DRAWN = ".drawn"  # ends the name of the lookup of items that are drawn for a loss
Sides = Mapping[str, Side]  # "user" and "item"


@dataclasses.dataclass(frozen=True)
class TwoSidedConfig(abc.ABC):
    """Base of their configs."""

    first_order: ClassVar[bool] = False
    two_sided: ClassVar[bool] = True
    user: tuple[str, ...] = ()  # features of the user, that which tells users apart first; empty: data.user alone
    item: tuple[str, ...] = ()  # features of the item, likewise; empty: data.item alone
    normalize: bool = True  # divide vectors by their length, so that a score is the cosine of their angle
    loss: AnyBatchLoss = BatchSoftmax()  # loss of a pair among the items of the batch

    def input_names(self, dense: Sequence[str], dims: Mapping[str, int]) -> list[str]:
        """Names of the inputs of the layers that see all features: see `recjax.train.start_dense`."""
        return input_names(dense, dims)

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int, sides: Sides | None = None) -> TwoSided:
        """Makes the module.

        Args:
          dense: K, dense features; may be 0.
          dims: feature name -> D of its pooled embedding.
          dtype: of the computation; parameters start as float32.
          seed: of the initial weights.
          sides: what each sees; None: the features that the config names.

        Raises:
          ConfigError: the vectors of the two sides would have different lengths.
        """
        del dense
        sides = {"user": Side(self.user), "item": Side(self.item)} if sides is None else sides
        rngs = nnx.Rngs(seed)
        towers = {name: self.tower(side, dims, dtype=dtype, rngs=rngs) for name, side in sides.items()}
        return TwoSided(towers["user"], towers["item"], self.normalize, dtype)

    @abc.abstractmethod
    def tower(self, side: Side, dims: Mapping[str, int], *, dtype: Any, rngs: nnx.Rngs) -> Tower:
        """Makes the part that gives one side's vector."""


@dataclasses.dataclass(frozen=True)
class MFConfig(TwoSidedConfig):
    """Matrix factorisation: the vectors are the rows of the user and of the item."""

    kind: ClassVar[str] = "mf"

    def tower(self, side: Side, dims: Mapping[str, int], *, dtype: Any, rngs: nnx.Rngs) -> Tower:
        """See `TwoSidedConfig`."""
        if len(side.features) != 1 or side.dense or len({*dims.values()}) > 1:
            raise ConfigError(
                f"model=mf has a vector for each user and one for each item, of one length, and here is "
                f"{', '.join(f'{name} ({dims[name]})' for name in side.features)}. Take model=two_tower for further "
                "features, and the same embedding.dim for both."
            )
        return Tower(side, dims, (), dtype=dtype, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class TwoTowerConfig(TwoSidedConfig):
    """Two towers: an MLP for each side over any of its features."""

    kind: ClassVar[str] = "two_tower"
    layers: tuple[int, ...] = (64, 64)  # widths of each tower's layers; the last is the length of the vectors

    def __post_init__(self) -> None:
        check_widths("layers", self.layers, least=1)

    def tower(self, side: Side, dims: Mapping[str, int], *, dtype: Any, rngs: nnx.Rngs) -> Tower:
        """See `TwoSidedConfig`."""
        return Tower(side, dims, self.layers, dtype=dtype, rngs=rngs)


class Tower(nnx.Module):
    """The vector of one side: an MLP of its dense features and pooled embeddings, its last layer linear."""

    def __init__(
        self, side: Side, dims: Mapping[str, int], layers: Sequence[int], *, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.side, self.dtype = side, dtype
        inputs = len(side.dense) + sum(dims[name] for name in side.features)
        self.mlp = Mlp(inputs, layers, linear_output=bool(layers), dtype=dtype, rngs=rngs)

    def __call__(self, dense_BxK: jax.Array, pooled: Mapping[str, jax.Array]) -> jax.Array:
        """[b, E] from all dense features [b, K] and all pooled embeddings, f -> [b, D]."""
        columns = [dense_BxK[:, place][:, None] for place in self.side.dense]
        parts = [x.astype(self.dtype) for x in (*columns, *(pooled[name] for name in self.side.features))]
        return self.mlp(jnp.concatenate(parts, axis=1))


class TwoSided(nnx.Module):
    """u . v, of vectors of length 1 if `normalize`."""

    def __init__(self, user: Tower, item: Tower, normalize: bool, dtype: Any) -> None:
        self.user, self.item, self.normalize, self.dtype = user, item, normalize, full_precision(dtype)

    def vectors(self, dense_BxK: jax.Array, pooled: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Vectors of the users and of the items, [b, E] each, from dense features [b, K] and embeddings [b, D]."""
        both = [tower(dense_BxK, pooled).astype(self.dtype) for tower in (self.user, self.item)]
        user_BxE, item_BxE = map(_of_length_1, both) if self.normalize else both
        return user_BxE, item_BxE

    def items(self, rows_LxD: jax.Array) -> jax.Array:
        """Vectors of some items, [L, E], from their rows: the item's side must see nothing else."""
        none_LxK = jnp.zeros((len(rows_LxD), 0), rows_LxD.dtype)
        vectors_LxE = self.item(none_LxK, {self.item.side.features[0]: rows_LxD}).astype(self.dtype)
        return _of_length_1(vectors_LxE) if self.normalize else vectors_LxE

    def __call__(self, dense_BxK: jax.Array, pooled: Mapping[str, jax.Array]) -> jax.Array:
        """The score of each pair, [b]."""
        user_BxE, item_BxE = self.vectors(dense_BxK, pooled)
        return jnp.sum(user_BxE * item_BxE, axis=1)


def _of_length_1(x_BxE: jax.Array) -> jax.Array:
    """Rows divided by their lengths; a row of zeros stays, with gradients of 0."""
    squares_Bx1 = jnp.sum(jnp.square(x_BxE), axis=1, keepdims=True)
    return x_BxE * jax.lax.rsqrt(jnp.where(squares_Bx1 > 0, squares_Bx1, 1))
