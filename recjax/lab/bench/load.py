"""Load on a service, to measure how long answers take: requests come at random times, whether or not others wait.

Arrivals are a Poisson process of a given rate (open loop), and a request's time runs from when it was due, so that a
service which stands still for a while pays for all that came meanwhile. A client that sends the next request after an
answer would not notice (coordinated omission; G. Tene, "How NOT to measure latency", 2013).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from recjax.errors import ConfigError, RecjaxError
from recjax.serving.example_rows import Examples
from recjax.serving.requests import BadRequestError
from recjax.serving.server import opened
from recjax.serving.service import OverloadedError, Service, ServiceConfig
from recjax.utils import garbage
from recjax.utils.text import aligned

Post = Callable[[bytes], Awaitable[int]]  # gives the HTTP status
_BODIES = 64  # different requests
_WARM_UP_S = 1.0
_LATEST_S = 30.0  # after the last request was due


@dataclasses.dataclass(frozen=True)
class LoadConfig:
    """A load to measure under.

    Attributes:
      qps: rates of requests, one after the other.
      candidates: of a request, likewise.
      seconds: of each measurement; a warm-up of a second at the same rate comes before it.
      http: also over HTTP, to a server in a process of its own.
      seed: of arrivals and requests.
    """

    qps: Sequence[float] = (20, 50, 100)
    candidates: Sequence[int] = (1, 64, 512)
    seconds: float = 10.0
    http: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not all(0 < rate <= 100_000 for rate in self.qps) or not 0 < self.seconds <= 3600:
            raise ConfigError("--qps takes rates above 0 and --seconds up to an hour.")
        if not all(count >= 1 for count in self.candidates):
            raise ConfigError("--candidates takes numbers from 1 on.")


def measure(folder: Path, load: LoadConfig, config: ServiceConfig) -> list[dict[str, Any]]:
    """Measures a service of an export.

    Returns:
      A line for each way, number of candidates and rate: {"way", "candidates", "qps" (asked for), "sent", "answered",
      "refused", "failed", "answered_per_s", "p50_ms", "p95_ms", "p99_ms" (of what was answered; None if nothing was),
      "late_ms"}. The last is how late the worst request was sent: much of it means that the machine is too busy to
      keep the rate.
    """
    service, _ = opened(folder, config)
    found = asyncio.run(_in_process(service, load))
    return found + (_over_http(folder, service, load, config) if load.http else [])


async def _in_process(service: Service, load: LoadConfig) -> list[dict[str, Any]]:
    async def post(body: bytes) -> int:
        try:
            with service.admitted():
                await service.score(body)
                return 200
        except OverloadedError:
            return 503
        except BadRequestError:
            return 400

    async with service.running():
        return await _rates("in process", post, service, load)


def _over_http(folder: Path, service: Service, load: LoadConfig, config: ServiceConfig) -> list[dict[str, Any]]:
    options = ["--port", "0", "--json", "--queue", str(config.queue), "--window-ms", str(config.window_ms)]
    command = [sys.executable, "-m", "recjax", "serve", str(folder), *options]
    command += ["--most-candidates", str(config.most_candidates), "--cache-mib", str(config.cache_bytes / 2**20)]
    command += ["--pooled-mib", str(config.pooled_bytes / 2**20)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RecjaxError("the server did not start. Try it by hand: " + " ".join(command[1:]))
            url = json.loads(line)["url"]
            return asyncio.run(_by_http(url.removeprefix("http://"), service, load))
        finally:
            process.send_signal(signal.SIGTERM)


async def _by_http(address: str, service: Service, load: LoadConfig) -> list[dict[str, Any]]:
    async with Http(address) as client:
        with garbage.left_alone():
            return await _rates("HTTP", client.post, service, load)


class Http:
    """A client that keeps its connections, and opens one more where none is free."""

    def __init__(self, address: str) -> None:
        """Connects to a server at HOST:PORT; to be opened by `async with`."""
        self._address = address
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for _, writer in self._free:
            await _close(writer)

    async def post(self, body: bytes, path: str = "/score") -> int:
        """Posts a request, reads the answer to its end, and gives its status."""
        while self._free:  # the server may have closed one that nobody used
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                reader, writer = self._free.pop()
                return await self._exchange(reader, writer, body, path)
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        return await self._exchange(reader, writer, body, path)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, path: str
    ) -> int:
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address}\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = answer.partition("content-length: ")[2].partition("\r\n")[0]
            await reader.readexactly(int(length))
        except BaseException:
            await _close(writer)
            raise
        if "connection: close" in answer:
            await _close(writer)
        else:
            self._free.append((reader, writer))
        return int(answer.split()[1])


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _rates(way: str, post: Post, service: Service, load: LoadConfig) -> list[dict[str, Any]]:
    drawn, lines = Examples(service), []
    for candidates in load.candidates:
        rng = np.random.default_rng(load.seed)
        bodies = [json.dumps(drawn.request(rng, candidates)).encode() for _ in range(_BODIES)]
        for qps in load.qps:
            await offer(post, bodies, qps, _WARM_UP_S, rng)
            found = await offer(post, bodies, qps, load.seconds, rng)
            lines.append({"way": way, "candidates": candidates, "qps": qps, **found})
    return lines


async def offer(
    post: Post, bodies: Sequence[bytes], qps: float, seconds: float, rng: np.random.Generator
) -> dict[str, Any]:
    """Sends requests at this rate on average for so long, and waits for all answers; see `measure`."""
    gaps = rng.exponential(1 / qps, size=int(qps * seconds * 2) + 50)
    due = np.cumsum(gaps)
    due = due[due < seconds]
    times: list[float] = []
    statuses: collections.Counter[int] = collections.Counter()
    late, began = 0.0, time.perf_counter()

    async def one(body: bytes, due_s: float) -> None:
        try:
            status = await post(body)
        except (OSError, EOFError, ValueError, RecjaxError):
            status = 0
        statuses[status] += 1
        if status == 200:
            times.append(time.perf_counter() - began - due_s)

    tasks = set()
    for number, due_s in enumerate(due.tolist()):
        wait = due_s - (time.perf_counter() - began)
        if wait > 0:
            await asyncio.sleep(wait)
        late = max(late, time.perf_counter() - began - due_s)
        tasks.add(asyncio.create_task(one(bodies[number % len(bodies)], due_s)))
    left: set[asyncio.Task[None]] = set()
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=_LATEST_S)
    took = time.perf_counter() - began
    for task in left:
        task.cancel()
    quantiles = np.percentile(times, [50, 95, 99]) * 1e3 if times else [None] * 3
    return {
        "sent": len(due),
        "answered": len(times),
        "refused": statuses[503],
        "failed": len(due) - len(times) - statuses[503],
        "answered_per_s": len(times) / max(took, seconds),
        **{
            name: None if x is None else float(x)
            for name, x in zip(("p50_ms", "p95_ms", "p99_ms"), quantiles, strict=True)
        },
        "late_ms": late * 1e3,
    }


def to_text(result: dict[str, Any]) -> str:
    """The lines of `measure` as a table."""
    names = ("way", "candidates", "qps", "answered_per_s", "refused", "failed", "p50_ms", "p95_ms", "p99_ms", "late_ms")
    rows = [[_shown(line[name]) for name in names] for line in result["serve"]]
    others = result["others_share"]
    busy = "" if others is None else f"; others took {others:.0%} of this machine's cores meanwhile"
    lines = aligned([names, *rows], left=())
    return "\n".join([*lines, f"Poisson arrivals, open loop, {result['seconds']:g} s each{busy}"])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value is None else f"{value:.4g}"
