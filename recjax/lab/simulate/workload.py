"""Workloads: computations and collectives of every rank, and what waits for what.

This form is neutral: a trace, a Chakra execution trace, ASTRA-sim's text or a model's shapes become a list of
`Operation`, and `from_operations` makes a workload of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import numpy as np

from recjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Operation:
    """One computation or one collective, of every rank alike (sizes and durations may differ by rank).

    A rank has one stream of computations: it runs them one after the other in the order of the list, each as soon as
    all that it depends on is done. Collectives run beside it, each from the moment when all it depends on is done.

    Attributes:
      name: unique in a workload.
      kind: "compute" or "collective".
      duration_ns: of a computation: one for all ranks, or one for each.
      collective: "all_reduce", "all_to_all", "reduce_scatter", "all_gather", "broadcast", "reduce" or
        "send_recv".
      bytes: M of the collective, on a rank (see `collectives`): all-reduce, broadcast, reduce: the tensor; send_recv:
        the message; all-to-all: all that a rank sends; reduce-scatter: a rank's input; all-gather: a rank's output.
      splits: of an all-to-all whose parts are unequal, instead of `bytes`: [n][n], what the i-th member of a group
        sends to the j-th. Such a one is exchanged directly.
      group: None for all ranks; or dimensions of the topology, as in `(0,)`: the ranks that differ in these alone.
      ranks: instead of `group`, the groups by rank: disjoint, of one size; a rank in none of them passes. Of a
        computation, those that compute.
      late_ns: what passes between the end of what it depends on and its beginning: for all ranks, or for each. A rank's
        stream of computations stands still for that of its next one.
      parts: of an all-reduce, the bytes of each of the arrays in it, if they are several; simulated as one.
      depends_on: names of operations.
      layer: what to count it under, "" for its name.
      phase: for example "forward", "input_gradient", "weight_gradient", "update".
      priority: collectives of a higher one go first, whatever the scheduling.
    """

    name: str
    kind: Literal["compute", "collective"]
    duration_ns: float | tuple[float, ...] = 0.0
    collective: str = ""
    bytes: float = 0.0
    splits: tuple[tuple[float, ...], ...] = ()
    group: tuple[int, ...] | None = None
    ranks: tuple[tuple[int, ...], ...] = ()
    late_ns: float | tuple[float, ...] = ()
    parts: tuple[float, ...] = ()
    depends_on: tuple[str, ...] = ()
    layer: str = ""
    phase: str = ""
    priority: int = 0


@dataclasses.dataclass(frozen=True)
class Workload:
    """Operations in an order in which each comes after all that it depends on. Made by `from_operations`.

    Attributes:
      name: for people.
      operations: of all ranks.
      ranks: how many it is of; None if it is for any number.
    """

    name: str
    operations: tuple[Operation, ...]
    ranks: int | None = None


def from_operations(name: str, operations: Iterable[Operation]) -> Workload:
    """A workload of operations in any order: those that depend on later ones are moved after these.

    Args:
      name: for people.
      operations: with unique names.

    Raises:
      ConfigError: a name that stands twice or is missing, a dependency in a circle, a size or duration below zero.
    """
    given = list(operations)
    by_name: dict[str, Operation] = {}
    for operation in given:
        if operation.name in by_name:
            raise ConfigError(f"workload {name}: two operations are called {operation.name!r}. Names must be unique.")
        by_name[operation.name] = operation
        _check(name, operation)
    ordered: dict[str, Operation] = {}
    for first in given:
        path: dict[str, None] = {}  # from `first` down to what it waits for; a loop, for chains are long
        stack = [first.name]
        while stack:
            at = stack[-1]
            if at in ordered:
                stack.pop()
                continue
            path[at] = None
            waiting = [d for d in by_name[at].depends_on if d not in ordered]
            for needed in waiting:
                if needed not in by_name:
                    raise ConfigError(f"workload {name}: {at!r} depends on {needed!r}, which does not exist.")
                if needed in path:
                    raise ConfigError(f"workload {name}: {at!r} and {needed!r} wait for each other.")
            if waiting:
                stack.append(waiting[0])
            else:
                ordered[at] = by_name[at]
                path.pop(at)
                stack.pop()
    return Workload(name, tuple(ordered.values()))


def _check(workload: str, operation: Operation) -> None:
    durations = np.array([*np.atleast_1d(operation.duration_ns), *np.atleast_1d(operation.late_ns)])
    sizes = np.array(operation.splits or operation.bytes, float)
    if operation.kind not in ("compute", "collective"):
        raise ConfigError(
            f"workload {workload}: {operation.name!r} has kind {operation.kind!r}: compute or collective."
        )
    if not (np.isfinite(durations).all() and np.isfinite(sizes).all() and durations.min() >= 0 and sizes.min() >= 0):
        raise ConfigError(
            f"workload {workload}: {operation.name!r} has a size or duration that is negative or not finite."
        )
    if operation.splits and (operation.collective != "all_to_all" or sizes.ndim != 2 or len(set(sizes.shape)) != 1):
        raise ConfigError(f"workload {workload}: {operation.name!r}: splits are [n][n], and of an all_to_all only.")
    if operation.ranks and (operation.group is not None or len({len(ranks) for ranks in operation.ranks}) != 1):
        raise ConfigError(f"workload {workload}: {operation.name!r}: ranks are groups of one size, in place of group.")


def without_lateness(workload: Workload) -> Workload:
    """The same, with every rank beginning as soon as it may."""
    return dataclasses.replace(
        workload, operations=tuple(dataclasses.replace(operation, late_ns=()) for operation in workload.operations)
    )
