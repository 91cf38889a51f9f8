"""Routers of batches: the host, or the devices. Either way the step works on the same arrays, `StepInputs`.

Worker threads `route` a batch; then the sizes that it needs are known, as far as the host knows them, for which the
caller chooses sizes; `lay_out` writes its arrays, which travel as one (`PackedBatches`); and the program of the step
takes them apart (`PackedBatches.inputs`), where the devices route if the host has not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recjax.config.run import RunConfig
from recjax.data.batch import Batch, RowBatch, RowLayout, Rows, Schema, id_words
from recjax.data.batch_checks import validate
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing import capacity, device, host
from recjax.embedding.routing.routed import FeatureRouting, RoutedBatch, Routing
from recjax.embedding.spec import FeatureSpec
from recjax.errors import ConfigError
from recjax.parallel.mesh import BATCH_AXES, Share, put, put_share, replicated
from recjax.parallel.packed import PackedForm, WordSlot, WordSlots, aligned_words, join_slots, pack_words
from recjax.train.two_sided import ItemKeys
from recjax.utils import log


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One global batch as the step takes it; every leading axis is device-major and split over the mesh.

    Attributes:
      dense_BxK: float [N * b, K], zeros in padding rows.
      labels_B: float [N * b]; or [N * b, T], where the data name T labels. Where elements have labels, one (or T) for
        each place of a feature of their group (`Elements`) in place of each sample.
      weights_B: likewise, 0 in padding.
      routing: the routed ids.
      items: for a loss over the batch what it must know of each sample's item: see `ItemKeys.of`; mostly empty.
    """

    dense_BxK: Any
    labels_B: Any
    weights_B: Any
    routing: Routing
    items: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RowForm:
    """The place of each array of a batch among the words of a device, where its samples are rows.

    Attributes:
      layout: of a row.
      local: b, samples a device, with padding.
      specs: name of a lookup and its feature, of all whose ids are looked up.
      dtype: of dense features, labels and weights on the devices.
      resident: whether the rows lie on the devices, and a device gets their numbers, -1 for padding.
    """

    layout: RowLayout
    local: int
    specs: tuple[tuple[str, FeatureSpec], ...]
    dtype: Any
    resident: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.local, self.specs, self.dtype, self.resident))

    def __hash__(self) -> int:
        """Returns that of its content, found once: every call of a program asks for it."""
        return self._hash

    @classmethod
    def fits(cls, layout: RowLayout, specs: Iterable[FeatureSpec]) -> bool:
        """Returns whether the arrays of these features can be read from rows to the last bit."""
        plain = {
            feature.name for feature in layout.schema.features if feature.bag is not None and id_words(feature) == 1
        }
        weighted = {feature.name for feature in layout.schema.features if feature.weighted}
        return all(spec.reads in plain and not (spec.pooling == "mean" and spec.reads in weighted) for spec in specs)

    @property
    def words(self) -> tuple[int, ...]:
        """Words of a batch on one device."""
        return (self.local if self.resident else self.local * self.layout.words,)

    def pack(self, batch: Batch, out_NxE: np.ndarray) -> None:
        """Lays a batch out for N devices, whose samples follow each other."""
        if self.resident:
            assert isinstance(batch, RowBatch)
            out_NxE.reshape(-1)[: batch.size] = batch.numbers_B
            out_NxE.reshape(-1)[batch.size :] = device.NOTHING
            return
        rows_BxW = out_NxE.reshape(-1, self.layout.words)
        if isinstance(batch, RowBatch):
            batch.take(rows_BxW[: batch.size])
        else:
            rows_BxW[: batch.size] = self.layout.pack(batch)[0]
        rows_BxW[batch.size :] = self._padding

    @functools.cached_property
    def _padding(self) -> np.ndarray:
        """A row of weight 0 without ids: int32 [W]."""
        row_W = np.zeros(self.layout.words, np.int32)
        for (name, _), span in self.layout.spans.items():
            row_W[span] = device.NOTHING if name == "ids" else 0
        return row_W

    def unpack(self, words_E: jax.Array, rows_RxW: jax.Array | None = None) -> StepInputs:
        """Returns the arrays of one device, with ids where the routing has indices of rows."""
        if rows_RxW is None:
            rows_bxW = words_E.reshape(self.local, self.layout.words)
        else:
            taken_bxW = rows_RxW.at[jnp.maximum(words_E, 0)].get(mode="promise_in_bounds")
            rows_bxW = jnp.where(words_E[:, None] == device.NOTHING, self._padding, taken_bxW)

        def column(name: str, feature: str = "") -> jax.Array:
            words = rows_bxW[:, self.layout.spans[name, feature]]
            return words if name == "ids" else jax.lax.bitcast_convert_type(words, np.float32).astype(self.dtype)

        features = {}
        for name, spec in self.specs:
            ids_bxH = column("ids", spec.reads)
            weights = column("id weights", spec.reads) if ("id weights", spec.reads) in self.layout.spans else None
            if spec.pooling == "mean":
                share = np.float64(1 / ids_bxH.shape[1]).astype(self.dtype)
                weights = jnp.where(ids_bxH == device.NOTHING, np.zeros((), self.dtype), share)
            features[name] = FeatureRouting(ids_bxH, weights, None)
        labels, weights = column("labels"), column("weights")
        if not self.layout.schema.labels:
            labels, weights = labels[:, 0], weights[:, 0]
        return StepInputs(column("dense"), labels, weights, Routing({}, features))


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
      rows_RxW: None, or all rows of the data, int32, on every device; the words of a batch are then their numbers.
    """

    words_KxNxE: Any
    form: PackedForm | RowForm = dataclasses.field(metadata={"static": True})
    sizes: device.Sizes | None = dataclasses.field(default=None, metadata={"static": True})
    rows_RxW: Any = None

    def inputs(
        self, words_E: jax.Array, rows_RxW: jax.Array | None, bound: BoundPlan
    ) -> tuple[StepInputs, dict[str, jax.Array]]:
        """Takes one batch apart on one device, inside `jax.shard_map`, where that has these parts of the arrays.

        Returns:
          its arrays; and where sizes of its routing were chosen without knowing, those that it needs on this device, by
          name. Of a batch that does not `fit` the arrays are wrong.
        """
        form = self.form
        inputs: StepInputs = form.unpack(words_E, rows_RxW) if isinstance(form, RowForm) else form.unpack(words_E)
        if self.sizes is None:
            return inputs, {}
        with jax.named_scope("route"):
            features = inputs.routing.features
            located, needs = device.find_rows(bound, features)
            sizes = self.sizes or device.largest_sizes(bound, features)
            routing = device.write_routing(bound, features, located, sizes)
            inputs = dataclasses.replace(inputs, routing=dataclasses.replace(routing, pooled=inputs.routing.pooled))
            return inputs, needs if self.sizes else {}

    def fit(self, needs: Mapping[str, jax.Array], bound: BoundPlan) -> jax.Array:
        """Returns whether the chosen sizes hold a batch that needs these on some device: bool []."""
        held = device.named_sizes(bound, self.sizes or ())
        return jnp.all(jnp.stack([needs[name] <= held[name] for name in needs]))

    def batch(self, k: int) -> PackedBatches:
        """Returns the k-th of the batches alone."""
        return dataclasses.replace(self, words_KxNxE=self.words_KxNxE[k : k + 1])

    @classmethod
    def put(
        cls,
        words_KxNxE: np.ndarray,
        form: PackedForm | RowForm,
        sizes: device.Sizes | None,
        mesh: Mesh,
        rows_RxW: Any = None,
    ) -> PackedBatches:
        """Puts the words of this process's N devices on the mesh: one transfer."""
        sharding = NamedSharding(mesh, WORDS)
        if jax.process_count() == 1:
            return cls(jax.device_put(words_KxNxE, sharding), form, sizes, rows_RxW)
        K, _, E = words_KxNxE.shape
        placed = jax.make_array_from_process_local_data(sharding, words_KxNxE, (K, mesh.devices.size, E))
        return cls(placed, form, sizes, rows_RxW)


