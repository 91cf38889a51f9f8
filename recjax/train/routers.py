"""Routers of batches: the host, or the devices. Either way the step works on the same arrays, `StepInputs`.

Worker threads `route` a batch; then the sizes that it needs are known, as far as the host knows them, for which the
caller chooses sizes; `lay_out` writes its arrays, which travel as one (`PackedBatches`); and the program of the step
takes them apart (`PackedBatches.inputs`), where the devices route if the host has not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing import capacity, device, host
from recjax.embedding.routing.routed import RoutedBatch, Routing
from recjax.errors import ConfigError
from recjax.parallel.mesh import BATCH_AXES, Share, put_share
from recjax.parallel.packed import PackedForm, pack_words, unpack_words
from recjax.train.two_sided import ItemKeys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One global batch as the step takes it; every leading axis is device-major and split over the mesh.

    Attributes:
      dense_BxK: float [N * b, K], zeros in padding rows.
      labels_B: float [N * b]; or [N * b, T], where the data name T labels.
      weights_B: likewise, 0 in padding rows.
      routing: the routed ids.
      items: for a loss over the batch what it must know of each sample's item: see `ItemKeys.of`; mostly empty.
    """

    dense_BxK: Any
    labels_B: Any
    weights_B: Any
    routing: Routing
    items: dict[str, Any] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatches:
    """K global batches as a program takes them: one array, of one transfer.

    Attributes:
      words_KxNxE: int32, each batch's arrays end to end, device by device; axis 1 is split over the mesh.
      form: of the `StepInputs` of one batch. Where the devices route, its routing holds ids in place of indices of
        rows, and of groups nothing.
      sizes: None, if the host has routed; else the sizes of the routing that the devices write, () on one device, where
        they are those of the worst case.
    """

    words_KxNxE: Any
    form: PackedForm = dataclasses.field(metadata={"static": True})
    sizes: device.Sizes | None = dataclasses.field(default=None, metadata={"static": True})

    def inputs(self, words_E: jax.Array, bound: BoundPlan) -> tuple[StepInputs, dict[str, jax.Array], jax.Array | None]:
        """Takes one batch apart on one device, inside `jax.shard_map`.

        Returns:
          its arrays; the sizes that its routing needs, by name, where they were chosen without knowing; and whether
          these suffice, bool [], alike on all devices. Of a batch that does not fit the arrays are wrong.
        """
        inputs: StepInputs = unpack_words(words_E, self.form)
        if self.sizes is None:
            return inputs, {}, None
        with jax.named_scope("route"):
            features = inputs.routing.features
            located, needs = device.find_rows(bound, features)
            sizes = self.sizes or device.largest_sizes(bound, features)
            routing = device.write_routing(bound, features, located, sizes)
            inputs = dataclasses.replace(inputs, routing=dataclasses.replace(routing, pooled=inputs.routing.pooled))
            if not self.sizes:
                return inputs, {}, None
            held = device.named_sizes(bound, sizes)
            return inputs, needs, jnp.all(jnp.stack([needs[name] <= held[name] for name in needs]))

    def batch(self, k: int) -> PackedBatches:
        """Returns the k-th of the batches alone."""
        return dataclasses.replace(self, words_KxNxE=self.words_KxNxE[k : k + 1])

    @classmethod
    def put(cls, words_KxNxE: np.ndarray, form: PackedForm, sizes: device.Sizes | None, mesh: Mesh) -> PackedBatches:
        """Puts the words of this process's N devices on the mesh: one transfer."""
        sharding = NamedSharding(mesh, WORDS)
        if jax.process_count() == 1:
            return cls(jax.device_put(words_KxNxE, sharding), form, sizes)
        K, _, E = words_KxNxE.shape
        placed = jax.make_array_from_process_local_data(sharding, words_KxNxE, (K, mesh.devices.size, E))
        return cls(placed, form, sizes)


WORDS = P(None, BATCH_AXES)


