"""Contract of a model's module in training: state that is alike on all devices, and outputs for each sample.

Built-in models keep to it. One of a user's own is refused where it does not, in a paragraph with file and line, before
anything is compiled: its code runs when it is built and when a step is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recjax.config.own_code import is_recjax
from recjax.data.batch import ONLY
from recjax.errors import ConfigError, RecjaxError, out_of_memory
from recjax.models.stateful import Dropout, number_dropouts
from recjax.models.two_tower import DRAWN
from recjax.parallel import distributed
from recjax.train.tasks import Tasks
from recjax.utils import log

# Packages whose lines are not the user's, in a traceback that ends in one of them.
_LIBRARIES = {"recjax", "jax", "jaxlib", "flax", "optax", "numpy", *sys.stdlib_module_names}
_LONGEST = 500  # characters of an error of other libraries, which may have many paragraphs
# Primitives that give values of their first operand, each in another place or format.
_MOVES = set(
    """
    reshape squeeze slice dynamic_slice gather transpose broadcast_in_dim expand_dims copy convert_element_type
    reduce_precision pvary pcast
    """.split()
)
_looked_at: set[type] = set()  # modules whose logits were looked at in this process


def built(config: Any, build: Callable[[], nnx.Module]) -> nnx.Module:
    """The module of a model's config.

    Args:
      config: the model's, for messages.
      build: makes the module.

    Raises:
      ConfigError: the user's code fails, gives no module, or one with random state or a layer that sees one device.
    """
    with _explained(type(config)):
        model = build()
    if not isinstance(model, nnx.Module):
        raise ConfigError(
            f"{_named(type(config), 'build')}: build gives {_described(model)}, not a flax.nnx.Module. Return the "
            "module itself."
        )
    _refuse_foreign(model)
    number_dropouts(model)
    return model


def _refuse_foreign(model: nnx.Module) -> None:
    """Refuses layers of flax whose numbers depend on how many devices there are, and state of random numbers."""
    for path, node in sorted(nnx.iter_graph(model), key=lambda found: len(found[0])):  # what holds others first
        instead = next((text for cls, text in _INSTEAD.items() if isinstance(node, cls)), None)
        if instead is not None:
            place = ".".join(["model", *map(str, path)])
            raise ConfigError(
                f"{_named(type(model), '__init__')} holds {place}: flax's {type(node).__name__}, which would act on "
                f"the samples of each device alone, so that the result depended on their number. {instead}"
            )


_INSTEAD: dict[Any, str] = {
    nnx.BatchNorm: "Take recjax.models.stateful.BatchNorm, exact over all devices; or nnx.LayerNorm.",
    nnx.Dropout: "Take recjax.models.stateful.Dropout, which needs no rngs.",
    (nnx.Rngs, nnx.RngStream, nnx.RngState): (
        "Do not keep nnx.Rngs in the module: use them in __init__ alone. For values that are dropped at random take "
        "recjax.models.stateful.Dropout."
    ),
}


def parameters(model: nnx.Module) -> dict[Any, Any]:
    """Parameters of a module: dicts of dicts of arrays, by the names of its parts.

    They are the leaves of an `nnx.State`, in its order and by its paths. But that and its variables JAX takes apart and
    puts together in Python with each call of a program; dicts cost it next to nothing.
    """
    return _dicts(nnx.state(model, nnx.Param))


def kept_state(model: nnx.Module) -> dict[Any, Any]:
    """State of a module beside its parameters, in the same form; mostly empty."""
    return _dicts(nnx.state(model, nnx.Not(nnx.Param)))


def _dicts(state: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        *outer, last = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path)
        functools.reduce(lambda part, name: part.setdefault(name, {}), outer, found)[last] = leaf
    return found


@dataclasses.dataclass(frozen=True)
class ModuleDef:
    """A module without its arrays.

    Attributes:
      graphdef: as flax has it.
      structures: of the `nnx.State` of its parameters, and of that of its other state.
    """

    graphdef: Any
    structures: tuple[Any, Any]

    @classmethod
    def of(cls, model: nnx.Module) -> ModuleDef:
        """Returns that of a module."""
        states = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
        return cls(nnx.graphdef(model), (jax.tree.structure(states[0]), jax.tree.structure(states[1])))

    def merge(self, params: Any, kept: Any) -> Any:
        """The module with arrays of its own.

        Args:
          params: trees with the leaves of `parameters`, in their order.
          kept: likewise of `kept_state`.
        """
        parts = zip(self.structures, (params, kept), strict=True)
        return nnx.merge(self.graphdef, *(jax.tree.unflatten(of, jax.tree.leaves(part)) for of, part in parts))


def kept_dtype(x: Any, dtype: Any) -> Any:
    """The dtype of a part of such state where parameters have `dtype`: floats alike, others as they are."""
    return dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def asks_for_samples(model: nnx.Module, accumulate: int) -> bool:
    """Returns True if a module acts otherwise in a training step, and must know which samples it sees.

    Raises:
      ConfigError: it has state, and batches are worked on in parts.
    """
    if jax.tree.leaves(kept_state(model)):
        if accumulate > 1:
            held = next(
                type(node).__name__
                for _, node in nnx.iter_graph(model)
                if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)
            )
            raise ConfigError(
                f"train.accumulate={accumulate} works on a batch in parts, but the model holds state ({held}) that is "
                "made of whole batches, as that of BatchNorm is. Set train.accumulate=1, or model.batch_norm=false."
            )
        return True
    return any(isinstance(node, Dropout) for _, node in nnx.iter_graph(model))


def outputs(
    model: nnx.Module, dense_BxK: jax.Array, pooled: dict[str, Any], tasks: Tasks = (), count: int | None = None
) -> jax.Array:
    """Outputs of a module: logits [b], or for tasks those of all in their order, [b, O]. Called while tracing.

    Where elements have labels, `count` is the number of their places, L, which then stands for b.

    Raises:
      ConfigError: it is something else, its state would differ between devices, or the user's code fails.
    """
    cls, samples = type(model), dense_BxK.shape[0] if count is None else count
    call: Any = model
    looks = not tasks and not is_recjax(cls) and cls not in _looked_at
    untouched: Any = nnx.clone(model) if looks else None
    before = _forms(kept_state(model))
    with _explained(cls):
        found = call(dense_BxK, pooled)
    _check_kept(cls, before, kept_state(model))
    if tasks:
        return _joined(cls, found, samples, tasks)
    if isinstance(found, dict) and list(found) == [ONLY]:
        found = found[ONLY]
    is_array = isinstance(found, jax.Array | np.ndarray)
    if not is_array or found.shape != (samples,) or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ConfigError(
            f"{_named(cls, '__call__')} gives {_described(found)} for {samples} samples, but a model must return one "
            f"logit a sample: an array of shape [{samples}] of floats. {_remedy(found, samples)}"
        )
    if looks:
        _looked_at.add(cls)
        if distributed.is_main() and _are_probabilities(lambda *given: nnx.clone(untouched)(*given), dense_BxK, pooled):
            log.info(
                f"{_named(cls, '__call__')} ends in a sigmoid or softmax, so it seems to return probabilities. The "
                "loss takes logits, and applies the sigmoid itself: return what goes into it.",
            )
    return jnp.asarray(found)


def both_vectors(
    model: nnx.Module, dense_BxK: jax.Array, pooled: dict[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Vectors of users and items of a module of two sides, [b, E] each. Called while tracing.

    Returns:
      beside them those of items that were drawn, [b, M, E]; None if none were looked up.

    Raises:
      ConfigError: it gives something else, or the user's code fails.
    """
    cls, call, samples = type(model), getattr(model, "vectors", None), dense_BxK.shape[0]
    if call is None:
        raise ConfigError(f"{_named(cls, '__call__')} has no method vectors(dense, pooled), by which items are found.")
    rows = next((x.padded()[0] for name, x in pooled.items() if name.endswith(DRAWN)), None)
    before = _forms(kept_state(model))
    with _explained(cls):
        both = call(dense_BxK, {name: x for name, x in pooled.items() if not name.endswith(DRAWN)})
    drawn = None if rows is None else item_vectors(model, rows.reshape(-1, rows.shape[2])).reshape(*rows.shape[:2], -1)
    _check_kept(cls, before, kept_state(model))
    if not isinstance(both, tuple | list) or len(both) != 2:
        both = (both, None)
    shape: tuple[int, ...] = getattr(both[0], "shape", ())
    if not (len(shape) == 2 and shape[0] == samples and all(_is_floats(x, shape) for x in both)):
        raise ConfigError(
            f"{_named(cls, 'vectors')} gives {' and '.join(map(_described, both))} for {samples} samples. Return two "
            f"arrays of floats of one shape, [{samples}, E]: the vectors of the users and those of the items."
        )
    return both[0], both[1], drawn