@dataclasses.dataclass(frozen=True)
class ResidentRows:
    """All training rows, to lie on every device: the host then sends the numbers of those of a batch.

    Attributes:
      rows: of the data.
      count: R, how many they are.
      schema: that they are held to.
      mesh: the devices.
    """

    rows: Rows
    count: int
    schema: Schema
    mesh: Mesh

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the array."""
        return jax.ShapeDtypeStruct((self.count, self.rows.layout.words), np.int32, sharding=replicated(self.mesh))

    @functools.cached_property
    def placed(self) -> jax.Array:
        """The array: read, checked and sent piece by piece when first asked for; afterwards nothing else is read.

        Raises:
          DataError: a row is damaged, or makes no sense (`validate`).
        """
        log.info(f"placing {self.count:,} training rows on each device ({self.rows.bytes / 1e9:.2f} GB)")
        form, piece = self.shape, min(self.count, _PIECE_ROWS)
        rows_RxW = jax.jit(lambda: jnp.zeros(form.shape, form.dtype), out_shardings=form.sharding)()
        write = jax.jit(jax.lax.dynamic_update_slice_in_dim, static_argnums=3, donate_argnums=0)
        for number, start in enumerate(range(0, self.count, piece)):
            start = min(start, self.count - piece)  # the last one overlaps, to be as long
            batch = RowBatch(self.rows, np.arange(start, start + piece), start, number)
            validate(batch, self.schema)
            rows_RxW = write(rows_RxW, put(batch.rows_BxW, form.sharding), start, 0)
        return rows_RxW


_PIECE_ROWS = 2**18
WORDS = P(None, BATCH_AXES)


def pad(routed: RoutedBatch, routing: Routing, router: Router) -> StepInputs:
    """Returns a batch with `routed.local` rows a device, of weight 0 where there is no sample, and its routing: NumPy.

    Args:
      routed: the samples for the devices of this process.
      routing: of these samples.
      router: whose batch it is.
    """
    batch, total, dtype, keys = routed.batch, routed.local * routed.devices, router.dtype, router.keys

    def padded(x: np.ndarray, dtype: Any = dtype) -> np.ndarray:
        if len(x) == total:
            return x.astype(dtype, copy=False)
        out = np.zeros((total, *x.shape[1:]), dtype)
        out[: len(x)] = x
        return out

    def beside_elements(x: np.ndarray) -> np.ndarray:
        out = np.zeros((len(routing.features[router.labelled].segments), *x.shape[1:]), dtype)
        out[_label_places(routed, len(out))] = x
        return out

    items = {} if keys is None else keys.of(batch)
    items = {name: padded(x, x.dtype if x.dtype.kind == "i" else dtype) for name, x in items.items()}
    place = beside_elements if router.labelled else padded
    return StepInputs(padded(batch.dense), place(batch.labels), place(batch.weights), routing, items)


def unpadded(routed: RoutedBatch, outputs: np.ndarray) -> np.ndarray:
    """The outputs of a batch's samples, or elements that have labels, among those of all places: [n] or [n, O]."""
    if routed.batch.label_lengths is None:
        return outputs[: routed.batch.size]
    return outputs[_label_places(routed, len(outputs))]


