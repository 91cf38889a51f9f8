"""Who routes a batch: the host, or the devices. Either way the step gets the same arrays.

Workers `count` a batch; `begin` takes it to the devices as far as its sizes are not needed for; then its `needs` are
known, for which the caller chooses capacities; and `finish` gives what the step takes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from recjax.data.batch import Batch
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing import capacity, device, host
from recjax.parallel.mesh import Share
from recjax.train.step_inputs import StepInputs, place

# Ids of a batch from which `train.routing=auto` has accelerators route: the host takes 10 to 40 ns for each.
MANY_IDS = 2**18


@dataclasses.dataclass(frozen=True)
class Begun:
    """A batch on its way to the devices. What follows it is there if they route.

    Attributes:
      counted: the batch.
      inputs: all that the step takes but for the groups' routing, with ids in place of indices of rows.
      located: group name -> where its ids lie.
      found: further names of `Counted.needs` -> int32 [], on the devices.
    """

    counted: host.Counted
    inputs: Any = None
    located: Any = None
    found: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def needs(self) -> dict[str, int]:
        """The least capacities that hold it. Waits for the devices if it is they who route."""
        return self.counted.needs | {name: int(need) for name, need in self.found.items()}


@dataclasses.dataclass(frozen=True)
class HostRouter:
    """Routes on the host: worker threads find the distinct rows, and the thread that trains lays them out."""

    bound: BoundPlan
    mesh: Mesh
    dtype: Any
    depth: ClassVar[int] = 0  # batches that are begun before the one that is finished

    @functools.cached_property
    def share(self) -> Share:
        """The devices that it routes for."""
        return Share.of(self.mesh)

    def count(self, batch: Batch, batch_size: int, parts: int) -> host.Counted:
        """See `route.count`."""
        return host.count(batch, self.bound, batch_size, parts, self.share)

    def begin(self, counted: host.Counted, capacities: dict[str, int]) -> Begun:
        """Nothing: all needs are known."""
        del capacities
        return Begun(counted)

    def finish(self, begun: Begun, capacities: dict[str, int]) -> StepInputs:
        """Lays the batch out on the mesh."""
        counted = begun.counted
        with jax.profiler.TraceAnnotation("route"):
            routing = host.pad(counted, self.bound, capacities, self.dtype)
        return place(counted.batch, routing, counted.local, self.mesh, self.dtype)


@dataclasses.dataclass(frozen=True)
class DeviceRouter:
    """Routes on the devices. The batch after the one that is trained on is begun before that one's step."""

    bound: BoundPlan
    mesh: Mesh
    dtype: Any
    depth: ClassVar[int] = 1

    @functools.cached_property
    def share(self) -> Share:
        """The devices whose samples it lays out."""
        return Share.of(self.mesh)

    def count(self, batch: Batch, batch_size: int, parts: int) -> host.Counted:
        """See `route_device.measure`."""
        return device.measure(batch, self.bound, batch_size, parts, self.share)

    def begin(self, counted: host.Counted, capacities: dict[str, int]) -> Begun:
        """Sends the batch off and has it sorted."""
        with jax.profiler.TraceAnnotation("route"):
            features = device.lay_out(counted, self.bound, capacities, self.dtype)
        routing = host.Routing({}, features)
        inputs = place(counted.batch, routing, counted.local, self.mesh, self.dtype)
        located, needs = self._sort(inputs.routing.features)
        for need in needs.values():
            need.copy_to_host_async()
        return Begun(counted, inputs, located, needs)

    def finish(self, begun: Begun, capacities: dict[str, int]) -> StepInputs:
        """Writes the routing."""
        capacity.require(capacities, begun.needs)
        sizes, inputs = device.sizes(self.bound, capacities), begun.inputs
        return dataclasses.replace(inputs, routing=self._layout(inputs.routing.features, begun.located, sizes))

    @functools.cached_property
    def _sort(self) -> Any:
        return device.make_sort(self.bound, self.mesh)

    @functools.cached_property
    def _layout(self) -> Any:
        return device.make_layout(self.bound, self.mesh)


Router = HostRouter | DeviceRouter


def ahead(
    router: Router, stream: Iterator[host.Counted], capacities: Callable[[Sequence[dict[str, int]]], dict[str, int]]
) -> Iterator[Begun]:
    """The batches of a stream, each begun `depth` batches before it is given.

    In a profile the wait for the stream is called input.

    Args:
      router: who routes.
      stream: the counted batches.
      capacities: those of a batch, from `Counted.needs` of all that were not given yet, its own the last: so that a
        batch is begun with the sizes that it would have if those before it were done.
    """
    waiting: collections.deque[Begun] = collections.deque()
    while True:
        with jax.profiler.TraceAnnotation("input"):
            counted = next(stream, None)
        if counted is None:
            yield from waiting
            return
        needs = [*(begun.counted.needs for begun in waiting), counted.needs]
        waiting.append(router.begin(counted, capacities(needs)))
        if len(waiting) > router.depth:
            yield waiting.popleft()
