"""Routers of batches: the host, or the devices. Either way the step gets the same arrays, `StepInputs`.

Worker threads `route` a batch; `start` takes it to the devices as far as its sizes are not needed for; then its
required capacities are known, for which the caller chooses sizes; and `complete` gives what the step takes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing import capacity, device, host
from recjax.embedding.routing.routed import RoutedBatch, Routing
from recjax.errors import ConfigError
from recjax.parallel.mesh import Share
from recjax.parallel.packed import put_batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One global batch as the step takes it; every leading axis is device-major and split over the mesh.

    Attributes:
      dense_BxK: float [N * b, K], zeros in padding rows.
      labels_B: float [N * b]; or [N * b, T], where the data name T labels.
      weights_B: likewise, 0 in padding rows.
      routing: the routed ids.
    """

    dense_BxK: Any
    labels_B: Any
    weights_B: Any
    routing: Routing


def place(batch: Batch, routing: Routing, local: int, mesh: Mesh, dtype: Any) -> StepInputs:
    """Pads a batch to b rows a device, of weight 0, and puts it and its routing on the mesh.

    Of several processes each gives the samples of its own devices: see `Share`.

    Args:
      batch: up to `local` samples for each device of this process.
      routing: of these samples, as the host or the devices laid it out.
      local: b.
      mesh: the devices.
      dtype: of dense features, labels and weights on the devices.
    """
    total = local * Share.of(mesh).count

    def padded(x: np.ndarray) -> np.ndarray:
        out = np.zeros((total, *x.shape[1:]), dtype)
        out[: len(x)] = x
        return out

    return put_batch(StepInputs(padded(batch.dense), padded(batch.labels), padded(batch.weights), routing), mesh)


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A batch between the reader and the step. Fields after `stages` are set by `DeviceRouter` alone.

    Attributes:
      batch: as it was read; in a training of several processes its samples for the devices of this one.
      routed: the samples for the devices of this process, routed.
      stop: the signal upon which all processes stop after this batch; 0: none.
      save: whether all processes save a checkpoint after it.
      stages: the states of the stream's ordered stages after it.
      inputs: all that the step takes but for the groups' routing, with ids in place of indices of rows.
      located: group name -> where its ids lie.
      required: further names of `RoutedBatch.required_capacities` -> int32 [], on the devices.
    """

    batch: Batch
    routed: RoutedBatch
    stop: int = 0
    save: bool = False
    stages: tuple[Mapping[str, Any], ...] = ()
    inputs: Any = None
    located: Any = None
    required: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def required_capacities(self) -> dict[str, int]:
        """The least capacities that hold it. Waits for the devices if it is they who route."""
        return self.routed.required_capacities | {name: int(n) for name, n in self.required.items()}


@dataclasses.dataclass(frozen=True)
class _Router:
    """Base of both."""

    bound: BoundPlan
    mesh: Mesh
    dtype: Any

    @functools.cached_property
    def share(self) -> Share:
        """The devices whose samples it lays out."""
        return Share.of(self.mesh)


@dataclasses.dataclass(frozen=True)
class HostRouter(_Router):
    """Routes on the host: worker threads find the distinct rows, and the thread that trains lays them out."""

    name: ClassVar[str] = "host"
    depth: ClassVar[int] = 0  # batches that are started before the one that is completed

    def route(self, batch: Batch, batch_size: int, parts: int) -> RoutedBatch:
        """See `route_on_host`."""
        return host.route_on_host(batch, self.bound, batch_size, parts, self.share)

    def start(self, batch: InFlight, capacities: dict[str, int]) -> InFlight:
        """Does nothing: all required capacities are known."""
        del capacities
        return batch

    def complete(self, batch: InFlight, capacities: dict[str, int]) -> StepInputs:
        """Lays the batch out on the mesh."""
        routed = batch.routed
        with jax.profiler.TraceAnnotation("route"):
            routing = host.pack(routed, self.bound, capacities, self.dtype)
        return place(routed.batch, routing, routed.local, self.mesh, self.dtype)


@dataclasses.dataclass(frozen=True)
class DeviceRouter(_Router):
    """Routes on the devices. The batch after the one that is trained on is started before that one's step."""

    name: ClassVar[str] = "device"
    depth: ClassVar[int] = 1

    def route(self, batch: Batch, batch_size: int, parts: int) -> RoutedBatch:
        """See `device.count_ids`."""
        return device.count_ids(batch, self.bound, batch_size, parts, self.share)

    def start(self, batch: InFlight, capacities: dict[str, int]) -> InFlight:
        """Sends the batch off and has it sorted."""
        routed = batch.routed
        with jax.profiler.TraceAnnotation("route"):
            features = device.pack_ids(routed, self.bound, capacities, self.dtype)
        lists = host.pack_pooled(routed, self.bound, capacities, self.dtype)
        inputs = place(routed.batch, Routing({}, features, lists), routed.local, self.mesh, self.dtype)
        located, required = self._sort(inputs.routing.features)
        for size in required.values():
            size.copy_to_host_async()
        return dataclasses.replace(batch, inputs=inputs, located=located, required=required)

    def complete(self, batch: InFlight, capacities: dict[str, int]) -> StepInputs:
        """Writes the routing."""
        capacity.require(capacities, batch.required_capacities)
        sizes, inputs = device.sizes(self.bound, capacities), batch.inputs
        routing = self._layout(inputs.routing.features, batch.located, sizes)
        return dataclasses.replace(inputs, routing=dataclasses.replace(routing, pooled=inputs.routing.pooled))

    @functools.cached_property
    def _sort(self) -> Any:
        return device.make_sort(self.bound, self.mesh)

    @functools.cached_property
    def _layout(self) -> Any:
        return device.make_layout(self.bound, self.mesh)