def pad(routed: RoutedBatch, routing: Routing, dtype: Any, keys: ItemKeys | None = None) -> StepInputs:
    """Returns a batch with `routed.local` rows a device, of weight 0 where there is no sample, and its routing: NumPy.

    Args:
      routed: the samples for the devices of this process.
      routing: of these samples.
      dtype: of dense features, labels and weights on the devices.
      keys: None, or what a loss over the batch must know of items.
    """
    batch, total = routed.batch, routed.local * routed.devices

    def padded(x: np.ndarray, dtype: Any = dtype) -> np.ndarray:
        if len(x) == total:
            return x.astype(dtype, copy=False)
        out = np.zeros((total, *x.shape[1:]), dtype)
        out[: len(x)] = x
        return out

    items = {} if keys is None else keys.of(batch)
    items = {name: padded(x, x.dtype if x.dtype.kind == "i" else dtype) for name, x in items.items()}
    return StepInputs(padded(batch.dense), padded(batch.labels), padded(batch.weights), routing, items)


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A batch between the reader and the step.

    Attributes:
      batch: as it was read; in a training of several processes its samples for the devices of this one.
      routed: the samples for the devices of this process, routed.
      stop: the signal upon which all processes stop after this batch; 0: none.
      save: whether all processes save a checkpoint after it.
      stages: the states of the stream's ordered stages after it.
      packed: None, or its form and words, int32 [N, E], where these need no sizes: a worker thread has packed them.
    """

    batch: Batch
    routed: RoutedBatch
    stop: int = 0
    save: bool = False
    stages: tuple[Mapping[str, Any], ...] = ()
    packed: tuple[PackedForm, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class _Router:
    """Base of both."""

    bound: BoundPlan
    mesh: Mesh
    dtype: Any
    keys: ItemKeys | None = None

    @functools.cached_property
    def share(self) -> Share:
        """The devices whose samples it lays out."""
        return Share.of(self.mesh)

    def lay_out(self, routed: RoutedBatch, capacities: Mapping[str, int]) -> StepInputs:
        """Writes the arrays of a batch, for the devices of this process, in these sizes: NumPy."""
        raise NotImplementedError

    def packed(self, routed: RoutedBatch) -> tuple[PackedForm, np.ndarray] | None:
        """Returns a batch's form and words where no size has a part in them; else None."""
        del routed
        return None

    def put(self, batches: Sequence[InFlight], capacities: Mapping[str, int]) -> PackedBatches:
        """Packs batches into arrays of these sizes, and puts them on the mesh."""
        with jax.profiler.TraceAnnotation("route"):
            first = batches[0].packed
            trees = [] if first else [self.lay_out(batch.routed, capacities) for batch in batches]
            form = first[0] if first else PackedForm.of(trees[0], self.share.count)
        with jax.profiler.TraceAnnotation("place"):
            words_KxNxE = aligned_words((len(batches), self.share.count, sum(form.words)))
            for k, batch in enumerate(batches):
                if batch.packed:
                    words_KxNxE[k] = batch.packed[1]
                else:
                    pack_words(trees[k], form, words_KxNxE[k])
            return PackedBatches.put(words_KxNxE, form, self.sizes(capacities), self.mesh)

    def sizes(self, capacities: Mapping[str, int]) -> device.Sizes | None:
        """Returns `PackedBatches.sizes`."""
        del capacities
        return None

    def counted(self, routed: RoutedBatch) -> dict[str, int]:
        """Has the host count sizes that a batch needs beside its `required_capacities`; {} if these are all."""
        del routed
        return {}


