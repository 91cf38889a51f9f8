"""Times of the study: how many requests a second a scorer answers, how long they take under load, what a disk gives."""

from __future__ import annotations

import bisect
import collections
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from recjax.lab.studies.sdm.hit_rate import clock_hit_rate
from recjax.lab.studies.sdm.workload import Workload
from recjax.serving.loader import Model
from recjax.serving.on_disk import PooledBags
from recjax.serving.requests import Scorable
from recjax.serving.scoring import BATCHES, Scorer
from recjax.tiers.records import RecordFile
from recjax.tiers.transfers import Transfers
from recjax.utils import garbage

Start = Callable[[Sequence[Scorable]], Callable[[], object]]  # begins to answer requests, and gives what ends it
_QUEUE = 1024  # records asked for at once, to keep the disk busy


class _Batches:
    """Batches of requests that are answered in their order: this thread starts each, and another one ends it."""

    def __init__(self, start: Start, most: int) -> None:
        """Lets at most so many be under way."""
        self._start, self._most = start, most
        self._ends = ThreadPoolExecutor(1, "model")
        self._under_way: collections.deque[Future[float]] = collections.deque()

    def room(self) -> None:
        """Waits until one more may be under way."""
        while len(self._under_way) >= self._most:
            self._under_way.popleft().result()

    def add(self, requests: Sequence[Scorable]) -> Future[float]:
        """Starts one more; the time at which it was answered, by `time.perf_counter`."""
        ended = self._ends.submit(_ended, self._start(requests))
        self._under_way.append(ended)
        return ended

    def close(self) -> None:
        """Waits for all."""
        self._most = 1
        self.room()
        self._ends.shutdown()


def _ended(finish: Callable[[], object]) -> float:
    finish()
    return time.perf_counter()


def closed_loop(
    start: Start, asked: Sequence[Scorable], seconds: float, together: int = 1, batches: int = BATCHES
) -> float:
    """Requests a second, so many together, the next ones as soon as fewer than `batches` are under way."""
    with garbage.left_alone():
        under_way = _Batches(start, batches)
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            first = done % (len(asked) - together + 1)
            under_way.room()
            under_way.add(asked[first : first + together])
            done += together
        under_way.close()
        return done / (time.perf_counter() - began)


def open_loop(
    start: Start, asked: Sequence[Scorable], qps: float, seconds: float, seed: int, together: int = 1
) -> dict[str, float]:
    """Times of requests that come at random times (Poisson), whether or not others wait, and are served in their order.

    Args:
      start: begins to answer one or several, whose answers are waited for while the next ones begin.
      asked: the requests, over and over.
      qps: rate.
      seconds: in which they come; all are answered.
      seed: of their times.
      together: of those that wait at most so many are served at once.

    Returns:
      {"qps", "requests", "together" (on average), "p50_ms", "p95_ms", "p99_ms"}; a time runs from when a request came
      to its answer.
    """
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / qps, max(20, int(qps * seconds)))).tolist()
    ends: list[tuple[int, Future[float]]] = []
    with garbage.left_alone():
        under_way = _Batches(start, BATCHES)
        began, first = time.perf_counter(), 0
        while first < len(due):
            under_way.room()
            now = time.perf_counter() - began
            if due[first] > now:
                time.sleep(due[first] - now)
                now = max(due[first], time.perf_counter() - began)
            last = min(first + together, bisect.bisect_right(due, now, first))
            ends.append((last - first, under_way.add([asked[number % len(asked)] for number in range(first, last)])))
            first = last
        under_way.close()
    answered = np.repeat([end.result() - began for _, end in ends], [count for count, _ in ends])
    p50, p95, p99 = (np.percentile(answered - due, [50, 95, 99]) * 1e3).tolist()
    shown = {"qps": qps, "requests": len(due), "together": len(due) / len(ends)}
    return {**shown, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99}


