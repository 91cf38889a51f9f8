"""What the training asks of a model's module: parameters and nothing else, and one logit for each sample.

Built-in models keep to it. One of a user's own is told where it does not, in one paragraph with file and line, before
anything is compiled: its code runs when it is built and when a step is traced.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recjax.errors import ConfigError, RecjaxError, out_of_memory
from recjax.parallel import distributed

# Packages whose lines are not the user's, in a traceback that ends in one of them.
_LIBRARIES = {"recjax", "jax", "jaxlib", "flax", "optax", "numpy", *sys.stdlib_module_names}
_LONGEST = 500  # characters of an error of other libraries, which may have many paragraphs
# Primitives that give values of their first operand, each in another place or format.
_MOVES = {
    "reshape", "squeeze", "slice", "dynamic_slice", "gather", "transpose", "broadcast_in_dim", "expand_dims", "copy",
    "convert_element_type", "reduce_precision", "pvary", "pcast",
}  # fmt: skip
_looked_at: set[type] = set()  # modules whose logits were looked at in this process


def built(config: Any, build: Callable[[], nnx.Module]) -> nnx.Module:
    """The module of a model's config, with parameters alone.

    Args:
      config: the model's, for messages.
      build: makes the module.

    Raises:
      ConfigError: the user's code fails, gives no module, or one that holds something else than parameters.
    """
    with _explained(type(config)):
        model = build()
    if not isinstance(model, nnx.Module):
        raise ConfigError(
            f"{_named(type(config), 'build')}: build gives {_described(model)}, not a flax.nnx.Module. Return the "
            "module itself."
        )
    leaves, _ = jax.tree.flatten_with_path(nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable))
    others = [
        f"model.{jax.tree_util.keystr(path, simple=True, separator='.')}: "
        f"{type(x).__name__ if isinstance(x, nnx.Variable) else 'a plain array'}"
        for path, x in leaves
        if not isinstance(x, nnx.Param)
    ]
    if others:
        more = f" and {len(others) - 6} more" if len(others) > 6 else ""
        raise ConfigError(
            f"{_named(type(model), '__init__')} holds {', '.join(others[:6])}{more}, but only an nnx.Param is trained "
            "and kept in checkpoints: a step has no other state. Use nnx.LayerNorm instead of BatchNorm; no Dropout "
            "and no nnx.Rngs kept in the module, but l2 or weight_decay of train.optimizer and embedding.optimizer; an "
            "nnx.Param for an array that is to be trained, and for a constant one a line in __call__."
        )
    return model


def logits(model: nnx.Module, dense_BxK: jax.Array, pooled: dict[str, Any]) -> jax.Array:
    """What a module gives, once it is known to be one logit a sample: float [b]. Called while a step is traced.

    Raises:
      ConfigError: it is something else, or the user's code fails.
    """
    cls, samples = type(model), dense_BxK.shape[0]
    call: Any = model
    with _explained(cls):
        found = call(dense_BxK, pooled)
    is_array = isinstance(found, jax.Array | np.ndarray)
    if not is_array or found.shape != (samples,) or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ConfigError(
            f"{_named(cls, '__call__')} gives {_described(found)} for {samples} samples, but a model must return one "
            f"logit a sample: an array of shape [{samples}] of floats. {_remedy(found, samples)}"
        )
    if not _is_built_in(cls) and cls not in _looked_at:
        _looked_at.add(cls)
        if distributed.is_main() and _are_probabilities(call, dense_BxK, pooled):
            print(
                f"{_named(cls, '__call__')} ends in a sigmoid or softmax, so it seems to return probabilities. The "
                "loss takes logits, and applies the sigmoid itself: return what goes into it.",
                file=sys.stderr,
            )
    return jnp.asarray(found)


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


def _is_built_in(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "recjax"


def _named(cls: type, method: str) -> str:
    """A class and where it has the method, as far as that can be told: "the model Plain (plain.py:31)"."""
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
        if _is_built_in(cls) or out_of_memory(error):
            raise
        lines = [
            (frame.f_code.co_filename, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES
        ]
        place = f"{_place(*lines[-1])}: " if lines else ""
        text = " ".join(str(error).split())
        text = text[:_LONGEST] + "..." if len(text) > _LONGEST else text.rstrip(".")
        raise ConfigError(
            f"{place}the model {cls.__name__} fails with {type(error).__name__}{': ' if text else ''}{text}. Correct "
            "it. Trained from Python (recjax.fit) the same run ends with the whole traceback."
        ) from error


def _are_probabilities(call: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a traced function ends in a sigmoid or softmax: then its values are no logits, whatever they are.

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
