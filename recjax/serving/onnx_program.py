"""The program of `recjax.serving.program` as an ONNX graph, for onnxruntime: the same inputs, tables and encodings.

Rows of tables stay in the files that the export has anyway: the graph names them as external data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax import kernels
from recjax.embedding.quantize import Stored
from recjax.embedding.spec import FeatureSpec
from recjax.errors import ConfigError
from recjax.serving.onnx_graph import OPSET, Graph, add_module
from recjax.serving.program import Shapes, check_exportable, unpooled
from recjax.train.module import ModuleDef, outputs
from recjax.train.table_specs import specs
from recjax.train.trainer import Trainer


def require() -> None:
    """Raises ConfigError where the package onnx is not installed."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise ConfigError(
            "recjax export --format onnx writes by the package onnx, and that is not installed. Install the extra "
            "`onnx` (pip install -c constraints.txt -e '.[onnx]')."
        ) from None


def make_onnx(
    trainer: Trainer,
    held: Mapping[str, Stored],
    user: Collection[str],
    inputs: Shapes,
    leaves: Mapping[str, Mapping[str, np.ndarray]],
    files: Mapping[str, str],
    folder: Path,
) -> tuple[bytes, tuple[Any, ...]]:
    """Returns a program as ONNX, and the symbolic shape of its outputs.

    Args:
      trainer: of the model.
      held: how the rows of each table are encoded.
      user: features that have a bag for each user.
      inputs: of the program.
      leaves: "dense" and "module" of `state.export`.
      files: table -> its file in the export, .npy.
      folder: where these are already.

    Raises:
      ConfigError: the model cannot be exported so.
    """
    from onnx import TensorProto, helper

    check_exportable(trainer)
    if trainer.config.compute_dtype == "bfloat16":
        raise ConfigError(
            "the run computes in bfloat16, which onnxruntime does not multiply on CPUs. Take --format stablehlo."
        )
    tables, features = specs(trainer.config, trainer.source.schema)
    for feature in features:
        if feature.pooling == "none" and feature.bag is None:
            raise ConfigError(
                f"feature {feature.name!r} is jagged and not pooled, and rows end to end are not written as ONNX. Take "
                "--format stablehlo, give its bags a fixed size, or pool them (sum or mean)."
            )
    dims = {table.name: table.dim for table in tables}
    graph, given = Graph(), _names(inputs.inputs)
    external = [_external(name, files[name], folder, held[name]) for name in dims]
    samples = graph.node("Shape", "dense", start=0, end=1)
    pooled = {f.name: _pool(graph, f, held[f.table], dims[f.table]) for f in features}
    for feature in features:
        if feature.reads in user:
            pooled[feature.name] = graph.node("Gather", pooled[feature.name], "user", axis=0)
    parts = [list(map(jnp.asarray, leaves[kind].values())) for kind in ("dense", "module")]

    def module(dense: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
        seen = {f.name: unpooled(rows[f.name]) if f.pooling == "none" else rows[f.name] for f in features}
        with kernels.switched_off():
            merged = ModuleDef.of(trainer.model).merge(*parts)
            return outputs(merged, dense, seen, trainer.tasks).astype(jnp.float32)

    b = inputs.inputs["dense"].shape[0]
    shapes = {
        f.name: (b, trainer.source.schema.feature(f.reads).bag, dims[f.table])
        if f.pooling == "none"
        else (b, dims[f.table])
        for f in features
    }
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    arguments = (inputs.inputs["dense"], like)
    ordered = ["dense", *(pooled[name] for name in sorted(like))]  # as a pytree has the leaves of a dict
    shape = add_module(graph, module, arguments, ordered, samples, "logits")
    types = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}
    info = [
        helper.make_tensor_value_info(name, types[x.dtype.name], [n if isinstance(n, int) else str(n) for n in x.shape])
        for name, x in given.items()
    ]
    out = helper.make_tensor_value_info(
        "logits", TensorProto.FLOAT, [n if isinstance(n, int) else str(n) for n in shape]
    )
    made = helper.make_graph(graph.nodes, "recjax", info, [out], [*graph.constants, *external])
    model = helper.make_model(
        made, producer_name="recjax", opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10
    )
    return model.SerializeToString(), tuple(shape)


