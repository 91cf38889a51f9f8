"""A trained model as one function on one device, traced for any number of samples: what an export consists of.

    outputs = program(tables, parameters, state, inputs)

Rows are taken straight from whole tables and summed bag by bag: nothing is routed, and nothing travels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from recjax import kernels
from recjax.data.batch import Schema
from recjax.embedding import quantize
from recjax.embedding.elements import Elements
from recjax.embedding.spec import FeatureSpec
from recjax.errors import ConfigError
from recjax.serving.loader import outside_calls
from recjax.train.module import ModuleDef, outputs
from recjax.train.table_specs import specs
from recjax.train.trainer import Trainer

Held = quantize.Stored  # rows as `quantize.encode` gives them

_UNTRACED = (jax.errors.InconclusiveDimensionOperation, jax.errors.ConcretizationTypeError)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Shapes and dtypes of what a program takes, with a symbol for the number of samples.

    Attributes:
      inputs: "dense", "ids", "lengths" (of jagged features), "weights" (of weighted ones), the last three by feature;
        and, where there are features of users, "user", and where elements are scored that others meet, "pairs".
      symbols: name of a symbol -> what it counts.
      rows: table on disk -> the symbol for the rows of it that a batch needs.
    """

    inputs: dict[str, Any]
    symbols: dict[str, str]
    rows: dict[str, Any]


def input_shapes(schema: Schema, user: Collection[str] = (), on_disk: Sequence[str] = ()) -> Shapes:
    """Inputs of a program for samples of these columns: dense float32 [b, K]; ids int32 [b, H], or [l] if jagged.

    Where elements are scored, "pairs" is int32 [p]: room for all pairs of theirs and those that they meet, whatever it
    holds. Those of the features `user` have a bag for each of u users instead, and "user", int32 [b], is the user of
    each sample: what many samples of one user have in common is looked up once. Of the tables `on_disk` the program
    sees only some rows, and ids count those.
    """
    jagged = [f.name for f in schema.features if f.bag is None]
    names = ["b", *(["u"] if user else []), *(f"l{number}" for number in range(len(jagged)))]
    meets = find_meetings(schema)
    names += (of_rows := [f"r{number}" for number in range(len(on_disk))]) + ["p"] * bool(meets)
    sizes = dict(zip(names, jax.export.symbolic_shape(", ".join(names)), strict=True))
    bags = {f.name: sizes["u" if f.name in user else "b"] for f in schema.features}
    aligned = {name: group.name for group in schema.groups for name in group.features}
    counted = {name: (name in user, name in aligned, aligned.get(name, name)) for name in jagged}
    numbers = {key: number for number, key in enumerate(dict.fromkeys(counted.values()))}
    of = {name: f"l{numbers[counted[name]]}" for name in jagged}  # of a group all have as many ids
    at: dict[str, Any] = {
        f.name: (sizes[of[f.name]],) if f.bag is None else (bags[f.name], f.bag) for f in schema.features
    }
    like = jax.ShapeDtypeStruct
    return Shapes(
        {
            "dense": like((sizes["b"], len(schema.dense)), jnp.float32),
            "ids": {name: like(shape, jnp.int32) for name, shape in at.items()},
            "lengths": {name: like((bags[name],), jnp.int32) for name in jagged},
            "weights": {f.name: like(at[f.name], jnp.float32) for f in schema.features if f.weighted},
        }
        | ({"user": like((sizes["b"],), jnp.int32)} if user else {})
        | ({"pairs": like((sizes["p"],), jnp.int32)} if meets else {}),
        {"b": "samples"}
        | ({"u": "users"} if user else {})
        | ({"p": "pairs of elements"} if meets else {})
        | {of[name]: f"ids of {name}" for name in jagged}
        | {symbol: f"rows of {name}" for symbol, name in zip(of_rows, on_disk, strict=True)},
        {name: sizes[symbol] for symbol, name in zip(of_rows, on_disk, strict=True)},
    )


def find_meetings(schema: Schema) -> list[tuple[str, str]]:
    """Finds the elements that meet scored ones (`Elements.beside`): a feature of each such group, and one of these."""
    groups = (group for group in schema.groups if group.name != schema.label_group)
    found = ((g.features[0], next((x for x in g.like if x in schema.labelled_features), "")) for g in groups)
    return [(name, other) for name, other in found if other]


def make_program(trainer: Trainer, held: Mapping[str, Held], user: Collection[str] = ()) -> Callable[..., jax.Array]:
    """Returns the function program(tables, parameters, state, inputs) -> float32 logits [b], of tasks outputs [b, O].

    Where elements are scored, b stands for their number.

    `tables` are by name, their rows in the order of ids and encoded as `held` says. `parameters` and `state` are of the
    module, leaf by leaf: "dense" and "module" of `state.export`. `inputs` are as `input_shapes` has them, also for
    `user`; an id outside its table makes the sample NaN. Ids beyond the sum of the lengths do not count.

    Raises:
      ConfigError: the model cannot be exported.
    """
    check_exportable(trainer)
    tables_of, features = specs(trainer.config, trainer.source.schema)
    for feature in features:
        if feature.pooling == "none" and feature.bag is None and feature.reads in user:
            raise ConfigError(
                f"--user: feature {feature.reads!r} is jagged and not pooled, and rows one by one are not taken from "
                "users to samples. Leave it out of --user, or pool it (sum or mean)."
            )
    dims = {table.name: table.dim for table in tables_of}
    module, scored = ModuleDef.of(trainer.model), trainer.source.schema.labelled_features

    def program(tables: dict[str, jax.Array], parameters: Any, state: Any, inputs: dict[str, Any]) -> jax.Array:
        pooled = {f.name: _pool(f, held[f.table], tables[f.table], dims[f.table], inputs) for f in features}
        for feature in features:
            if feature.reads in user:
                pooled[feature.name] = _of_users(pooled[feature.name], inputs["user"])
        with kernels.switched_off():  # they are of this machine
            count = inputs["ids"][scored[0]].shape[0] if scored else None
            found = outputs(module.merge(parameters, state), inputs["dense"], pooled, trainer.tasks, count)
        return found.astype(jnp.float32)

    return program