def item_vectors(model: nnx.Module, rows_LxD: jax.Array) -> jax.Array:
    """Vectors of items of which nothing but their rows is known, [L, E]. Called while tracing.

    Raises:
      ConfigError: the module has no such function, or the user's code fails.
    """
    cls = type(model)
    if not hasattr(model, "items"):
        raise ConfigError(f"{_named(cls, 'vectors')} has no method items(rows), by which drawn items get vectors.")
    with _explained(cls):
        return cast(Any, model).items(rows_LxD)


def _joined(cls: type, found: Any, samples: int, tasks: Tasks) -> jax.Array:
    """Outputs for all tasks, side by side, [b, O]: from a dict by their names, or an array that is that already."""
    wanted = {task.name: (samples, task.outputs) if task.label.kind == "class" else (samples,) for task in tasks}
    total = sum(task.outputs for task in tasks)
    if isinstance(found, dict):
        if set(found) == set(wanted) and all(_is_floats(found[name], shape) for name, shape in wanted.items()):
            return jnp.concatenate([jnp.reshape(found[name], (samples, -1)) for name in wanted], axis=1)
        given = ", ".join(f"{name!r}: {_described(value)}" for name, value in found.items())
    else:
        if _is_floats(found, (samples, total)) or (total == 1 and _is_floats(found, (samples,))):
            return jnp.reshape(found, (samples, total))
        given = _described(found)
    shapes = ", ".join(f"{name!r}: {list(shape)}" for name, shape in wanted.items())
    raise ConfigError(
        f"{_named(cls, '__call__')} gives {given} for {samples} samples, but the data have the tasks "
        f"{', '.join(wanted)}. Return a dict of arrays of floats of these shapes: {{{shapes}}}; or one array "
        f"[{samples}, {total}] with their columns in this order."
    )


