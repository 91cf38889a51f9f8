"""The dense module of a model as nodes of an ONNX graph: each operation of its jaxpr becomes one or a few of ONNX.

The jaxpr is traced for any number of samples, so that one graph takes them all. What depends on no input (statistics of
BatchNorm, indices of pairs) is computed here and becomes a constant. Specifications: https://onnx.ai/onnx/operators/
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax.errors import ConfigError

OPSET = 20  # of 2023: onnxruntime 1.17 and later run it


class Graph:
    """Nodes and constants of a graph as they come about; a value is known by its name, a constant also by its array."""

    def __init__(self) -> None:
        """An empty graph."""
        from onnx import helper, numpy_helper

        self._helper, self._numpy = helper, numpy_helper
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def node(self, op: str, *inputs: Any, **attributes: Any) -> str:
        """Adds a node with one output, and returns its name. Inputs are names, arrays or numbers."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(self._helper.make_node(op, [self.name(x) for x in inputs], [name], **attributes))
        return name

    def name(self, value: Any) -> str:
        """The name of a value; of an array or a number that of a constant."""
        if isinstance(value, str):
            return value
        array = np.asarray(value)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = f"c{len(self._known)}"
            self.constants.append(self._numpy.from_array(np.array(array, order="C"), self._known[key]))
        return self._known[key]

    def cast(self, value: Any, dtype: Any) -> str:
        """A value in another dtype."""
        return self.node("Cast", value, to=self._helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def ints(self, *numbers: int) -> np.ndarray:
        """Axes or a shape, as ONNX takes them."""
        return np.array(numbers, np.int64)


def add_module(
    graph: Graph,
    module: Callable[..., jax.Array],
    arguments: Sequence[Any],
    names: Sequence[str],
    samples: str,
    out: str,
) -> tuple[Any, ...]:
    """Adds the nodes of a function of arrays to a graph.

    Args:
      graph: the graph.
      module: takes any pytrees of arrays, and gives one array.
      arguments: these, in shapes with one symbol for the number of samples.
      names: of the values that the leaves of `arguments` are in the graph.
      samples: name of the number of samples, int64 [1].
      out: name of the result.

    Returns:
      The result's shape, with symbols.

    Raises:
      ConfigError: an operation that has no counterpart here.
    """
    closed = jax.make_jaxpr(module)(*arguments)
    (result,) = _Translation(graph, samples).run(closed.jaxpr, [np.asarray(x) for x in closed.consts], list(names))
    graph.node("Identity", result)
    graph.nodes[-1].output[0] = out
    return tuple(closed.out_avals[0].shape)


class _Translation:
    def __init__(self, graph: Graph, samples: str) -> None:
        self.graph, self.samples = graph, samples

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Values of the results: names, or arrays where they depend on no input."""
        values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def value(atom: Any) -> Any:
            return np.asarray(atom.val) if hasattr(atom, "val") else values[atom]

        for equation in jaxpr.eqns:
            found = self._equation(equation, [value(atom) for atom in equation.invars])
            values |= dict(zip(equation.outvars, found, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, given: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if inner is not None and name not in _LOOPS:
            consts = [np.asarray(x) for x in getattr(inner, "consts", ())]
            return self.run(getattr(inner, "jaxpr", inner), consts, given)
        concrete = all(isinstance(size, int) for var in equation.outvars for size in var.aval.shape)
        if concrete and not any(isinstance(x, str) for x in given) and name != "dim_as_value":
            with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
                found = equation.primitive.bind(*map(jnp.asarray, given), **params)
            return [np.asarray(x) for x in (found if equation.primitive.multiple_results else [found])]
        if name in _ELEMENTWISE:
            return [self.graph.node(_ELEMENTWISE[name], *given)]
        if name in _COMPARED:
            first, *negated = _COMPARED[name]
            compared = self.graph.node(first, *given)
            return [self.graph.node("Not", compared) if negated else compared]
        if name in _REDUCED:
            axes = self.graph.ints(*params["axes"])
            return [self.graph.node(_REDUCED[name], given[0], axes, keepdims=0)]
        translate = getattr(self, f"_{name}", None)
        if translate is None:
            raise ConfigError(
                f"the model computes {name!r}, which `recjax export --format onnx` does not know. Write its __call__ "
                "with sums, products, comparisons, reductions and activations, or take --format stablehlo."
            )
        return [translate(equation, *given)]

    def _shape(self, sizes: Sequence[Any]) -> Any:
        """A shape for ONNX, of which sizes may be the number of samples."""
        if all(isinstance(size, int) for size in sizes):
            return self.graph.ints(*sizes)
        for size in sizes:
            if not isinstance(size, int) and str(size) != "b":
                raise ConfigError(
                    f"the model makes an array with an axis of {size} (b being the number of samples), which `recjax "
                    "export --format onnx` cannot. Keep samples apart, or take --format stablehlo."
                )
        parts = [self.graph.ints(size) if isinstance(size, int) else self.samples for size in sizes]
        return self.graph.node("Concat", *parts, axis=0)

    def _reshape(self, equation: Any, x: Any, *_: Any) -> str:
        sizes = equation.outvars[0].aval.shape
        unknown = [size for size in sizes if not isinstance(size, int)]
        if len(unknown) == 1 and 0 not in sizes:
            return self.graph.node("Reshape", x, self.graph.ints(*(s if isinstance(s, int) else -1 for s in sizes)))
        return self.graph.node("Reshape", x, self._shape(sizes), allowzero=1)

    _squeeze = _expand_dims = _reshape

    def _broadcast_in_dim(self, equation: Any, x: Any, *_: Any) -> str:
        before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        kept = equation.params["broadcast_dimensions"]
        if added := [axis for axis in range(len(after)) if axis not in kept]:
            x = self.graph.node("Unsqueeze", x, self.graph.ints(*added))
        now = [before[kept.index(axis)] if axis in kept else 1 for axis in range(len(after))]
        return x if tuple(now) == tuple(after) else self.graph.node("Expand", x, self._shape(after))

    def _concatenate(self, equation: Any, *given: Any) -> str:
        return self.graph.node("Concat", *given, axis=equation.params["dimension"])

    def _stack(self, equation: Any, *given: Any) -> str:
        axis = equation.params["axis"]
        parts = (self.graph.node("Unsqueeze", x, self.graph.ints(axis)) for x in given)
        return self.graph.node("Concat", *parts, axis=axis)

    def _transpose(self, equation: Any, x: Any) -> str:
        return self.graph.node("Transpose", x, perm=list(equation.params["permutation"]))

    def _slice(self, equation: Any, x: Any) -> str:
        shape, of = equation.invars[0].aval.shape, equation.params
        steps = of["strides"] or (1,) * len(shape)
        cut = [
            (axis, start, stop, step)
            for axis, (start, stop, step) in enumerate(
                zip(of["start_indices"], of["limit_indices"], steps, strict=True)
            )
            if not (isinstance(start, int) and start == 0 and str(stop) == str(shape[axis]) and step == 1)
        ]
        if not all(isinstance(n, int) for each in cut for n in each):
            raise ConfigError("the model takes some samples apart from others. Take --format stablehlo.")
        axes, starts, stops, by = (self.graph.ints(*column) for column in zip(*cut, strict=True))
        return self.graph.node("Slice", x, starts, stops, axes, by)

    def _select_n(self, equation: Any, which: Any, *cases: Any) -> str:
        if len(cases) != 2 or equation.invars[0].aval.dtype != bool:
            raise ConfigError("the model chooses between more than two cases. Take --format stablehlo.")
        return self.graph.node("Where", which, cases[1], cases[0])

    def _convert_element_type(self, equation: Any, x: Any) -> str:
        return self.graph.cast(x, equation.params["new_dtype"])

    def _integer_pow(self, equation: Any, x: Any) -> str:
        power = equation.params["y"]
        return self.graph.node("Mul", x, x) if power == 2 else self._pow(equation, x, np.float32(power))

    def _pow(self, equation: Any, x: Any, y: Any) -> str:
        return self.graph.node("Pow", x, y)

    def _square(self, equation: Any, x: Any) -> str:
        return self.graph.node("Mul", x, x)

    def _rsqrt(self, equation: Any, x: Any) -> str:
        return self.graph.node("Reciprocal", self.graph.node("Sqrt", x))

    def _log1p(self, equation: Any, x: Any) -> str:
        """Higham's way: with u = 1 + x, x log(u) / (u - 1), and x where u is 1. Exact to some ulp for small x."""
        u = self.graph.node("Add", x, np.float32(1))
        less = self.graph.node("Sub", u, np.float32(1))
        none = self.graph.node("Equal", less, np.float32(0))
        safe = self.graph.node("Where", none, np.float32(1), less)
        found = self.graph.node("Div", self.graph.node("Mul", x, self.graph.node("Log", u)), safe)
        return self.graph.node("Where", none, x, found)

    def _stop_gradient(self, equation: Any, x: Any) -> str:
        return self.graph.node("Identity", x)

    _copy = _copy_p = _optimization_barrier = _stop_gradient

    def _dot_general(self, equation: Any, left: Any, right: Any) -> str:
        (left_axes, right_axes), (left_batch, right_batch) = equation.params["dimension_numbers"]
        shapes = [var.aval.shape for var in equation.invars]
        if (
            not left_batch
            and [tuple(left_axes), tuple(right_axes)] == [(len(shapes[0]) - 1,), (0,)]
            and len(shapes[1]) == 2
        ):
            return self.graph.node("MatMul", left, right)
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        of_left = [next(letters) for _ in shapes[0]]
        of_right = [next(letters) for _ in shapes[1]]
        for ours, theirs in zip([*left_batch, *left_axes], [*right_batch, *right_axes], strict=True):
            of_right[theirs] = of_left[ours]
        batch = [of_left[axis] for axis in left_batch]
        rest = [x for i, x in enumerate(of_left) if i not in (*left_batch, *left_axes)]
        rest += [x for i, x in enumerate(of_right) if i not in (*right_batch, *right_axes)]
        found = f"{''.join(of_left)},{''.join(of_right)}->{''.join([*batch, *rest])}"
        return self.graph.node("Einsum", left, right, equation=found)

    def _gather(self, equation: Any, x: Any, indices: Any) -> str:
        """Columns of one axis by constant indices, as x[:, [2, 0]] has them, and constant ranges of others."""
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        collapsed, shape = tuple(numbers.collapsed_slice_dims), equation.invars[0].aval.shape
        axes = numbers.start_index_map
        if isinstance(indices, str) or len(collapsed) > 1 or not set(collapsed) <= set(axes):
            raise ConfigError(_INDICES)
        for place, axis in enumerate(axes):
            size, starts = shape[axis], indices[..., place].ravel()
            if not isinstance(size, int) or numbers.operand_batching_dims or axis not in collapsed and np.ptp(starts):
                raise ConfigError(_INDICES)
            if ((starts < 0) | (starts + sizes[axis] > size)).any():
                raise ConfigError(f"the model takes entries beyond an axis of {size}. Correct its indices.")
            if axis not in collapsed and sizes[axis] < size:
                start, stop = self.graph.ints(starts[0]), self.graph.ints(starts[0] + sizes[axis])
                x = self.graph.node("Slice", x, start, stop, self.graph.ints(axis))
        if not collapsed:
            return self._reshape(equation, x)  # indices have no axis but that of themselves, or some of size 1
        taken = indices[..., axes.index(collapsed[0])].astype(np.int64)
        axis, rank, offset = collapsed[0], len(equation.outvars[0].aval.shape), list(numbers.offset_dims)
        found = self.graph.node("Gather", x, taken, axis=axis)
        places = [*range(axis), *range(axis + taken.ndim, rank)]  # of the other axes, as ONNX leaves them
        indexed = iter(range(axis, axis + taken.ndim))
        order = [places[offset.index(p)] if p in offset else next(indexed) for p in range(rank)]
        return found if order == list(range(rank)) else self.graph.node("Transpose", found, perm=order)

    def _rev(self, equation: Any, x: Any) -> str:
        axes = self.graph.ints(*equation.params["dimensions"])
        ends = np.full_like(axes, np.iinfo(np.int64).min)
        return self.graph.node("Slice", x, np.full_like(axes, -1), ends, axes, np.full_like(axes, -1))

    def _dim_as_value(self, equation: Any) -> str:
        self._shape([equation.params["dim"]])  # refuses others than b
        return self.graph.cast(self.graph.node("Squeeze", self.samples), equation.outvars[0].aval.dtype)


_INDICES = (
    "the model takes entries of an array by indices that are not constants of one axis, which `recjax export --format "
    "onnx` does not know. Take --format stablehlo."
)
_LOOPS = {"scan", "while", "cond"}
_ELEMENTWISE = {
    **{
        name: name.capitalize()
        for name in "add sub mul div max min neg exp log tanh sqrt abs sign erf floor ceil sin cos and or not".split()
    },
    "add_any": "Add",
    "logistic": "Sigmoid",
    "eq": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
}
_COMPARED = {"ne": ("Equal", "Not")}
_REDUCED = {
    "reduce_sum": "ReduceSum",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
}