def check_exportable(trainer: Trainer) -> None:
    """Refuses a run whose model has no program of its own (ConfigError)."""
    if trainer.config.compute_dtype == "float64":
        raise ConfigError(
            "the run computes in float64, and exports hold float32 at most. Train with compute_dtype=float32."
        )


def _pool(feature: FeatureSpec, held: Held, table: jax.Array, dim: int, inputs: dict[str, Any]) -> jax.Array | Elements:
    """Returns a feature as the module sees it: [b, D], or its rows one by one; of users [u, D]."""
    ids, weights = inputs["ids"][feature.reads], inputs["weights"].get(feature.reads)
    # Beyond the table comes NaN in any encoding: of unsigned integers the largest value takes its place.
    taken = table.at[ids].get(mode="fill", wrap_negative_indices=False)
    rows = _decoded(taken, held, dim)
    if feature.weighted:
        rows *= weights[..., None]
    if feature.bag is not None:
        if feature.pooling == "none":
            return unpooled(rows)
        return rows.sum(axis=1) / (feature.bag if feature.pooling == "mean" else 1)
    lengths_B = inputs["lengths"][feature.reads]
    ends_B, L = jnp.cumsum(lengths_B), ids.shape[0]
    sample_L = jnp.cumsum(jnp.zeros(L, jnp.int32).at[ends_B].add(1, mode="drop"))  # bags that end at or before each id
    if feature.pooling == "none":
        there_Lx1 = (sample_L < lengths_B.shape[0])[:, None]
        pairs = inputs["pairs"].shape[0] if feature.beside else 0
        return Elements(jnp.where(there_Lx1, rows, 0), sample_L, lengths_B.shape[0], pairs=pairs)
    sums_BxD = jax.ops.segment_sum(rows, sample_L, lengths_B.shape[0])  # beyond the last bag nothing counts
    if feature.pooling == "mean":
        sums_BxD /= jnp.maximum(lengths_B, 1)[:, None].astype(sums_BxD.dtype)
    return sums_BxD


def _of_users(of_users: jax.Array | Elements, user_B: jax.Array) -> jax.Array | Elements:
    """A feature of users, as the module sees it for samples of these users."""
    if isinstance(of_users, Elements):
        rows_UxHxD, _ = of_users.padded()
        return unpooled(jnp.take(rows_UxHxD, user_B, axis=0, mode="clip"))
    return jnp.take(of_users, user_B, axis=0, mode="clip")


def unpooled(rows_BxHxD: jax.Array) -> Elements:
    """Rows of bags that all hold H ids, as the module sees them."""
    b, H, D = rows_BxHxD.shape
    segments_BxH = jnp.broadcast_to(jnp.arange(b, dtype=jnp.int32)[:, None], (b, H))
    return Elements(rows_BxHxD.reshape(b * H, D), segments_BxH.ravel(), b, H)


def _decoded(encoded: jax.Array, held: Held, dim: int) -> jax.Array:
    """Rows of `dim` columns as float32, also of a symbolic number of them.

    StableHLO cannot find the shape of four bytes cast to one float then, as `quantize.decode` does it. So scale and
    bias of int8 and int4 are put together from their bytes by arithmetic.
    """
    if held == "float32" or held == "bfloat16":
        return quantize.decode(encoded, held)

    def number(first: int) -> jax.Array:
        words = (encoded[..., first + i : first + i + 1].astype(jnp.uint32) << (8 * i) for i in range(4))
        return jax.lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, words), jnp.float32)

    E = encoded.shape[-1] - 8
    levels = encoded[..., :E]
    if held == "int4":
        levels = jnp.stack([levels & 15, levels >> 4], axis=-1).reshape(*encoded.shape[:-1], 2 * E)[..., :dim]
    return number(E + 4) + levels.astype(jnp.float32) * number(E)


def serialise(
    program: Callable[..., jax.Array], arguments: tuple[Any, ...], platforms: Sequence[str]
) -> tuple[bytes, tuple[Any, ...]]:
    """A program as `jax.export` writes it (StableHLO), and its results' symbolic shape.

    Raises:
      ConfigError: the model needs to know how many samples there are, or calls functions of this process.
    """
    try:
        exported = jax.export.export(jax.jit(program), platforms=platforms)(*arguments)
    except (ConfigError, *_UNTRACED) as error:
        cause = error.__cause__ if isinstance(error, ConfigError) else error
        if not isinstance(cause, _UNTRACED) and "_DimExpr" not in str(cause):
            raise
        what = " ".join(str(error).partition(" Correct it.")[0].split())[:400].rstrip(".")
        raise ConfigError(
            f"the model cannot be traced for any number of samples: {what}. Write its __call__ so that no Python code "
            "needs that number: x.shape[0] instead of len(x), and no loop or branch over it."
        ) from error
    if outside := outside_calls(exported):
        raise ConfigError(
            f"the model calls functions of this process ({', '.join(outside)}), which no other one has. Write its "
            "__call__ without callbacks and foreign functions."
        )
    return bytes(exported.serialize()), tuple(exported.out_avals[0].shape)
