"""Everything that training changes: arrays as one pytree, their mesh-free form for checkpoints, and the host's part."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from recjax.embedding.buffers import GroupSlots, Tables, initialise, place_homes
from recjax.embedding.collection import export_tables, import_tables, mean_tables
from recjax.embedding.dynamic.tables import DynamicTables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.sharding import Homes
from recjax.errors import TrainingError
from recjax.parallel.mesh import put, replicated, whole
from recjax.tiers.tier import Tier
from recjax.tiers.written import WRITTEN, whole_tables
from recjax.train import late as late_sums
from recjax.train.dense import REPLICATED, Dense
from recjax.train.late import Late
from recjax.train.module import kept_dtype, kept_state, parameters
from recjax.utils.lazy_arrays import LazyArray, as_lazy


@dataclasses.dataclass(frozen=True)
class HostState:
    """Parts of a state that the host holds. They change in place with each step: they are of the newest state alone.

    Attributes:
      tier: the rows that are not on the devices; None: all are.
      ids: which keys have which rows; None: no table gives rows to keys.
    """

    tier: Tier | None = None
    ids: DynamicTables | None = None

    def clear(self) -> None:
        """Starts again: rows are at their initial values, and no key has one."""
        for part in (self.tier, self.ids):
            if part is not None:
                part.clear()

    def admit(self, state: Any, admission: Any) -> Any:
        """Brings rows to the devices, and draws those that were given to keys; `state`, a `TrainState`, is used up."""
        part = self.tier or self.ids
        return state if part is None else part.admit(state, admission)

    def close(self) -> None:
        """Ends the threads of the rows, and gives memory and files back."""
        if self.tier is not None:
            self.tier.close()


EMPTY = HostState()


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a training: the arrays on the devices, which the step donates, and what the host holds beside them.

    As a pytree it is the arrays alone: what JAX gives back has no `host`.

    Attributes:
      step: int32 [], steps done.
      ok: bool [], false from the first non-finite step on; nothing changes any more.
      dense: parameters of the dense part (see `module.parameters`), replicated or split as `recjax.train.dense` says.
      opt: state of their optax optimizer, likewise.
      tables: group buffers, see `recjax.embedding.buffers`.
      slots: their sparse optimizer slots.
      homes: of caches, which row each slot of the buffer holds: see `recjax.embedding.sharding`.
      module: what the module holds beside its parameters, the same on all devices.
      late: dense gradients that the devices have still to add up, a `recjax.train.late.Late`; {} where none are.
      rates: [1 + G], the learning rates of the dense part and of the groups (`step.rated`), so that one program serves
        all of them; {}: they are constants of the program. No checkpoint holds them.
      host: rows that are not on the devices, and maps from keys to rows.
    """

    step: Any
    ok: Any
    dense: Any
    opt: Any
    tables: Tables
    slots: GroupSlots
    homes: Homes = dataclasses.field(default_factory=dict)
    module: Any = dataclasses.field(default_factory=dict)
    late: Any = dataclasses.field(default_factory=dict)
    rates: Any = dataclasses.field(default_factory=dict)
    host: HostState = EMPTY


_ARRAYS = [field.name for field in dataclasses.fields(TrainState) if field.name != "host"]
jax.tree_util.register_dataclass(TrainState, _ARRAYS, [], drop_fields=["host"])


def create(
    model: nnx.Module,
    bound: BoundPlan,
    mesh: Mesh,
    tx: optax.GradientTransformation,
    seed: int,
    dtype: Any,
    held: Dense = REPLICATED,
    apart: bool = False,
    late: bool = False,
) -> TrainState:
    """The state before the first step.

    `dtype` is that of parameters and tables, float32 or float64; `apart` is as for `initialise`, `late` as in the
    step's options.
    """
    tables, slots = initialise(bound, mesh, seed, dtype, apart)
    dense, opt, module = _dense_part(model, tx, dtype)
    sums: Any = {}
    if late:
        nothing = _nothing(dense)
        sums = late_sums.hold(nothing.grads, nothing.weight, mesh)
    return _assemble(0, dense, opt, module, tables, slots, place_homes(bound, mesh), mesh, held, sums)


def _nothing(dense: Any) -> Late:
    """Zeros in place of gradients and of the sum of weights."""
    zeros = jax.tree.map(jnp.zeros_like, dense)
    return Late(zeros, jnp.zeros((), next((x.dtype for x in jax.tree.leaves(dense)), jnp.float32)))


def _dense_part(model: nnx.Module, tx: optax.GradientTransformation, dtype: Any) -> tuple[Any, Any, Any]:
    """Parameters, their optimizer's state, and the module's other state."""
    # Copies: the first step donates them, and the model keeps its own for the next state that is made of it. NumPy
    # makes them, for which nothing is compiled; jnp.array compiles a program for each shape.
    dense = jax.device_put(jax.tree.map(lambda x: np.array(x, dtype), parameters(model)))
    return dense, tx.init(dense), jax.tree.map(lambda x: jnp.array(x, kept_dtype(x, dtype)), kept_state(model))


def new_dense(model: nnx.Module, tx: optax.GradientTransformation, dtype: Any, late: bool = False) -> dict[str, Any]:
    """The dense part before the first step, in the form of `export`: "dense", "opt", and "module" and "late" if any."""
    dense, opt, module = _dense_part(model, tx, dtype)
    parts = {"dense": dense, "opt": opt, **({"module": module} if jax.tree.leaves(module) else {})}
    return {name: _named_leaves(part) for name, part in (parts | ({"late": _nothing(dense)} if late else {})).items()}


