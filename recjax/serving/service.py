"""Scores requests as they come: a bounded number at a time, several together, and counted for Prometheus."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from recjax.errors import ConfigError, DataError, TrainingError
from recjax.serving import loader, outputs
from recjax.serving.requests import BadRequestError, RequestReader, Scorable, columns_of
from recjax.serving.scoring import BATCHES, Scorer
from recjax.train.metrics import drift
from recjax.utils import garbage

_Waiting = tuple[Scorable, "asyncio.Future[np.ndarray]"]  # with what becomes its logits
_THREADS = 2  # that read requests and write answers
_CLOSE_S = 1.0  # time for batches that are under way when the service closes


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """Settings of a service: how it takes requests.

    Attributes:
      most_candidates: of a request, and that are scored at once.
      queue: requests that may be under way, of those that have come whole; further ones are refused.
      connections: that may be open, also of clients that have not sent a request yet; further ones are refused.
      window_ms: time that a request waits for others which are under way, to be scored together.
      most_bytes: of a request's text.
      read_s: time that a client may take to send it (its head, and its body), and that reading its rows may take.
      stop_s: time after a signal to end, after which the process has ended, whatever is under way.
      cache_bytes: of memory for the rows of each table that stays on disk.
      pooled_bytes: of memory for its pooled bags; 0: none are kept.
    """

    most_candidates: int = 512
    queue: int = 128
    connections: int = 512
    window_ms: float = 1.0
    most_bytes: int = 4 << 20
    read_s: float = 10.0
    stop_s: float = 30.0
    cache_bytes: int = 64 << 20
    pooled_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("most_candidates", "queue", "most_bytes", "cache_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 1 or more.")
        if self.pooled_bytes < 0:
            raise ConfigError(f"pooled_bytes is {self.pooled_bytes}; give 0 or more.")
        if not 0 <= self.window_ms < 10_000 or not all(0 < s < 10_000 for s in (self.read_s, self.stop_s)):
            values = f"window_ms={self.window_ms}, read_s={self.read_s}, stop_s={self.stop_s}"
            raise ConfigError(f"{values}: give less than 10,000, and more than 0.")
        if self.connections <= self.queue:
            raise ConfigError(
                f"queue is {self.queue} and connections {self.connections}: a connection has one request at a time, "
                "and some wait for none. Give more connections than requests."
            )


class OverloadedError(Exception):
    """A request that is refused, as too many are under way or take too long; the message is for its sender."""


class Metrics:
    """Counters of a service, for Prometheus."""

    def __init__(self) -> None:
        """Everything at 0."""
        import prometheus_client as client

        self.registry = client.CollectorRegistry()
        here: dict[str, Any] = {"registry": self.registry}
        client.ProcessCollector(**here)
        self.requests = client.Counter(
            "recjax_requests", "Requests that were answered, by HTTP status", ["status"], **here
        )
        self.candidates = client.Counter("recjax_candidates", "Candidates that were scored", **here)
        self.in_flight = client.Gauge("recjax_requests_in_flight", "Requests that are under way", **here)
        self.programs = client.Gauge("recjax_programs", "Shapes that programs were compiled for", **here)
        self.rows_cached = client.Gauge("recjax_rows_cached", "Rows on disk that the cache had", ["table"], **here)
        self.rows_read = client.Gauge("recjax_rows_read", "Rows that were read from disk", ["table"], **here)
        self.bags_cached = client.Gauge("recjax_bags_cached", "Bags that the cache had pooled", ["table"], **here)
        self.bags_pooled = client.Gauge("recjax_bags_pooled", "Bags that were pooled", ["table"], **here)
        self.drift = {
            what: client.Gauge(f"recjax_feature_{what}", text, ["feature"], **here)
            for what, text in (
                ("psi", "Population stability index of the values scored, to those that trained"),
                ("unknown", "Share of the values scored that have no row of their own"),
                ("missing", "Share of the values scored that are missing"),
            )
        }
        times = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
        self.seconds = client.Histogram(
            "recjax_request_seconds", "Time from a request's arrival to its answer", buckets=times, **here
        )
        self.model_seconds = client.Histogram("recjax_model_seconds", "Time of the model", buckets=times, **here)
        counts = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
        self.batches = client.Histogram("recjax_batch_requests", "Requests scored together", buckets=counts, **here)

    def text(self) -> tuple[bytes, str]:
        """All of it in Prometheus's format, and that format's content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class Service:
    """Scores requests to one exported model. Belongs to one event loop, in which `running` is open.

    Attributes:
      config: how requests are taken.
      reader: of requests.
      metrics: what is counted.
      draining: whether it is about to end; it still scores.
      answered: requests that were answered, also those that were refused.
      about: what the model is, as JSON values.
      signature: of the model.
      source: what the export holds of its data; None: nothing.
      scorer: what runs the model.
    """

    def __init__(self, folder: Path, config: ServiceConfig) -> None:
        """Opens an export.

        Raises:
          ConfigError: it is none, or its rows cannot come as JSON.
          DataError: it is damaged.
        """
        try:
            model = loader.load(folder, cache_bytes=config.cache_bytes, pooled_bytes=config.pooled_bytes)
        except loader.DamagedError as error:
            raise DataError(str(error)) from error
        except loader.ExportError as error:
            raise ConfigError(str(error)) from error
        columns, self.source = columns_of(folder, model.signature["inputs"])
        self.config, self.metrics, self.draining, self.answered = config, Metrics(), False, 0
        self._stores, self._pooled = model.stores, model.pooled
        self.reader = RequestReader(columns, model.signature["inputs"], config.most_candidates)
        self.scorer = Scorer(model, config.most_candidates)
        self.signature, described = model.signature, model.signature["outputs"]
        self._tasks, self._classes = outputs.tasks_from(described), described["classes"]
        self._step = model.manifest["model"]["step"]
        self.about = {
            "model": model.manifest["model"],
            "program": model.manifest["program"]["format"],
            "columns": list(self.reader.columns),
            "user": list(self.reader.user),
            "scores": list(outputs.names(self._tasks)),
            "most_candidates": config.most_candidates,
        }
        then = drift.read_profile(folder)
        self._seen = None if then is None else drift.SeenValues(then, model.signature["inputs"]["dense"]["columns"])
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._under_way = self._in_batches = 0
        self._threads: list[threading.Thread] = []
        self._reading, self._scoring, self._finishing = map(self._make_pool, (_THREADS, 1, 1))

    def metrics_text(self) -> tuple[bytes, str]:
        """All that is counted, as `Metrics.text` gives it."""
        for feature, shares in (self._seen.shares() if self._seen is not None else {}).items():
            for what, share in shares.items():
                self.metrics.drift[what].labels(feature).set(share)
        return self.metrics.text()

    @property
    def under_way(self) -> int:
        """Requests that have come and are not answered."""
        return self._under_way

    def _make_pool(self, threads: int) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(threads, "recjax", lambda: self._threads.append(threading.current_thread()))

    def join_threads(self, seconds: float) -> bool:
        """Waits for the threads of a service that has closed, so long at most; returns whether all have ended."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Scores while the context is open; at its end all that has come is answered, if that takes no longer than 1 s.

        Threads are not waited for: see `join_threads`.
        """
        self._wake, self._room = asyncio.Event(), asyncio.Semaphore(BATCHES)
        self._closing = False
        task = asyncio.create_task(self._score_batches())
        try:
            with garbage.left_alone():
                yield self
        finally:
            self._closing = True
            self._wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(task, _CLOSE_S)
            for pool in (self._reading, self._scoring, self._finishing):
                pool.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request as under way while the context is open; OverloadedError if there are too many."""
        if self._under_way >= self.config.queue:
            raise OverloadedError(
                f"{self.config.queue} requests are under way, and no more are taken. Try again in a second."
            )
        self._under_way += 1
        self.metrics.in_flight.set(self._under_way)
        try:
            yield
        finally:
            self._under_way -= 1
            self.metrics.in_flight.set(self._under_way)

    async def score(self, body: bytes) -> bytes:
        """The answer to a request that was admitted, as JSON.

        Raises:
          BadRequestError: it is at fault.
          OverloadedError: its rows were not read in time; the thread that reads them goes on to their end.
          TrainingError: a logit is not finite.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.config.read_s):
                request = await loop.run_in_executor(self._reading, self.reader.read, body)
        except TimeoutError:
            text = f"the request's rows could not be read within {self.config.read_s:g} s. Send fewer, or try again."
            raise OverloadedError(text) from None
        logits: asyncio.Future[np.ndarray] = loop.create_future()
        self._waiting.append((request, logits))
        self._wake.set()
        return await loop.run_in_executor(self._reading, self._answer, request, await logits)

    def answer_now(self, body: bytes) -> bytes:
        """`score` without a queue, in this thread: to try a request."""
        request = self.reader.read(body)
        (logits,) = self.scorer([request])
        return self._answer(request, logits)

    def _answer(self, request: Scorable, logits: np.ndarray) -> bytes:
        for at, what in outputs.find_overflows(
            logits,
            request.dense,
            self.signature["inputs"]["dense"]["columns"],
            np.arange(len(logits)) if request.scored is None else np.zeros(len(logits), np.int64),
        ).items():
            raise BadRequestError(f"candidates[{at}]: {what}. Correct the value.")
        outputs.check(logits, np.arange(len(logits)))
        if self._seen is not None:
            self._seen.add(request.dense, request.bags)
        found = outputs.columns(self._tasks, logits, self._classes)
        return json.dumps({"step": self._step, "scores": found}).encode()

    async def _score_batches(self) -> None:
        """Takes what waits, and scores it together, until the service closes and nothing waits."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as finishing:
            while True:
                await self._wake.wait()
                if not self._waiting:
                    if self._closing:
                        return
                    self._wake.clear()
                    continue
                to_come = self._under_way - self._in_batches > len(self._waiting)
                if to_come and self.config.window_ms and not self._full():
                    await asyncio.sleep(self.config.window_ms / 1000)
                await self._room.acquire()
                batch = self._taken()
                self._in_batches += len(batch)
                started = time.perf_counter()
                try:
                    requests = [request for request, _ in batch]
                    finish = await loop.run_in_executor(self._scoring, self.scorer.start, requests)
                except Exception as error:  # of the model, or of a table on disk
                    await self._score_one_by_one(batch, error)
                else:
                    finishing.create_task(self._finish(batch, finish, started))

    async def _finish(self, batch: list[_Waiting], finish: Callable[[], list[np.ndarray]], started: float) -> None:
        """Gives the requests of a batch that was started their scores."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._finishing, finish)
        except Exception as error:
            await self._score_one_by_one(batch, error)
            return
        self._count(batch, started)
        for (_, logits), scored in zip(batch, found, strict=True):
            if not logits.done():  # its client may have left
                logits.set_result(scored)
        self._leave(batch)

    def _leave(self, batch: list[_Waiting]) -> None:
        self._in_batches -= len(batch)
        self._room.release()

    def _count(self, batch: list[_Waiting], started: float) -> None:
        self.metrics.model_seconds.observe(time.perf_counter() - started)
        self.metrics.batches.observe(len(batch))
        self.metrics.candidates.inc(sum(request.size for request, _ in batch))
        self.metrics.programs.set(self.scorer.compiled)
        for table in self._stores.files if self._stores else ():
            self.metrics.rows_cached.labels(table).set(self._stores.hits[table])
            self.metrics.rows_read.labels(table).set(self._stores.misses[table])
        for table, bags in self._pooled.items():
            self.metrics.bags_cached.labels(table).set(bags.hits)
            self.metrics.bags_pooled.labels(table).set(bags.misses)

    async def _score_one_by_one(self, batch: list[_Waiting], error: Exception) -> None:
        """Scores requests one by one after an error in a batch of them; those that fail get the error."""
        loop = asyncio.get_running_loop()
        for request, logits in batch:
            try:
                if len(batch) == 1:
                    raise error
                (found,) = await loop.run_in_executor(self._scoring, self.scorer, [request])
                if not logits.done():
                    logits.set_result(found)
            except Exception as own:
                if not logits.done():
                    logits.set_exception(TrainingError(f"the model failed: {' '.join(str(own).split())[:300]}"))
        self._leave(batch)

    def _full(self) -> bool:
        return sum(request.size for request, _ in self._waiting) >= self.scorer.most

    def _taken(self) -> list[_Waiting]:
        """The requests that have waited longest, as many as fit."""
        taken, room = [], self.scorer.most
        while self._waiting and self._waiting[0][0].size <= room:
            room -= self._waiting[0][0].size
            taken.append(self._waiting.popleft())
        return taken