def _label_places(routed: RoutedBatch, places: int) -> np.ndarray:
    """The place of each element that has labels among so many on all devices of this process."""
    return host.entry_places(routed.batch.label_samples, routed, places // (routed.devices * routed.parts))


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A batch between the reader and the step.

    Attributes:
      batch: as it was read; in a training of several processes its samples for the devices of this one.
      routed: the samples for the devices of this process, routed.
      stop: the signal upon which all processes stop after this batch; 0: none.
      save: whether all processes save a checkpoint after it.
      stages: the states of the stream's ordered stages after it.
      form: of its words, where these need no sizes; else None.
      packed: the words, which a worker thread has packed.
    """

    batch: Batch
    routed: RoutedBatch
    stop: int = 0
    save: bool = False
    stages: tuple[Mapping[str, Any], ...] = ()
    form: RowForm | None = None
    packed: WordSlot | None = None


@dataclasses.dataclass(frozen=True)
class _Router:
    """Base of both.

    Attributes:
      bound: the bound plan.
      mesh: its devices.
      dtype: of dense features, labels and weights on the devices.
      keys: what a loss over the batch must know of items; None: there is no such loss.
      labelled: name of the lookup beside whose elements labels lie; "": samples have labels.
    """

    bound: BoundPlan
    mesh: Mesh
    dtype: Any
    keys: ItemKeys | None = None
    labelled: str = ""

    @functools.cached_property
    def share(self) -> Share:
        """The devices whose samples it lays out."""
        return Share.of(self.mesh)

    def lay_out(self, routed: RoutedBatch, capacities: Mapping[str, int]) -> StepInputs:
        """Writes the arrays of a batch, for the devices of this process, in these sizes: NumPy."""
        raise NotImplementedError

    def row_form(self, batch_size: int, parts: int, trains: bool) -> RowForm | None:
        """Returns the form of batches where no size has a part in it; else None. Arguments as for `pack`."""
        del batch_size, parts, trains
        return None

    def pack(self, batch: Batch, batch_size: int, parts: int, trains: bool, slots: WordSlots | None) -> InFlight | None:
        """Lays a batch out, if no size has a part in that; else returns None.

        Args:
          batch: its samples for the devices of this process.
          batch_size: as for `route_on_host`.
          parts: likewise.
          trains: whether it is of the training, whose rows may lie on the devices.
          slots: where it goes; None: it travels alone.
        """
        del batch, batch_size, parts, trains, slots
        return None

    def put(self, batches: Sequence[InFlight], capacities: Mapping[str, int]) -> PackedBatches:
        """Packs batches into arrays of these sizes, and puts them on the mesh."""
        slots = [batch.packed for batch in batches if batch.packed]
        if form := batches[0].form:
            with jax.profiler.TraceAnnotation("place"):
                rows_RxW = self.resident_rows() if form.resident else None
                return PackedBatches.put(join_slots(slots), form, self.sizes(capacities), self.mesh, rows_RxW)
        with jax.profiler.TraceAnnotation("route"):
            trees = [self.lay_out(batch.routed, capacities) for batch in batches]
            arrays = PackedForm.of(trees[0], self.share.count)
        with jax.profiler.TraceAnnotation("place"):
            words_KxNxE = aligned_words((len(batches), self.share.count, sum(arrays.words)))
            for tree, words_NxE in zip(trees, words_KxNxE, strict=True):
                pack_words(tree, arrays, words_NxE)
            return PackedBatches.put(words_KxNxE, arrays, self.sizes(capacities), self.mesh)

    def resident_rows(self) -> jax.Array | None:
        """Returns all training rows, on the devices; None if the host has them."""
        return None

    def sizes(self, capacities: Mapping[str, int]) -> device.Sizes | None:
        """Returns `PackedBatches.sizes`."""
        del capacities
        return None

    def counted(self, routed: RoutedBatch) -> dict[str, int]:
        """Has the host count sizes that a batch needs beside its `required_capacities`; {} if these are all."""
        del routed
        return {}


@dataclasses.dataclass(frozen=True)
class HostRouter(_Router):
    """Routes on the host: worker threads find the distinct rows, and the thread that trains lays them out."""

    name: ClassVar[str] = "host"

    def route(self, batch: Batch, batch_size: int, parts: int) -> RoutedBatch:
        """See `route_on_host`."""
        return host.route_on_host(batch, self.bound, batch_size, parts, self.share)

    def lay_out(self, routed: RoutedBatch, capacities: Mapping[str, int]) -> StepInputs:
        """Writes a batch's arrays."""
        return pad(routed, host.pack(routed, self.bound, dict(capacities), self.dtype), self)


@dataclasses.dataclass(frozen=True)
class DeviceRouter(_Router):
    """Has the devices route, within the program that takes the batch."""

    name: ClassVar[str] = "device"
    layout: RowLayout | None = None  # of samples as rows
    resident: ResidentRows | None = None  # those of the training

    def route(self, batch: Batch, batch_size: int, parts: int) -> RoutedBatch:
        """See `device.count_ids`."""
        return device.count_ids(batch, self.bound, batch_size, parts, self.share)

    def lay_out(self, routed: RoutedBatch, capacities: Mapping[str, int]) -> StepInputs:
        """Writes a batch's arrays, with ids in place of indices of rows."""
        sizes = dict(capacities)
        capacity.require(sizes, routed.required_capacities)
        features = device.pack_ids(routed, self.bound, sizes, self.dtype)
        lists = host.pack_pooled(routed, self.bound, sizes, self.dtype)
        return pad(routed, Routing({}, features, lists), self)

    def row_form(self, batch_size: int, parts: int, trains: bool) -> RowForm | None:
        """Returns the form if all bags are of fixed sizes, and no vectors are pooled by owners."""
        local, resident = host.local_samples(batch_size, self.share.total, parts), trains and self.resident is not None
        if self._row_form and (local, resident) not in self._forms:  # one object for each: every call compares them
            self._forms[local, resident] = dataclasses.replace(self._row_form, local=local, resident=resident)
        return self._forms.get((local, resident))

    def pack(self, batch: Batch, batch_size: int, parts: int, trains: bool, slots: WordSlots | None) -> InFlight | None:
        """Lays a batch out if all bags are of fixed sizes, and no vectors are pooled by owners."""
        form = self.row_form(batch_size, parts, trains)
        if form is None:
            return None
        shape = (self.share.count, sum(form.words))
        placed = slots.take(batch.number, shape) if slots and isinstance(batch, RowBatch) else None
        slot = placed or WordSlot(aligned_words((1, *shape)), 0)
        form.pack(batch, slot.words_NxE)
        routed = RoutedBatch(batch, self.share.count, form.local, parts, {}, {}, {}, {}, {})
        return InFlight(batch, routed, form=form, packed=slot)

    def resident_rows(self) -> jax.Array | None:
        """Returns all training rows, on the devices; None if the host has them."""
        return self.resident.placed if self.resident else None

    @functools.cached_property
    def _forms(self) -> dict[tuple[int, bool], RowForm]:
        return {}

    @functools.cached_property
    def _row_form(self) -> RowForm | None:
        specs = tuple((lookup.name, lookup.spec) for lookup in self.bound.lookups)
        if self.bound.pooled or self.layout is None or not RowForm.fits(self.layout, [spec for _, spec in specs]):
            return None
        return RowForm(self.layout, 0, specs, self.dtype)

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
    schema: Schema,
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
      schema: of the samples.
      keys: what a loss over the batch must know of items; None: there is no such loss.

    Raises:
      ConfigError: the devices are to route, but the host alone knows where rows are, or they change places.
    """
    choice: str = config.train.routing
    if choice == "auto" and not staged:
        choice = planned
    if choice == "auto":
        platform = mesh.devices.flat[0].platform
        static = not staged and not config.embedding.hot.refresh
        choice = "device" if host.devices_route(choice, platform, static) else "host"
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
    labelled = find_labelled(schema, [lookup.spec for lookup in bound.lookups])
    if choice == "device":
        return DeviceRouter(bound, mesh, dtype, keys, labelled, RowLayout(schema) if keys is None else None)
    return HostRouter(bound, mesh, dtype, keys, labelled)


def find_labelled(schema: Schema, features: Iterable[FeatureSpec]) -> str:
    """Name of the first feature whose elements have labels; "" where samples have them.

    Raises:
      ConfigError: all that are of that group are pooled.
    """
    names = schema.labelled_features
    if not names:
        return ""
    apart = [spec.name for spec in features if spec.reads in names and spec.pooling == "none" and spec.bag is None]
    if not apart:
        raise ConfigError(
            f"the elements of group {schema.label_group!r} have labels, but no feature of it is looked up element by "
            f"element. Set embedding.features.{names[0]}.pooling=none, and take a model that scores elements, as din."
        )
    return apart[0]


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
    packed = [pad(batch, host.pack(batch, router.bound, sizes, router.dtype), router) for batch in routed]
    return [put_share(inputs, router.mesh) for inputs in packed], sizes