def _dense_form(model: nnx.Module, tx: optax.GradientTransformation, dtype: Any) -> tuple[Any, Any, Any]:
    """Shapes and dtypes of what `_dense_part` gives."""

    def form(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype)

    dense = jax.tree.map(lambda x: form(x, dtype), parameters(model))
    module = jax.tree.map(lambda x: form(x, kept_dtype(x, dtype)), kept_state(model))
    return dense, jax.eval_shape(tx.init, dense), module


def _assemble(
    done: int,
    dense: Any,
    opt: Any,
    module: Any,
    tables: Tables,
    slots: GroupSlots,
    homes: Homes,
    mesh: Mesh,
    held: Dense,
    late: Any,
) -> TrainState:
    step, ok = put((np.int32(done), np.bool_(True)), replicated(mesh))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), held.specs())
    dense, opt = put(held.hold(dense, opt), shardings)
    module = put(module, replicated(mesh)) if jax.tree.leaves(module) else module
    return TrainState(step, ok, dense, opt, tables, slots, homes, module, late)


def export(state: TrainState, bound: BoundPlan, held: Dense = REPLICATED) -> dict[str, Any]:
    """The state as nested dicts of arrays, independent of mesh and plan.

    Keys: "tables" (table name -> rows and slots, lazy arrays that are good until the next step, see
    `export_tables`), "dense" and "opt" (path of each leaf -> array), and "module" and "late" likewise, if the module
    holds anything beside its parameters, or gradients are late. Of independent replica groups "replicas" (number of the
    group -> what "tables" would hold) takes the place of "tables".
    """
    dense, opt = held.whole(state.dense, state.opt)
    versions = {
        str(v): export_tables(bound, state.tables, state.slots, v)
        for v in range(bound.replicas if bound.independent else 1)
    }
    return {
        **({"replicas": versions} if bound.independent else {"tables": versions["0"]}),
        "dense": _named_leaves(dense),
        "opt": _named_leaves(opt),
        **({"module": _named_leaves(state.module)} if jax.tree.leaves(state.module) else {}),
        **({"late": _named_leaves(late_sums.total(state.late))} if state.late else {}),
    }


def one_version(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns what `export` gave; of independent replica groups "tables" are the means, to be read a part at a time."""
    if WRITTEN in saved:  # of tables that were larger than the devices' memory
        rest = {key: value for key, value in saved.items() if key not in (WRITTEN, "tables")}
        return {"tables": {**saved.get("tables", {}), **whole_tables(saved[WRITTEN])}, **rest}
    if "replicas" not in saved:
        return saved
    rest = {key: value for key, value in saved.items() if key != "replicas"}
    return {"tables": mean_tables(list(saved["replicas"].values())), **rest}


def from_host(
    saved: dict[str, Any],
    done: int,
    model: nnx.Module,
    bound: BoundPlan,
    mesh: Mesh,
    tx: optax.GradientTransformation,
    dtype: Any,
    held: Dense = REPLICATED,
    late: bool = False,
) -> TrainState:
    """The inverse of `export`, onto any mesh and plan.

    What independent replica groups saved goes to as many of them as it is; in any other case all get the mean.

    Args:
      saved: what `export` gave, or the same read from the disk.
      done: steps done.
      model: the dense module; its own weights do not matter.
      bound: the bound plan.
      mesh: the mesh.
      tx: optimizer of the dense part.
      dtype: of parameters and tables.
      held: how the dense part will be held.
      late: whether gradients are late.

    Raises:
      TrainingError: an array is missing or has another shape or dtype.
    """
    apart = saved.get("replicas", {})
    if bound.independent and len(apart) == bound.replicas:
        tables, slots = import_tables(bound, mesh, [apart[str(v)] for v in range(bound.replicas)], dtype)
    else:
        tables, slots = import_tables(bound, mesh, one_version(saved)["tables"], dtype)
    dense, opt, module = _dense_form(model, tx, dtype)
    dense = _fill(dense, saved["dense"], "dense parameter")
    opt = _fill(opt, saved.get("opt", {}), "optimizer state")
    module = _fill(module, saved.get("module", {}), "the module's")
    sums: Any = {}
    if late:
        found = _fill(_nothing(dense), saved.get("late", {}), "late gradients")
        sums = late_sums.hold(found.grads, found.weight, mesh)
    return _assemble(done, dense, opt, module, tables, slots, place_homes(bound, mesh), mesh, held, sums)


def _named_leaves(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): np.array(whole(_copy(x))) for path, x in leaves}


def _copy(x: Any) -> Any:
    """A copy to be read: a host view of the state itself would keep the next donated step from working in place."""
    if isinstance(x, jax.Array) and x.is_fully_addressable:  # without a program, which jnp.copy compiles for each shape
        return jax.device_put(x, x.sharding, may_alias=False)
    return jnp.copy(x)


def _fill(tree: Any, saved: dict[str, np.ndarray | LazyArray], what: str) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    out = []
    for path, leaf in leaves:
        name = path_name(path)
        found = saved.get(name)
        if found is None or found.shape != leaf.shape or found.dtype != leaf.dtype:
            held = "nothing" if found is None else f"shape {found.shape}, {found.dtype}"
            raise TrainingError(
                f"the checkpoint holds {held} for {what} {name!r}, but the model needs shape {leaf.shape}, "
                f"{leaf.dtype}. It belongs to another model: use the config in the run folder."
            )
        out.append(as_lazy(found).load())
    return jax.tree_util.tree_unflatten(structure, out)


def path_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf in a checkpoint, by its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