Router = HostRouter | DeviceRouter


def choose(config: RunConfig, bound: BoundPlan, mesh: Mesh, dtype: Any, planned: str, staged: bool) -> Router:
    """Returns the router that `train.routing` asks for.

    Args:
      config: of the run.
      bound: the bound plan.
      mesh: its devices.
      dtype: of dense features, labels and weights on the devices.
      planned: what a planner has chosen, for "auto".
      staged: whether the host alone knows where a batch's rows are: some are not on the devices, or keys get rows.

    Raises:
      ConfigError: the devices are to route, but the host alone knows where rows are, or they change places.
    """
    staged = staged or any(group.mapped for group in bound.groups)
    choice: str = config.train.routing
    if choice == "auto" and not staged:
        choice = planned
    if choice == "auto":
        platform = mesh.devices.flat[0].platform
        ids = config.train.batch_size * sum(feature.ids for feature in bound.features)
        static = not staged and not config.embedding.hot.refresh
        choice = "device" if device.routes(choice, platform, ids, static) else "host"
    if choice == "device" and staged:
        raise ConfigError(
            "train.routing=device, but some tables have rows in places that the host alone knows. Set "
            "train.routing=host or auto."
        )
    if choice == "device" and config.embedding.hot.refresh:
        raise ConfigError(
            "train.routing=device compiles which rows are hot, but embedding.hot.refresh changes them. Set "
            "train.routing=host or auto, or embedding.hot.refresh=0."
        )
    make = DeviceRouter if choice == "device" else HostRouter
    return make(bound, mesh, dtype)


def place_all(router: Router, batches: Sequence[InFlight]) -> tuple[list[StepInputs], dict[str, int]]:
    """Lays out batches that are all there, with capacities that hold each of them, which it also returns."""
    sizes: dict[str, int] = functools.reduce(capacity.grow, (batch.routed.required_capacities for batch in batches), {})
    started = [router.start(batch, sizes) for batch in batches]
    sizes = functools.reduce(capacity.grow, (batch.required_capacities for batch in started), sizes)
    return [router.complete(batch, sizes) for batch in started], sizes
