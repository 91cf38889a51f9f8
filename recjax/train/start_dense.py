"""The dense part of a run that starts from another one: by path, and where features came or went by their names.

A layer that sees the features has a row of weights for each input. Rows of inputs that both runs have are carried;
those of new inputs start at 0, so that the outputs are as before until something is learnt of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from recjax.data.source import BlockSource
from recjax.errors import ConfigError, TrainingError
from recjax.models.layers import LINEAR
from recjax.train import state as states
from recjax.train.checkpoint.checkpoints import Restored
from recjax.train.module import parameters
from recjax.train.table_specs import dims, specs
from recjax.train.tasks import outputs_for
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import as_lazy

_PROBE = "\0probe"  # name of a feature that no data have


@dataclasses.dataclass(frozen=True)
class Earlier:
    """Facts about the checkpoint that a run starts from, beside its arrays.

    Attributes:
      name: of the run, for messages.
      step: of the checkpoint.
      source: what the run kept of its data; None: nothing, as of data that are drawn.
      tables: what the checkpoint says of each table, see `progress.describe`: "dim" and "optimizer" at the least.
      same_run: whether the run that goes on is this one, which counts its steps on.
    """

    name: str
    step: int
    source: BlockSource | None
    tables: Mapping[str, Mapping[str, Any]]
    same_run: bool = False

    @classmethod
    def of(cls, name: str, restored: Restored, source: BlockSource | None, same_run: bool = False) -> Earlier:
        """Facts about a restored checkpoint.

        Raises:
          TrainingError: it does not say of its tables what it should.
        """
        tables = restored.meta.get("tables")
        entries = list(tables.values()) if isinstance(tables, Mapping) else [None]
        for entry in entries:
            if not isinstance(entry, Mapping) or type(entry.get("dim")) is not int or "optimizer" not in entry:
                raise TrainingError(
                    f"checkpoint {restored.step} of {name} does not say what its tables are. Choose another step "
                    "(train.init_step), or restore that run folder from a copy."
                )
        return cls(name, restored.step, source, dict(tables or {}), same_run)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Names of what a model sees.

    Attributes:
      dense: the dense columns.
      dims: lookup -> D.
      names: of the inputs of its layers that see all features, by the model's config.
    """

    dense: tuple[str, ...]
    dims: dict[str, int]
    names: list[str]