def _is_floats(value: Any, shape: tuple[int, ...]) -> bool:
    is_array = isinstance(value, jax.Array | np.ndarray)
    return is_array and value.shape == shape and jnp.issubdtype(value.dtype, jnp.floating)


def _forms(kept: Any) -> dict[str, tuple[Any, Any]]:
    """Shape and dtype of each part of a module's state, by its path."""
    found = jax.tree.leaves_with_path(kept)
    return {jax.tree_util.keystr(path, simple=True, separator="."): (x.shape, x.dtype) for path, x in found}


def _check_kept(cls: type, before: dict[str, tuple[Any, Any]], after: Any) -> None:
    """Refuses state that changed its form, or that is not the same on all devices (ConfigError)."""
    forms = [before, _forms(after)]
    if forms[0] != forms[1]:
        name = next(name for name in {**forms[0], **forms[1]} if forms[0].get(name) != forms[1].get(name))
        was, now = (
            "nothing" if name not in form else f"shape {list(form[name][0])}, {form[name][1]}" for form in forms
        )
        raise ConfigError(
            f"{_named(cls, '__call__')} changes what model.{name} is: {was} before, {now} after the call. Make state "
            "in __init__, and assign values of the same shape and dtype."
        )
    for path, x in jax.tree.leaves_with_path(after):
        if jax.typeof(x).manual_axis_type.varying:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ConfigError(
                f"{_named(cls, '__call__')} assigns to model.{name} what differs between devices, which see other "
                "samples each. Make it of recjax.models.stateful.sum_over_batch, which sums over all of them."
            )


