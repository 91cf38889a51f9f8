"""`recjax serve`: an exported model over HTTP.

    POST /score     a request as `recjax.serving.requests` describes it -> {"step", "scores": {column: [...]}}
    GET  /          what the model takes and gives
    GET  /health    200, or 503 while the server is about to end
    GET  /metrics   for Prometheus

An error is {"error": one paragraph}: status 400 of a request at fault, 404 and 405 of another path or method, 408 of a
request that came too slowly, 413 of one that is too large, 503 (with Retry-After) where as many are under way as may
be, 500 where the model fails.
"""

# Without `from __future__ import annotations`: FastAPI reads those of handlers, whose types are imported in a function.
import asyncio
import contextlib
import importlib.util
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from recjax.errors import ConfigError, Interrupted, RecjaxError, StoppedError
from recjax.parallel.stopping import handling
from recjax.serving.example_rows import Examples
from recjax.serving.requests import BadRequestError
from recjax.serving.service import OverloadedError, Service, ServiceConfig

_STOP_S = 30  # time for what is under way, once the server is asked to end
_IDLE_S = 75  # that a connection may be idle: longer than proxies keep theirs, which would meet a closed one
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

    def answer(status: int, content: bytes | str, began: float) -> Response:
        service.answered += 1
        service.metrics.requests.labels(status).inc()
        service.metrics.seconds.observe(time.perf_counter() - began)
        headers = {"Retry-After": "1"} if status == 503 else {}
        if service.draining:
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
            with service.admitted():
                body = await _body(request, service.config)
                return answer(200, await service.score(body), began)
        except OverloadedError:
            with contextlib.suppress(_RefusedError):  # not read to the end, the client might not see the answer
                await _body(request, service.config, keep=False)
            text = f"{service.config.queue} requests are under way, and no more are taken. Try again in a second."
            return answer(503, text, began)
        except BadRequestError as error:
            return answer(400, str(error), began)
        except _RefusedError as error:
            return answer(error.status, str(error), began)
        except RecjaxError as error:
            return answer(500, str(error), began)

    @app.get("/")
    async def about() -> JSONResponse:
        return JSONResponse(service.about)

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ending" if service.draining else "ok"}, 503 if service.draining else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        text, kind = service.metrics.text()
        return Response(text, media_type=kind)

    return app


class _RefusedError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def _body(request: Any, config: ServiceConfig, keep: bool = True) -> bytes:
    """The text of a request; `keep` it or not, it is read to its end, so that the client reads our answer.

    Raises:
      _RefusedError: it is too large, of which no more than may be is kept; or comes too slowly; or not whole.
    """
    from starlette.requests import ClientDisconnect

    parts, size = [], 0
    try:
        async with asyncio.timeout(config.read_s):
            async for part in request.stream():
                size += len(part)
                if keep and size <= config.most_bytes:
                    parts.append(part)
    except TimeoutError:
        raise _RefusedError(408, f"the request did not come within {config.read_s:g} s. Send it faster.") from None
    except ClientDisconnect:
        raise _RefusedError(400, "the request broke off.") from None
    if size > config.most_bytes:
        text = f"the request has {size:,} bytes, and {config.most_bytes:,} are the most. Split it."
        raise _RefusedError(413, text)
    return b"".join(parts)


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

    config = uvicorn.Config(
        make_app(service),
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_STOP_S,
        timeout_keep_alive=_IDLE_S,
    )
    host, port = listener.getsockname()[:2]
    heard: list[int] = []

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            """Leaves signals alone: uvicorn would end the process by the signal itself, before we have cleaned up."""
            yield

        async def shutdown(self, sockets: Any = None) -> None:
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
    left = f"; {service.under_way} were not" if service.under_way else ""
    name = signal.Signals(heard[0]).name if heard else "itself"
    text = f"stopped by {name}: {service.answered:,} requests were answered{left}."
    raise Interrupted(text) if heard[:1] == [signal.SIGINT] else StoppedError(text)


def opened(folder: Path, config: ServiceConfig) -> tuple[Service, dict[str, Any]]:
    """A service for an export, with its programs compiled; and an example of a request, which it has answered once."""
    service = Service(folder, config)
    service.scorer.warm_up()
    example = Examples(service).request(np.random.default_rng(0), min(2, config.most_candidates))
    service.answer_now(json.dumps(example).encode())
    return service, example