def records_per_s(files: Sequence[RecordFile], unit: int, seconds: float) -> float:
    """Records a second that random reads of files, opened once more, give; many at once, around the page cache."""
    rng, done, spent, reads = np.random.default_rng(0), 0, 0.0, Transfers()
    opened = [RecordFile(file.path, file.head, reads, unit) for file in files]
    try:
        while spent < seconds:
            for file in opened:
                numbers = rng.integers(0, file.records, _QUEUE)
                began = time.perf_counter()
                file.read(numbers)
                spent += time.perf_counter() - began
                done += _QUEUE
    finally:
        for file in opened:
            file.close()
        reads.close()
    return done / spent


def fill(model: Model, workload: Workload, cache_bytes: int, unit: int, settling: int, pooled_bytes: int = 0) -> None:
    """Gives the tables of a model caches of other sizes, which hold what is asked for most, and some requests' on top.

    Args:
      model: whose tables are on disk.
      workload: that it will be asked for.
      cache_bytes: of each table's rows.
      unit: of reads.
      settling: requests on top.
      pooled_bytes: of each table's bags, if it was loaded with such caches.
    """
    users, stores = workload.users(settling), model.stores
    for name, file in stores.files.items():
        file.close()
        stores.files[name] = RecordFile(file.path, file.head, file.transfers, unit)
    stores.resize(cache_bytes)
    for number, name in enumerate(stores.files):
        presence = workload.presence(number)
        most = np.argsort(-presence)[: min(stores.room[name], int((presence > 0).sum()))]
        for start in reversed(range(0, len(most), 8192)):  # the most frequent last: full sets let the first go
            stores.rows({name: np.sort(most[start : start + 8192])})
    for user in users.tolist():
        ask(model, workload, user)
    for name in model.pooled:
        model.pooled[name] = PooledBags(pooled_bytes)
    if model.pooled:
        scorer = Scorer(model, workload.size.candidates)
        room = pooled_bytes // (4 * workload.size.dim + 4 * workload.size.ids + 300) + 1  # users whose bags fit, about
        most_frequent = range(min(workload.size.users, room, 4 * settling) - 1, -1, -1)  # the first user last
        for user in [*most_frequent, *users.tolist()]:
            scorer([workload.request(user)])
    reset(model)


def ask(model: Model, workload: Workload, user: int) -> None:
    """Asks the caches for the rows of a user, without the model."""
    model.stores.rows({name: np.unique(workload.ids[user, number]) for number, name in enumerate(model.stores.files)})


def hit_rates(model: Model, workload: Workload, warm_up: int, requests: int) -> tuple[float, float]:
    """Share of the rows of requests that the caches have, and by the offline curve.

    Args:
      model: whose caches hold something already.
      workload: what it is asked for.
      warm_up: requests that come first: as many as change what the caches hold, so that nothing of how they were
        filled is left.
      requests: that are counted.
    """
    for user in workload.users(warm_up).tolist():
        ask(model, workload, user)
    reset(model)
    for user in workload.users(requests).tolist():
        ask(model, workload, user)
    count = counted(model)
    presences = [workload.presence(number) for number in range(workload.size.tables)]
    rooms = model.stores.room.values()
    expected = sum(clock_hit_rate(q, room) * q.sum() for q, room in zip(presences, rooms, strict=True))
    return count["hits"] / (count["hits"] + count["misses"]), expected / sum(q.sum() for q in presences)


def reset(model: Model) -> None:
    """Counts hits and misses from 0."""
    model.stores.forget_counts()
    for bags in model.pooled.values():
        bags.hits = bags.misses = 0


def counted(model: Model) -> dict[str, int]:
    """{"hits", "misses"} of rows, and {"bags_hit", "bags_missed"} of bags."""
    bags = model.pooled.values()
    return {
        "hits": sum(model.stores.hits.values()),
        "misses": sum(model.stores.misses.values()),
        "bags_hit": sum(each.hits for each in bags),
        "bags_missed": sum(each.misses for each in bags),
    }