def _remedy(found: Any, samples: int) -> str:
    if not isinstance(found, jax.Array | np.ndarray):
        return "Return the logits alone." if isinstance(found, tuple | list | dict) else "Return the logits."
    if found.shape == (samples, 1):
        return "Take the column out of it: return logits[:, 0]."
    if found.shape == (samples, 2):
        return "Of two classes it is the difference: return logits[:, 1] - logits[:, 0]."
    if found.shape != (samples,):
        return "Keep the axis of the samples, and sum or project the others away."
    return "Return the score itself, before it is rounded or compared."


def _described(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of shape {list(value.shape)}, {value.dtype}"
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _named(cls: type, method: str) -> str:
    """A class and where it has the method, as far as that is known: "the model Plain (plain.py:31)"."""
    code = getattr(inspect.unwrap(getattr(cls, method, cls)), "__code__", None)
    place = f" ({_place(code.co_filename, code.co_firstlineno)})" if code else ""
    return f"the model {cls.__name__}{place}"


def _place(file: str, line: int) -> str:
    """File and line, from the working folder where the file lies below it."""
    below = os.path.relpath(file)
    return f"{file if below.startswith(os.pardir) else below}:{line}"


@contextlib.contextmanager
def _explained(cls: type) -> Iterator[None]:
    """Turns what the user's code raises into one paragraph; what is raised within ours stays as it is.

    Args:
      cls: the class that the code belongs to.
    """
    try:
        yield
    except RecjaxError:
        raise
    except Exception as error:
        if is_recjax(cls) or out_of_memory(error):
            raise
        lines = [
            (frame.f_code.co_filename, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES
        ]
        file, line = lines[-1] if lines else ("", 0)
        place = f"{_place(file, line)}: " if lines else ""
        text = " ".join(str(error).split())
        text = text[:_LONGEST] + "..." if len(text) > _LONGEST else text.rstrip(".")
        raise ConfigError(
            f"{place}the model {cls.__name__} fails with {type(error).__name__}{': ' if text else ''}{text}. Correct "
            "it. Trained from Python (recjax.fit) the same run ends with the whole traceback."
        ) from error


def _are_probabilities(call: Callable[..., Any], *arguments: Any) -> bool:
    """Returns whether a traced function ends in a sigmoid or softmax: then its values are no logits, whatever they are.

    The values themselves would not tell: until it has learnt, a model may well give logits from 0 to 1 alone, and for a
    positive share between 0.5 and 0.73 also later.
    """
    try:
        jaxpr = jax.make_jaxpr(call)(*arguments).jaxpr
    except Exception:  # a hint must not end what works
        return False
    made = _made(jaxpr, {})
    last = _maker(made, jaxpr.outvars[0])
    makers = [_maker(made, operand) for operand in getattr(last, "invars", ())]
    if _name(last) == "div" and _name(makers[0]) == "exp":  # softmax
        return _name(makers[1]) == "reduce_sum"
    if _name(last) == "div" and _name(makers[1]) == "add":  # 1 / (1 + exp(-x))
        return "exp" in [_name(_maker(made, operand)) for operand in makers[1].invars]
    return _name(last) == "logistic"


def _made(jaxpr: Any, made: dict[int, Any]) -> dict[int, Any]:
    """By the id of each variable: the equation that makes it, or the variable within or outside a function that it is.

    Functions are those that are called once (jit, checkpoint, with a gradient of their own): no loops and branches.
    """
    for equation in jaxpr.eqns:
        inner = next((equation.params[n] for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in equation.params), None)
        inner = getattr(inner, "jaxpr", inner)
        if inner is None or equation.primitive.name == "scan" or len(inner.invars) != len(equation.invars):
            made |= {id(out): equation for out in equation.outvars}
            continue
        made |= {id(own): given for own, given in zip(inner.invars, equation.invars, strict=True)}
        _made(inner, made)
        made |= {id(out): own for out, own in zip(equation.outvars, inner.outvars, strict=True)}
    return made


def _maker(made: dict[int, Any], var: Any) -> Any:
    """The equation that makes a value, past those that only move it; None if it came in."""
    while (found := made.get(id(var))) is not None:
        if not hasattr(found, "primitive"):
            var = found
        elif found.primitive.name in _MOVES:
            var = found.invars[0]
        else:
            return found
    return None


def _name(equation: Any) -> str:
    return "" if equation is None else str(equation.primitive.name)