def _names(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs by the names that they have in the graph."""
    of = {f"{kind}.{name}": x for kind in ("ids", "lengths", "weights") for name, x in inputs[kind].items()}
    return {name: inputs[name] for name in ("dense", "user") if name in inputs} | of


def _external(name: str, file: str, folder: Path, held: Stored) -> Any:
    """The rows of a table, as data that lie in its file."""
    from onnx import TensorProto

    rows = np.load(folder / file, mmap_mode="r", allow_pickle=False)
    types = {"float32": TensorProto.FLOAT, "bfloat16": TensorProto.BFLOAT16}
    tensor = TensorProto(name=f"table.{name}", data_type=types.get(held, TensorProto.UINT8), dims=rows.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", rows.offset), ("length", rows.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _pool(graph: Graph, feature: FeatureSpec, held: Stored, dim: int) -> str:
    """A feature as the module sees it: [b, D], or its rows one by one [b, H, D]; of users [u, D]."""
    ids, weights = f"ids.{feature.reads}", f"weights.{feature.reads}"
    if feature.bag is None:
        ids_BxH, mask_BxHx1, places = _rectangle(graph, feature)
    else:
        ids_BxH, mask_BxHx1, places = ids, None, None
    rows = _decoded(graph, graph.node("Gather", f"table.{feature.table}", ids_BxH, axis=0), held, dim)
    if feature.weighted:
        of_each = weights if places is None else graph.node("Gather", weights, places, axis=0)
        rows = graph.node("Mul", rows, graph.node("Unsqueeze", of_each, graph.ints(2)))
    if mask_BxHx1 is not None:
        rows = graph.node("Mul", rows, mask_BxHx1)
    if feature.pooling == "none":
        return rows
    summed = graph.node("ReduceSum", rows, graph.ints(1), keepdims=0)
    if feature.pooling == "sum":
        return summed
    if feature.bag is not None:
        return graph.node("Div", summed, np.float32(feature.bag))
    count = graph.node("Max", graph.cast(f"lengths.{feature.reads}", np.float32), np.float32(1))
    return graph.node("Div", summed, graph.node("Unsqueeze", count, graph.ints(1)))


def _rectangle(graph: Graph, feature: FeatureSpec) -> tuple[str, str, str]:
    """Jagged bags side by side, as wide as the longest one: ids, a float mask with an axis more, and places in `ids`.

    Sums over an axis have an order, which ONNX's additions by index have not.
    """
    lengths_B = graph.cast(f"lengths.{feature.reads}", np.int64)
    starts_B = graph.node("CumSum", lengths_B, np.int64(0), exclusive=1)
    longest = graph.node("ReduceMax", lengths_B, graph.ints(0), keepdims=0)
    at_H = graph.node("Range", np.int64(0), longest, np.int64(1))
    mask_BxH = graph.node("Less", graph.node("Unsqueeze", at_H, graph.ints(0)), _column(graph, lengths_B))
    places_BxH = graph.node("Add", _column(graph, starts_B), graph.node("Unsqueeze", at_H, graph.ints(0)))
    places_BxH = graph.node("Where", mask_BxH, places_BxH, np.int64(0))
    mask_BxHx1 = graph.node("Unsqueeze", graph.cast(mask_BxH, np.float32), graph.ints(2))
    return graph.node("Gather", f"ids.{feature.reads}", places_BxH, axis=0), mask_BxHx1, places_BxH


def _column(graph: Graph, x_B: str) -> str:
    return graph.node("Unsqueeze", x_B, graph.ints(1))


def _decoded(graph: Graph, encoded: str, held: Stored, dim: int) -> str:
    """Rows as float32, [..., D]."""
    if held == "float32":
        return encoded
    if held == "bfloat16":
        return graph.cast(encoded, np.float32)
    E = dim if held == "int8" else -(-dim // 2)
    levels = _columns(graph, encoded, 0, E)
    if held == "int4":
        halves = (
            graph.node("BitwiseAnd", levels, np.uint8(15)),
            graph.node("BitShift", levels, np.uint8(4), direction="RIGHT"),
        )
        pairs = graph.node("Concat", *(graph.node("Unsqueeze", half, graph.ints(-1)) for half in halves), axis=-1)
        shape = graph.node("Concat", graph.node("Shape", encoded, end=-1), graph.ints(2 * E), axis=0)
        levels = _columns(graph, graph.node("Reshape", pairs, shape), 0, dim)
    scale, bias = (_number(graph, encoded, E + first) for first in (0, 4))
    return graph.node("Add", bias, graph.node("Mul", graph.cast(levels, np.float32), scale))


def _columns(graph: Graph, x: str, start: int, stop: int) -> str:
    return graph.node("Slice", x, graph.ints(start), graph.ints(stop), graph.ints(-1))


def _number(graph: Graph, encoded: str, first: int) -> str:
    """The float32 [..., 1] whose four bytes stand from a column on, which this version of ONNX cannot cast: exact."""
    low, middle, high, top = (
        graph.cast(_columns(graph, encoded, first + i, first + i + 1), np.float32) for i in range(4)
    )
    node = graph.node
    odd = node("Floor", node("Div", high, np.float32(128)))  # lowest bit of the exponent
    mantissa = node("Sub", high, node("Mul", odd, np.float32(128)))
    for byte, weight in ((middle, 256), (low, 65536)):
        mantissa = node("Add", mantissa, node("Div", byte, np.float32(weight)))  # of 7 + 16 bits
    negative = node("Floor", node("Div", top, np.float32(128)))
    exponent = node("Sub", top, node("Mul", negative, np.float32(128)))
    exponent = graph.cast(node("Add", node("Mul", exponent, np.float32(2)), odd), np.int64)
    normal = graph.cast(node("Greater", exponent, np.int64(0)), np.float32)
    significand = node("Add", node("Div", mantissa, np.float32(128)), normal)  # 1.m, or 0.m of the smallest numbers
    powers = np.ldexp(np.float32(1), np.clip(np.arange(256), 1, 254) - 127)
    powers[255] = np.nan
    magnitude = node("Mul", significand, node("Gather", powers, exponent, axis=0))
    return node("Mul", magnitude, node("Sub", np.float32(1), node("Mul", negative, np.float32(2))))
