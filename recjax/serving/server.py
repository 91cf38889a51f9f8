"""`recjax serve`: an exported model over HTTP.

    POST /score     a request as `recjax.serving.requests` describes it -> {"step", "scores": {column: [...]}}
    GET  /          what the model takes and gives
    GET  /health    200, or 503 while the server is about to end
    GET  /metrics   for Prometheus

An error is {"error": one paragraph}: status 400 of a request at fault, 404 and 405 of another path or method, 408 of a
request that came too slowly, 413 of one that is too large, 503 (with Retry-After) where as many are under way as may
be, 500 where the model fails. What is no HTTP/1.1 gets 400, 431, 501 or 505, and its connection ends.
"""

# Without `from __future__ import annotations`: FastAPI reads those of handlers, whose types are imported in a function.
import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from recjax.errors import ConfigError, Interrupted, RecjaxError, StoppedError
from recjax.parallel.stopping import handling
from recjax.serving.bodies import BodyReader, RefusedError
from recjax.serving.example_rows import Examples
from recjax.serving.protocol import make_protocol
from recjax.serving.requests import BadRequestError
from recjax.serving.service import OverloadedError, Service, ServiceConfig
from recjax.utils import log

_ANSWERING = 2 / 3  # of the time to end, for what is under way
_IDLE_S = 75  # that a connection may be idle: longer than proxies keep theirs, which would meet a closed one
_CLEAN_UP_S = 3  # for our caller to remove its files, where a thread will not end
_LAST_S = 0.25  # time for requests to come on connections that were there then
_ROUTES = "POST /score, GET /, GET /health and GET /metrics"
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "flatbuffers")


def require() -> None:
    """Raises ConfigError where a package of the extra `serve` is not installed."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"recjax serve needs the package {missing[0].replace('_', '-')}, and that is not installed. Install the "
            "extra `serve` (pip install -c constraints.txt -e '.[serve]')."
        )


def make_app(service: Service) -> Any:
    """The ASGI application of a service, a `fastapi.FastAPI`; the service runs as long as the application."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with service.running():
            yield

    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(title="recjax", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    bodies = BodyReader(service.config.most_bytes, service.config.read_s)

    def answer(status: int, content: bytes | str, began: float) -> Response:
        service.answered += 1
        service.metrics.requests.labels(status).inc()
        service.metrics.seconds.observe(time.perf_counter() - began)
        headers = {"Retry-After": "1"} if status == 503 else {}
        if service.draining or status == 408:  # whose rest is not waited for
            headers["Connection"] = "close"
        if isinstance(content, bytes):
            return Response(content, status, headers, media_type="application/json")
        return JSONResponse({"error": content}, status, headers)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}. There are {_ROUTES}."
        return JSONResponse({"error": text}, error.status_code, error.headers)

    @app.post("/score")
    async def score(request: Request) -> Response:
        began = time.perf_counter()
        try:
            async with bodies.read_text(request) as body:
                with service.admitted():
                    return answer(200, await service.score(body), began)
        except OverloadedError as error:
            return answer(503, str(error), began)
        except BadRequestError as error:
            return answer(400, str(error), began)
        except RefusedError as error:
            return answer(error.status, str(error), began)
        except RecjaxError as error:
            return answer(500, str(error), began)
        except asyncio.CancelledError:  # by uvicorn, where the time to end is over
            return answer(503, "the server ends, and its time for what is under way is over.", began)

    @app.get("/")
    async def about() -> JSONResponse:
        return JSONResponse(service.about)

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ending" if service.draining else "ok"}, 503 if service.draining else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        text, kind = service.metrics_text()
        return Response(text, media_type=kind)

    return app


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; ConfigError if it cannot."""
    if not 0 <= port < 2**16:  # which getaddrinfo would take for another one
        raise ConfigError(f"--port {port}: ports are 0 (any that is free) to 65535.")
    made = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError as error:
        if made is not None:
            made.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port (0: any that is free), "
            "or another --host."
        ) from None
    return made


def serve(service: Service, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Answers requests until SIGINT or SIGTERM; then it takes no more, and answers those that are under way.

    Args:
      service: the service.
      listener: see `listening`; closed at the end.
      ready: called with the server's URL when it answers.

    Raises:
      Interrupted, StoppedError: by the signal, always.
    """
    import uvicorn

    def count(status: int) -> None:
        service.metrics.requests.labels(status).inc()

    config = uvicorn.Config(
        make_app(service),
        http=make_protocol(service.config.read_s, service.config.connections, count),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(_ANSWERING * service.config.stop_s),
        timeout_keep_alive=_IDLE_S,
    )
    host, port = listener.getsockname()[:2]
    heard: list[int] = []
    timers: list[threading.Timer] = []

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            """Leaves signals alone: uvicorn would end the process by the signal itself, before we have cleaned up."""
            yield

        async def shutdown(self, sockets: Any = None) -> None:
            timers.append(_end_process_in(service.config.stop_s, heard[0] if heard else signal.SIGTERM))
            for each in self.servers:
                each.close()
            await asyncio.sleep(_LAST_S)  # uvicorn would close what was accepted and has not been read yet
            await super().shutdown(sockets)

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    server = Server(config)

    def handle(number: int, frame: object) -> None:
        heard.append(number)
        service.draining, server.should_exit = True, True
        server.force_exit = heard.count(signal.SIGINT) > 1

    with handling((signal.SIGINT, signal.SIGTERM), handle):
        server.run(sockets=[listener])
    if service.join_threads(0.5):
        for timer in timers:
            timer.cancel()
    elif heard:  # the interpreter would wait for them, and their requests were answered
        _end_process_in(_CLEAN_UP_S, heard[0])
    left = f"; {service.under_way} were not" if service.under_way else ""
    name = signal.Signals(heard[0]).name if heard else "itself"
    text = f"stopped by {name}: {service.answered:,} requests were answered{left}."
    raise Interrupted(text) if heard[:1] == [signal.SIGINT] else StoppedError(text)


def _end_process_in(seconds: float, number: int) -> threading.Timer:
    """Ends the process then with the status of a signal, unless it has ended or the timer, which runs, is cancelled."""

    def end() -> None:
        log.info("a thread does not end, so the process ends without it")
        os._exit(128 + number)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def opened(folder: Path, config: ServiceConfig) -> tuple[Service, dict[str, Any]]:
    """A service for an export, with its programs compiled; and an example of a request, which it has tried once."""
    service = Service(folder, config)
    service.scorer.warm_up()
    example = Examples(service).request(np.random.default_rng(0), min(2, config.most_candidates))
    try:
        service.answer_now(json.dumps(example).encode())
    except BadRequestError as error:  # its values are drawn, and may not keep to the conditions of the data
        log.info(f"the example is refused, so change its values: {error}")
    return service, example
