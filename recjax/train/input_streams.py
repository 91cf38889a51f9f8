"""Streams of inputs of a trainer: the batches of a training, of an evaluation, and those that somebody gives."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from recjax.config.run import RunConfig
from recjax.data import thread_map
from recjax.data.batch import Batch
from recjax.data.pipeline import batches
from recjax.data.source import BlockSource, between, require_rows
from recjax.embedding.address import Maps
from recjax.embedding.dynamic.tables import dynamic_tables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing import capacity
from recjax.embedding.routing.host import samples_of
from recjax.embedding.routing.ordered import OrderedStage, SlotLookup
from recjax.errors import ConfigError
from recjax.planning.question import Answer
from recjax.tiers.caches import read_through
from recjax.tiers.stage import CacheStage, ReadStage
from recjax.train import routers
from recjax.train.agreement import never, synchronize_batches
from recjax.train.eval_shares import eval_shares, share_size
from recjax.train.host_state import EMPTY, HostState
from recjax.train.inputs import InputStream
from recjax.train.named_rows import gather_named, list_named
from recjax.train.routers import InFlight
from recjax.train.step_inputs import StepInputs


class InputStreams:
    """The part of a `Trainer` that reads and routes; the trainer says what its attributes are."""

    config: RunConfig
    source: BlockSource
    mesh: Mesh
    bound: BoundPlan
    dtype: Any
    maps: Maps | None
    chosen: Answer | None

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
        size, read = self.config.train.batch_size, self.train_reader(stop, save, host)
        return InputStream(read, self.router, size, self.samples_per_epoch, capacity.PERIOD, self.stages(host))

    def train_reader(
        self, stop: Callable[[], int] = never, save: Callable[[], int] = never, host: HostState = EMPTY
    ) -> Callable[[int], Iterator[InFlight]]:
        """Returns the function that gives the batches of a training from a position on, as `routed_batches`."""
        return functools.partial(self.routed_batches, stop=stop, save=save, host=host)

    def first_inputs(self, capacities: Mapping[str, int], host: HostState = EMPTY) -> StepInputs:
        """Returns the first batch of a training, in arrays of these sizes or, where it needs more, larger ones."""
        with contextlib.closing(self.train_inputs(host=host)) as stream:
            stream.load_state_dict({"position": 0, "capacities": capacities, "peaks": {}})
            return next(stream)

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
            route = functools.partial(self._route, batch_size=size, parts=1, host=host)
            where: dict[str, Any] = {"position": mine.start + before * each, "end": mine.stop, "epochs": 1}
            workers = self.config.train.workers
            stream = batches(self.source, split, each, transform=route, workers=workers, **where)
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
    ) -> Iterator[InFlight]:
        """The batches of a training from a sample on, checked and routed ahead by worker threads, but not placed."""
        train, share = self.config.train, self.router.share
        mine = samples_of(share, train.batch_size, train.accumulate)
        size, parts = train.batch_size, train.accumulate
        route = functools.partial(self._route, batch_size=size, parts=parts, host=host, trains=True)
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
            part=None if share.count == share.total else mine,
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
        stream = synchronize_batches(routed, self.mesh, stop, save)
        tier = self.require_host(host).tier
        return stream if tier is None else gather_named(stream, self.bound, self.mesh, lambda: tier.decided)

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

    def _route(self, batch: Batch, batch_size: int, parts: int, host: HostState, trains: bool = False) -> InFlight:
        """Routes samples; with `trains`, where rows are given to keys, they are the next ones of the training."""
        with jax.profiler.TraceAnnotation("count"):
            if not self.gives_rows:
                found = self.router.route(batch, batch_size, parts)
                return InFlight(batch, list_named(self.bound, found) if self.bound.cached else found)
            ids = self.require_host(host).ids
            assert ids is not None
            rows, admission = ids.advance(batch) if trains else (ids.find(batch), None)
            routed = self.router.route(rows, batch_size, parts)
            return InFlight(batch, dataclasses.replace(routed, admission=admission))

    def stages(self, host: HostState = EMPTY) -> tuple[OrderedStage, ...]:
        """Returns new ordered stages for an input stream; `host` as for `train_inputs`."""
        if (tier := self.require_host(host).tier) is not None:
            return (CacheStage(self.bound, tier, self.config.tier.look_ahead),)
        mapped = any(group.mapped for group in self.bound.groups)
        return (SlotLookup(self.bound, self.maps),) if mapped else ()

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
        return self._router_of(self.bound)

    def _router_of(self, bound: BoundPlan) -> routers.Router:
        planned = self.chosen.routing if self.chosen else "auto"
        staged = bool(self.bound.cached) or self.gives_rows
        return routers.choose(self.config, bound, self.mesh, self.dtype, planned, staged)

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
