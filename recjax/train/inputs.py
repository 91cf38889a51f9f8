"""The one way from data to the step, which training, evaluation and prediction all iterate."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from recjax.config.run import RunConfig
from recjax.data import thread_map
from recjax.data.batch import Batch
from recjax.data.batch_checks import validate
from recjax.data.pipeline import batches, shares
from recjax.data.source import BlockSource, between, require_rows
from recjax.embedding.dynamic.tables import dynamic_tables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing import capacity, device
from recjax.embedding.routing.capacity import CapacityLadder, Kinds
from recjax.embedding.routing.host import deal_rows, samples_of
from recjax.embedding.routing.routed import OrderedStage
from recjax.errors import ConfigError
from recjax.parallel import watchdog
from recjax.parallel.mesh import Share
from recjax.parallel.packed import WordSlots
from recjax.planning.question import Answer
from recjax.tiers.caches import read_through
from recjax.tiers.stage import CacheStage, ReadStage
from recjax.train import routers
from recjax.train.agreement import synchronize_batches
from recjax.train.named_rows import gather_named, list_named
from recjax.train.routers import DeviceRouter, InFlight, PackedBatches, ResidentRows, Router, StepInputs
from recjax.train.state import EMPTY, HostState
from recjax.train.two_sided import ItemKeys, item_keys


def never() -> int:
    """For a pass that nobody asks to stop or to save."""
    return 0


class InputStream:
    """Reads, validates, routes and places batches, ahead of the step. Iterating gives `PackedBatches` of one batch.

    Its state (`state_dict`: position, capacities, peaks, and those of its ordered stages) goes into the checkpoint, as
    that of a Grain iterator does.
    In a profile the host's part of a step is called count (in the reader's threads), input (waiting for these), route
    and place.

    Attributes:
      position: global index of the next sample: epoch * samples of an epoch + offset.
      latest: the batch that was given last, with what the host knows of it: samples, routing, signals.
      taken: all batches that were given together with it.
      samples: of each of them, over all processes.
    """

    latest: InFlight
    taken: tuple[InFlight, ...]
    samples: tuple[int, ...]

    def __init__(
        self,
        read: Callable[[int], Iterator[InFlight]],
        router: Router,
        batch_size: int,
        epoch_samples: int,
        period: int | None,
        stages: Sequence[OrderedStage] = (),
        slots: WordSlots | None = None,
    ) -> None:
        """Nothing is read before the first batch is asked for.

        Args:
          read: gives the routed batches from a position on.
          router: who routes.
          batch_size: B; the last batch of an epoch may hold fewer.
          epoch_samples: samples of an epoch.
          period: steps after which capacities may fall; None: they only grow.
          stages: what is done to routed batches in their order, one stage after the other.
          slots: in which `read` packs batches; they learn how many are taken together.
        """
        self._slots = slots or WordSlots()
        self._read, self._router, self._period = read, router, period
        self._batch_size, self._epoch_samples = batch_size, epoch_samples
        self._batches: Iterator[InFlight] | None = None
        self._begun = 0  # batches that were given since reading began
        self._upcoming: collections.deque[InFlight] = collections.deque()  # read, but not through the stages
        self._waiting: collections.deque[InFlight] = collections.deque()  # through the stages, but not given
        self._error: Exception | None = None  # of the batch after these
        self._stages, self._new = tuple(stages), [stage.state_dict() for stage in stages]
        self.load_state_dict({"position": 0, "capacities": {}, "peaks": {}})

    def state_dict(self) -> dict[str, Any]:
        """Returns what a stream needs to give the same batches from here on: JSON values."""
        ladder = self._ladder
        state = {"position": self.position, "capacities": dict(ladder.capacities), "peaks": dict(ladder.peaks)}
        return {**state, "stages": self._stage_states} if any(self._stage_states) else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the stream that gave this `state_dict` was, maybe on other devices.

        Capacities may be left empty: batches are the same, in arrays of other sizes. So may stages, which then begin as
        they were made.
        """
        self.close()
        self._stage_states = list(state.get("stages") or self._new)
        for stage, of_stage in zip(self._stages, self._stage_states, strict=True):
            stage.load_state_dict(of_stage)
        self.position = int(state["position"])
        self._sizes: dict[str, int] = {}
        epoch, offset = divmod(self.position, self._epoch_samples)
        steps = epoch * -(-self._epoch_samples // self._batch_size) + offset // self._batch_size
        kinds = Kinds.of(self._router.bound)
        self._ladder = CapacityLadder(state["capacities"], state["peaks"], steps, self._period, kinds)

    def reroute(self, router: Router, read: Callable[[int], Iterator[InFlight]]) -> None:
        """Goes on with another router and its batches; the bound plan may differ in which rows are hot."""
        self.close()
        self._read, self._router = read, router

    @property
    def capacities(self) -> dict[str, int]:
        """Sizes of the arrays that were given last: a program is compiled for each set of them."""
        return self._sizes or self._ladder.capacities

    @property
    def next_capacities(self) -> dict[str, int] | None:
        """Sizes that may follow these soon; None if none does: see `CapacityLadder.next`."""
        return self._ladder.next()

    def __iter__(self) -> Iterator[PackedBatches]:
        """Itself."""
        return self

    def __next__(self) -> PackedBatches:
        """The next batch on the mesh, in arrays that hold it."""
        return self.take(1, exact=True)

    def take(self, count: int, exact: bool = False) -> PackedBatches:
        """Returns the next `count` batches on the mesh; one, if there are fewer, or one of them cannot be read.

        Where several devices route, only they find what a batch needs, and its arrays may not hold it; whoever runs the
        program then has it run again, with the sizes that `take_in` gives.

        Args:
          count: of batches.
          exact: whether the host counts, too, so that arrays hold what this process has of each batch.

        Raises:
          StopIteration: there is none.
          RecjaxError: the next one cannot be read.
        """
        if self._batches is None:
            self._slots.restart()
            self._begun = 0
        self._slots.expect(self._begun, count)
        if self._batches is None:
            self._batches = self._read(self.position)
        depth = max([count, *(1 + stage.depth for stage in self._stages)])
        while len(self._waiting) < depth and self._error is None:
            try:
                batch = self._advance()
            except Exception as error:  # those before it are trained first
                self._error = error
                break
            if batch is None:
                break
            self._waiting.append(batch)
        if not self._waiting:
            if self._error is not None:
                raise self._error
            raise StopIteration
        count = count if count <= len(self._waiting) else 1
        self._begun += count
        self.taken = tuple(self._waiting.popleft() for _ in range(count))
        self.latest = self.taken[-1]
        self._stage_states = list(self.latest.stages)
        sizes: dict[str, int] = {}
        for batch in self.taken:  # sizes may fall between two of them
            counted = self._router.counted(batch.routed) if exact else {}
            sizes = capacity.largest(sizes, self._ladder.fit(batch.routed.required_capacities | counted))
        watchdog.phase("dispatch")
        inputs = self._router.put(self.taken, sizes)
        before, self._sizes = self.position, sizes
        ends = [self._end_of_next() for _ in self.taken]
        self.samples = tuple(end - start for start, end in itertools.pairwise([before, *ends]))
        return inputs

    def take_if_any(self) -> PackedBatches | None:
        """Returns the next batch, as `take`; None at the end."""
        try:
            return self.take(1)
        except StopIteration:
            return None

    def _end_of_next(self) -> int:
        """Moves the position to the end of the next batch, and returns it."""
        self.position += min(self._batch_size, self._epoch_samples - self.position % self._epoch_samples)
        return self.position

    def take_in(self, needs: Mapping[str, int]) -> device.Sizes | None:
        """Takes in what a batch needed where the devices route; returns sizes that hold it."""
        before = self._ladder.capacities
        if (sizes := self._ladder.raise_to(needs)) != before:
            self._sizes = sizes
        return self._router.sizes(sizes)

    def _advance(self) -> InFlight | None:
        """The next batch, through all stages; None if there is none."""
        ahead = max((stage.look_ahead for stage in self._stages), default=0)
        while len(self._upcoming) <= ahead:
            with jax.profiler.TraceAnnotation("input"):
                read = next(self._batches or iter(()), None)
            if read is None:
                break
            self._upcoming.append(read)
        if not self._upcoming:
            return None
        batch, routed = self._upcoming.popleft(), [later.routed for later in self._upcoming]
        if not self._stages:
            return batch
        with jax.profiler.TraceAnnotation("stages"):
            own = batch.routed
            for stage in self._stages:
                own = stage.advance(own, routed[: stage.look_ahead])
            return dataclasses.replace(batch, routed=own, stages=tuple(stage.state_dict() for stage in self._stages))

    def close(self) -> None:
        """Ends the reading. What is under way is read again if the stream goes on."""
        self._batches, self._error = None, None
        self._upcoming.clear()
        self._waiting.clear()


class InputStreams:
    """The part of a `Trainer` that reads and routes; the trainer says what its attributes are."""

    config: RunConfig
    source: BlockSource
    mesh: Mesh
    bound: BoundPlan
    dtype: Any
    chosen: Answer | None
    options: Any
    resident: ResidentRows | None

    @functools.cached_property
    def gives_rows(self) -> bool:
        """True if some tables give rows to keys."""
        return bool(dynamic_tables(self.bound))

    def require_host(self, host: HostState) -> HostState:
        """Gives `host` back, or refuses a state without it where the host has a part of the state (ConfigError)."""
        if (self.bound.cached and host.tier is None) or (self.gives_rows and host.ids is None):
            raise ConfigError(
                "some rows of this training are on the host (tier.device_bytes), or are given to keys (ids=dynamic), "
                "but here is no state of the host. Give streams that of the state that they are for, as in "
                "trainer.train_inputs(host=state.host), and keep it in states: dataclasses.replace(state, host=...)."
            )
        return host

    def train_inputs(
        self, stop: Callable[[], int] = never, save: Callable[[], int] = never, host: HostState = EMPTY
    ) -> InputStream:
        """The inputs of a training, without end; `load_state_dict` starts them elsewhere.

        Args:
          stop: asked before each batch; what any process's says, `latest.stop` says in all.
          save: likewise for `latest.save`.
          host: of the state that is trained.
        """
        size, slots = self.config.train.batch_size, WordSlots()
        read = self.train_reader(stop, save, host, slots)
        return InputStream(read, self.router, size, self.samples_per_epoch, capacity.PERIOD, self.stages(host), slots)

    def train_reader(
        self,
        stop: Callable[[], int] = never,
        save: Callable[[], int] = never,
        host: HostState = EMPTY,
        slots: WordSlots | None = None,
    ) -> Callable[[int], Iterator[InFlight]]:
        """Returns the function that gives the batches of a training from a position on, as `routed_batches`."""
        return functools.partial(self.routed_batches, stop=stop, save=save, host=host, slots=slots)

    def first_inputs(self, capacities: Mapping[str, int], host: HostState = EMPTY) -> StepInputs:
        """Returns the first batch of a training, routed, in arrays of these sizes or, where it needs more, larger."""
        with contextlib.closing(self.train_inputs(host=host)) as stream:
            stream.load_state_dict({"position": 0, "capacities": capacities, "peaks": {}})
            next(stream)
            return routers.place_all(self.router, [stream.latest], stream.capacities)[0][0]

    def eval_inputs(self, split: str, stop: Callable[[], int] = never, host: HostState = EMPTY) -> InputStream:
        """The inputs of one pass over a split; `stop` and `host` as for `train_inputs`.

        Each process reads a part of the split of its own, `eval_rows`, in the order of the prepared data.

        Raises:
          DataError: the split has no rows.
        """
        require_rows(self.source, split)
        samples = int(self.source.row_counts(split).sum())
        size = min(self.config.train.eval_batch_size, samples)
        parts = [(rows, share_size(size, share)) for rows, share in eval_shares(self.source, split, self.mesh)]
        steps = max(-(-len(rows) // each) for rows, each in parts)
        mine, each = parts[jax.process_index()]

        def read(position: int) -> Iterator[InFlight]:
            before = position // size
            route = functools.partial(self._route, batch_size=size, parts=1, host=host, check=True)
            where: dict[str, Any] = {"position": mine.start + before * each, "end": mine.stop, "epochs": 1}
            workers = self.config.train.workers
            stream = batches(
                self.source, split, each, transform=route, workers=workers, pack=True, check=False, **where
            )
            return self._together(self._lengthened(stream, split, steps - before, size, host), stop, host=host)

        return InputStream(read, self.reading, size, samples, None, self.reading_stages(host))

    def eval_rows(self, split: str) -> range:
        """Rows of a split that this process evaluates."""
        return eval_shares(self.source, split, self.mesh)[jax.process_index()][0]

    def _lengthened(
        self, stream: Iterator[InFlight], split: str, steps: int, size: int, host: HostState
    ) -> Iterator[InFlight]:
        """A process's batches, and empty ones after them, so that all take as many steps."""
        batch = None
        for _ in range(steps):
            read = next(stream, None)
            if read is None:
                read = self._route(between(batch or self.source.read(split, 0), 0, 0), size, 1, host)
            batch = read.batch
            yield read

    def inputs_of(self, given: Iterable[Batch], batch_size: int, host: HostState = EMPTY) -> InputStream:
        """The inputs of batches that all processes give alike, of up to `batch_size` samples; they must be valid.

        They are read once: this stream cannot go on elsewhere. `host` is that of the state that predicts.
        """
        route = functools.partial(self.route, batch_size=batch_size, host=host)
        workers = self.config.train.workers

        def read(position: int) -> Iterator[InFlight]:
            with ThreadPoolExecutor(max(1, workers)) as pool:
                yield from self._together(thread_map.ahead(pool, workers, route, given), host=host)

        return InputStream(read, self.reading, batch_size, batch_size, None, self.reading_stages(host))

    def routed_batches(
        self,
        position: int = 0,
        stop: Callable[[], int] = never,
        save: Callable[[], int] = never,
        host: HostState = EMPTY,
        slots: WordSlots | None = None,
    ) -> Iterator[InFlight]:
        """The batches of a training from a sample on, checked and routed ahead by worker threads, but not placed."""
        train, share = self.config.train, self.router.share
        mine = samples_of(share, train.batch_size, train.accumulate)
        size, parts = train.batch_size, train.accumulate
        check = not self.gives_rows  # else before rows are given
        route = functools.partial(
            self._route, batch_size=size, parts=parts, host=host, trains=True, slots=slots, check=check
        )
        stream = batches(
            self.source,
            "train",
            train.batch_size,
            seed=self.config.seed,
            shuffle=train.shuffle,
            shuffle_blocks=train.shuffle_blocks,
            position=position,
            workers=train.workers,
            transform=None if self.gives_rows else route,
            check=self.gives_rows,
            part=None if share.count == share.total else mine,
            pack=True,
        )
        routed = map(route, stream) if self.gives_rows else stream  # rows are given in the order of the batches
        return self._together(routed, stop, save, host)

    def _together(
        self,
        routed: Iterator[InFlight],
        stop: Callable[[], int] = never,
        save: Callable[[], int] = never,
        host: HostState = EMPTY,
    ) -> Iterator[InFlight]:
        """Gives this process's batches what all processes know of them."""
        stream = self._sized(routed)
        several = jax.process_count() > 1
        stream = synchronize_batches(stream, self.mesh, stop, save) if several else _signalled(stream, stop, save)
        return stream if self.require_host(host).tier is None else gather_named(stream, self.bound, self.mesh)

    def _sized(self, routed: Iterator[InFlight]) -> Iterator[InFlight]:
        """The same; the first one knows the sizes that it needs, also where the devices find them later."""
        first = next(routed, None)
        if first is None:
            return
        sizes = first.routed.required_capacities | self.router.counted(first.routed)
        yield dataclasses.replace(first, routed=dataclasses.replace(first.routed, required_capacities=sizes))
        yield from routed

    def route(self, batch: Batch, batch_size: int, parts: int = 1, host: HostState = EMPTY) -> InFlight:
        """Routes this process's samples of a batch, which are what `batch` of the result holds.

        Args:
          batch: whole; all processes give the same.
          batch_size: B, the most samples that a batch may have.
          parts: as for `route_on_host`.
          host: of the state, where it gives rows to keys.
        """
        share = self.router.share
        if share.count == share.total:
            return self._route(batch, batch_size, parts, host)
        first, last = samples_of(share, batch_size, parts)
        mine = between(batch, min(first, batch.size), min(last, batch.size))
        return self._route(mine, batch_size, parts, host)

    def _route(
        self,
        batch: Batch,
        batch_size: int,
        parts: int,
        host: HostState,
        trains: bool = False,
        slots: WordSlots | None = None,
        check: bool = False,
    ) -> InFlight:
        """Routes samples, which are of the training if `trains`; with `check` only if they are valid."""
        with jax.profiler.TraceAnnotation("count"):
            packed = None if self.gives_rows else self.router.pack(batch, batch_size, parts, trains, slots)
            if check and not (packed and packed.form and packed.form.resident):
                validate(batch, self.source.schema)
            if packed:
                return packed
            if self.item_keys is not None:
                batch = self.item_keys.with_drawn(batch, trains)
            rows, admission = batch, None
            if self.gives_rows:
                ids = self.require_host(host).ids
                assert ids is not None
                rows, admission = ids.advance(batch) if trains else (ids.find(batch), None)
            if trains and self.deals_rows:
                rows = deal_rows(rows, self.router.bound, batch_size, parts, self.router.share)
            routed = self.router.route(rows, batch_size, parts)
            if self.gives_rows:
                return InFlight(batch, dataclasses.replace(routed, admission=admission))
            return InFlight(rows, list_named(self.bound, routed) if self.bound.cached else routed)

    @property
    def deals_rows(self) -> bool:
        """True if lists reach the model one element after the other, and a sample may go to any device.

        It may where neither its number nor its replica group means anything.
        """
        apart = any(feature.pooling == "none" for feature in self.bound.features)
        return apart and self.item_keys is None and not self.options.per_sample and not self.bound.independent

    def stages(self, host: HostState = EMPTY) -> tuple[OrderedStage, ...]:
        """Returns new ordered stages for an input stream; `host` as for `train_inputs`."""
        if (tier := self.require_host(host).tier) is not None:
            return (CacheStage(self.bound, tier, self.config.tier.look_ahead),)
        return ()

    def reading_stages(self, host: HostState = EMPTY) -> tuple[OrderedStage, ...]:
        """The same for a stream of predictions."""
        return (ReadStage(self.reading.bound),) if self.bound.cached else self.stages(host)

    @functools.cached_property
    def reading(self) -> routers.Router:
        """Router for predictions: as `router`, but rows on the host have no cache."""
        return self._router_of(read_through(self.bound)) if self.bound.cached else self.router

    @functools.cached_property
    def router(self) -> routers.Router:
        """Router, as `train.routing` says."""
        router = self._router_of(self.bound)
        return dataclasses.replace(router, resident=self.resident) if isinstance(router, DeviceRouter) else router

    def _router_of(self, bound: BoundPlan) -> routers.Router:
        planned = self.chosen.routing if self.chosen else "auto"
        staged = bool(self.bound.cached) or self.gives_rows
        schema, keys = self.source.schema, self.item_keys
        return routers.choose(self.config, bound, self.mesh, self.dtype, planned, staged, schema, keys)

    @functools.cached_property
    def item_keys(self) -> ItemKeys | None:
        """The facts about items that a loss over the batch must know; None: there is no such loss."""
        return item_keys(self.config, self.source) if getattr(self.config.model, "two_sided", False) else None

    @functools.cached_property
    def samples_per_epoch(self) -> int:
        """Samples of the training split."""
        return int(self.source.row_counts("train").sum())

    @property
    def steps_per_epoch(self) -> int:
        """Steps that an epoch takes; the last may be of fewer samples."""
        return -(-self.samples_per_epoch // self.config.train.batch_size)

    @property
    def total_steps(self) -> int:
        """Steps of a whole run: `train.steps`, or as many as `train.epochs` hold."""
        return self.config.train.steps or self.config.train.epochs * self.steps_per_epoch


def _signalled(stream: Iterator[InFlight], stop: Callable[[], int], save: Callable[[], int]) -> Iterator[InFlight]:
    """Gives each batch what this process, which is the only one, is asked for."""
    for batch in stream:
        number, due = stop(), bool(save())
        yield dataclasses.replace(batch, stop=number, save=due) if number or due else batch


def eval_shares(source: BlockSource, split: str, mesh: Mesh) -> list[tuple[range, Share]]:
    """Returns for each process its rows of a split, and its devices."""
    of_all = Share.of_all(mesh)
    edges = shares(source.row_counts(split), [share.count for share in of_all]).tolist()
    return [(range(*edge), share) for edge, share in zip(itertools.pairwise(edges), of_all, strict=True)]


def share_size(batch_size: int, share: Share) -> int:
    """Returns how many samples a process reads at a time, where batches of all are of `batch_size`."""
    first, end = samples_of(share, batch_size)
    return min(end - first, batch_size)