def aligned_words(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an int32 array, not written, where CPU devices take it without a copy."""
    words = np.empty(math.prod(shape) + _ALIGNED // 4, np.int32)
    start = -words.ctypes.data % _ALIGNED // 4
    return words[start : start + math.prod(shape)].reshape(shape)


_ALIGNED = 64  # bytes


@dataclasses.dataclass(frozen=True)
class HostRouter(_Router):
    """Routes on the host: worker threads find the distinct rows, and the thread that trains lays them out."""

    name: ClassVar[str] = "host"

    def route(self, batch: Batch, batch_size: int, parts: int) -> RoutedBatch:
        """See `route_on_host`."""
        return host.route_on_host(batch, self.bound, batch_size, parts, self.share)

    def lay_out(self, routed: RoutedBatch, capacities: Mapping[str, int]) -> StepInputs:
        """Writes a batch's arrays."""
        return pad(routed, host.pack(routed, self.bound, dict(capacities), self.dtype), self.dtype, self.keys)


@dataclasses.dataclass(frozen=True)
class DeviceRouter(_Router):
    """Has the devices route, within the program that takes the batch."""

    name: ClassVar[str] = "device"

    def route(self, batch: Batch, batch_size: int, parts: int) -> RoutedBatch:
        """See `device.count_ids`."""
        return device.count_ids(batch, self.bound, batch_size, parts, self.share)

    def lay_out(self, routed: RoutedBatch, capacities: Mapping[str, int]) -> StepInputs:
        """Writes a batch's arrays, with ids in place of indices of rows."""
        sizes = dict(capacities)
        capacity.require(sizes, routed.required_capacities)
        features = device.pack_ids(routed, self.bound, sizes, self.dtype)
        lists = host.pack_pooled(routed, self.bound, sizes, self.dtype)
        return pad(routed, Routing({}, features, lists), self.dtype, self.keys)

    def packed(self, routed: RoutedBatch) -> tuple[PackedForm, np.ndarray] | None:
        """Returns its form and words if all bags are of fixed sizes, and no vectors are pooled by owners."""
        if routed.required_capacities or self.bound.pooled:
            return None
        tree = self.lay_out(routed, {})
        form = PackedForm.of(tree, self.share.count)
        words_NxE = np.empty((self.share.count, sum(form.words)), np.int32)
        pack_words(tree, form, words_NxE)
        return form, words_NxE

    def sizes(self, capacities: Mapping[str, int]) -> device.Sizes | None:
        """Returns sizes for `device.write_routing`: () on one device."""
        return device.sizes(self.bound, dict(capacities)) if self.bound.all_devices > 1 else ()

    def counted(self, routed: RoutedBatch) -> dict[str, int]:
        """Has the host count what a batch needs of several devices."""
        if self.bound.all_devices == 1:
            return {}
        size = routed.local * self.share.total
        return host.route_on_host(routed.batch, self.bound, size, routed.parts, self.share).required_capacities


Router = HostRouter | DeviceRouter


def choose(
    config: RunConfig,
    bound: BoundPlan,
    mesh: Mesh,
    dtype: Any,
    planned: str,
    staged: bool,
    keys: ItemKeys | None = None,
) -> Router:
    """Returns the router that `train.routing` asks for.

    Args:
      config: of the run.
      bound: the bound plan.
      mesh: its devices.
      dtype: of dense features, labels and weights on the devices.
      planned: what a planner has chosen, for "auto".
      staged: whether the host alone knows where a batch's rows are: some are not on the devices, or keys get rows.
      keys: what a loss over the batch must know of items; None: there is no such loss.

    Raises:
      ConfigError: the devices are to route, but the host alone knows where rows are, or they change places.
    """
    staged = staged or any(group.mapped for group in bound.groups)
    choice: str = config.train.routing
    if choice == "auto" and not staged:
        choice = planned
    if choice == "auto":
        platform = mesh.devices.flat[0].platform
        static = not staged and not config.embedding.hot.refresh
        choice = "device" if device.routes(choice, platform, static) else "host"
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
    return make(bound, mesh, dtype, keys)


def place_all(
    router: Router, batches: Sequence[InFlight], capacities: Mapping[str, int] = MappingProxyType({})
) -> tuple[list[StepInputs], dict[str, int]]:
    """Lays out batches that are all there, apart, with capacities that hold each of them, which it also returns.

    The host routes them, whoever the router is: the arrays are the same.

    Args:
      router: of the training.
      batches: routed by it.
      capacities: of which none falls.
    """
    share, size = router.share, batches[0].routed.local * router.share.total if batches else 0
    routed = [
        batch.routed
        if batch.routed.keys or not router.bound.listing
        else host.route_on_host(batch.batch, router.bound, size, batch.routed.parts, share)
        for batch in batches
    ]
    sizes: dict[str, int] = functools.reduce(
        capacity.grow, (batch.required_capacities for batch in routed), dict(capacities)
    )
    packed = [
        pad(batch, host.pack(batch, router.bound, sizes, router.dtype), router.dtype, router.keys) for batch in routed
    ]
    return [put_share(inputs, router.mesh) for inputs in packed], sizes