def carry_dense(
    trainer: Trainer, earlier: Earlier, saved: Mapping[str, Any], slots: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dense part that a run starts with, in the form of `state.export`.

    Args:
      trainer: of the run.
      earlier: about the checkpoint that it starts from.
      saved: its arrays.
      slots: whether the optimizer's state is carried too.

    Returns:
      "dense", "opt" and, if there are any, "module" and "late", path -> array; and how it came about: "arrays",
      "carried" of them, "new" and "gone" inputs, and "optimizer", whether its state was carried.

    Raises:
      ConfigError: a layer has another shape, and no feature that came or went explains it.
    """
    fresh = states.new_dense(trainer.model, trainer.tx, trainer.dtype, trainer.options.late)
    before = {name: as_lazy(array).load() for name, array in saved["dense"].items()}
    now, then = _inputs(trainer), _inputs_then(trainer, earlier)
    axes = {} if then is None or _alike(then, now) else _input_axes(trainer, now)
    dense: dict[str, np.ndarray] = {}
    for name, array in fresh["dense"].items():
        if name not in before:
            if then is None or bool(then.dense) == bool(now.dense):
                raise _other_model(earlier, f"it has no {name!r}, which this one has")
            dense[name] = array  # of the bottom MLP, where there were no dense columns
            continue
        dense[name] = _carried(earlier, name, before[name], array, axes.get(name, {}), then, now, zero=True)
    if more := [name for name in before if name not in dense]:
        if then is None or bool(then.dense) == bool(now.dense):
            raise _other_model(earlier, f"it has {more[0]!r}, which this one has not")
    opt = dict(fresh["opt"])
    saved_opt = saved.get("opt", {}) if slots else {}
    alike = bool(opt) and opt.keys() == saved_opt.keys()
    for name, array in opt.items() if alike else ():
        of = next((path for path in sorted(dense, key=len, reverse=True) if f".{name}".endswith(f".{path}")), "")
        sides = axes.get(of, {}) if of and array.shape == dense[of].shape else {}
        opt[name] = _carried(earlier, name, as_lazy(saved_opt[name]).load(), array, sides, then, now, zero=False)
    parts = {"dense": dense, "opt": opt}
    for part in ("module", "late"):
        if part in fresh:
            carries = saved.get(part, {}) if part == "module" or earlier.same_run else {}
            parts[part] = {
                name: as_lazy(carries[name]).load() if name in carries and carries[name].shape == array.shape else array
                for name, array in fresh[part].items()
            }
    names = (set(), set()) if then is None else tuple({*of.dense, *_features(of.dims)} for of in (then, now))
    return parts, {
        "arrays": len(dense),
        "carried": sum(name in before for name in dense),
        "new": sorted(names[1] - names[0]),
        "gone": sorted(names[0] - names[1]),
        "optimizer": alike,
    }


def _features(dims_of: Mapping[str, int]) -> list[str]:
    return [name for name in dims_of if name.removesuffix(LINEAR) not in dims_of or not name.endswith(LINEAR)]


def _carried(
    earlier: Earlier,
    name: str,
    before: np.ndarray,
    fresh: np.ndarray,
    axes: Mapping[int, str],
    then: _Inputs | None,
    now: _Inputs,
    zero: bool,
) -> np.ndarray:
    """An array with the entries of an earlier one, along `axes` (axis -> field of `_Inputs`) by the names of inputs."""
    if not axes or then is None:
        if before.shape != fresh.shape:
            raise _other_model(earlier, f"{name!r} has shape {list(before.shape)} there, {list(fresh.shape)} here")
        return before.astype(fresh.dtype)
    taken, known, new_inputs, old_outputs = before, np.array(True), np.array(False), np.array(True)
    for axis, size in enumerate(fresh.shape):
        there, here = (_entries(of, axes.get(axis), n) for of, n in ((then, before.shape[axis]), (now, size)))
        if len(there) != before.shape[axis] or len(here) != size:
            raise _other_model(earlier, f"{name!r} has shape {list(before.shape)} there, {list(fresh.shape)} here")
        number = {entry: at for at, entry in enumerate(there)}
        places = np.array([number.get(entry, -1) for entry in here], np.int64)
        if not len(there):  # NumPy takes nothing from nothing, whatever is asked of it
            taken = np.zeros([1 if at == axis else n for at, n in enumerate(taken.shape)], taken.dtype)
        taken = np.take(taken, np.maximum(places, 0), axis=axis)
        both = (places >= 0).reshape([-1 if at == axis else 1 for at in range(fresh.ndim)])
        known = known & both
        if axis == 0:
            new_inputs = ~both
        else:
            old_outputs = old_outputs & both
    merged = np.where(known, taken.astype(fresh.dtype), fresh)
    if zero and not name.removesuffix(".value").endswith("bias"):
        merged = np.where(new_inputs & old_outputs, np.zeros((), fresh.dtype), merged)
    return merged


def _entries(inputs: _Inputs, kind: str | None, size: int) -> list[str]:
    """Names of the entries of an axis of this size: of inputs of a kind, and of what a layer sees beside them."""
    names = list(getattr(inputs, kind)) if kind else []
    return [*names, *(f"beside {i}" for i in range(size - len(names)))]


def _other_model(earlier: Earlier, what: str) -> ConfigError:
    return ConfigError(
        f"{earlier.name} has another dense part: {what}. Set the model as there (model, and its widths: `recjax show` "
        "prints a preset's, config.json in the run folder that run's), or start without that run."
    )


def _inputs(trainer: Trainer) -> _Inputs:
    schema = trainer.source.schema
    tables, features = specs(trainer.config, schema)
    lookups = dims(tables, features)
    return _Inputs(schema.dense, lookups, _input_names(trainer.config.model, schema.dense, lookups))


def _inputs_then(trainer: Trainer, earlier: Earlier) -> _Inputs | None:
    """Inputs of the model of the earlier run; None where its data are not known."""
    if earlier.source is None:
        return None
    schema, tables = earlier.source.schema, earlier.tables
    widths = {name: entry["dim"] for name, entry in tables.items()}
    shared = next((width for name, width in widths.items() if not name.endswith(LINEAR)), 1)
    lookups = {feature.name: widths.get(feature.name, shared) for feature in schema.features}
    if getattr(trainer.config.model, "first_order", False):
        lookups |= {name + LINEAR: 1 for name in tuple(lookups)}
    return _Inputs(schema.dense, lookups, _input_names(trainer.config.model, schema.dense, lookups))


def _alike(then: _Inputs, now: _Inputs) -> bool:
    """True if a model sees the same in both, in the same order."""
    return then.dense == now.dense and list(then.dims.items()) == list(now.dims.items())


def _input_names(model: Any, dense: Sequence[str], lookups: Mapping[str, int]) -> list[str]:
    named = getattr(model, "input_names", None)
    return [] if named is None else list(named(dense, lookups))


def _input_axes(trainer: Trainer, now: _Inputs) -> dict[str, dict[int, str]]:
    """Parameter -> the axes along which it has an entry for each input, and which inputs these are.

    They are those that would be longer if there were one feature, or one dense column, more.
    """
    model = trainer.config.model
    if not hasattr(model, "input_names"):
        raise ConfigError(
            "the data have other features than those of the run to start from, or in another order, and the model "
            f"{type(model).__name__} does not say which of its inputs are which features'. Give the columns as there, "
            "or give its config a method input_names(dense, dims), as recjax's models have."
        )
    probe = {_PROBE: next((width for name, width in now.dims.items() if not name.endswith(LINEAR)), 1)}
    if getattr(model, "first_order", False):
        probe[_PROBE + LINEAR] = 1
    shapes = [
        _shapes(trainer, len(now.dense) + more, lookups)
        for more, lookups in ((0, now.dims), (0, _with_probe(now.dims, probe)), (1 if now.dense else 0, now.dims))
    ]
    axes: dict[str, dict[int, str]] = {}
    for name, shape in shapes[0].items():
        for axis, size in enumerate(shape):
            if shapes[1][name][axis] != size:
                axes.setdefault(name, {})[axis] = "names"
            elif shapes[2][name][axis] != size:
                axes.setdefault(name, {})[axis] = "dense"
    return axes


def _with_probe(lookups: Mapping[str, int], probe: Mapping[str, int]) -> dict[str, int]:
    """Lookups and those of one feature more; weights of the first order stay after all others."""
    plain = {name: width for name, width in {**lookups, **probe}.items() if not name.endswith(LINEAR)}
    return plain | {name: width for name, width in {**lookups, **probe}.items() if name.endswith(LINEAR)}


def _shapes(trainer: Trainer, dense: int, lookups: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the model for so many dense columns and these lookups."""
    config = trainer.config
    more = outputs_for(config.model, trainer.tasks)
    build = functools.partial(config.model.build, dense, lookups, dtype=np.dtype(config.dense_dtype), seed=0, **more)
    leaves = jax.tree.leaves_with_path(parameters(nnx.eval_shape(build)))
    return {states.path_name(path): leaf.shape for path, leaf in leaves}
