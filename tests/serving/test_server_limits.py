"""`recjax serve` on a real socket: limits of time, number and memory, and what is no HTTP/1.1; and its end."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys
import time

import pytest
from support import forked
from support.serving import export_shop
from support.shop import rows

from recjax.errors import ConfigError
from recjax.serving.bodies import BodyReader, RefusedError
from recjax.serving.service import ServiceConfig

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
pytest.importorskip("flatbuffers", reason="the extra `serve` is not installed")
# Full, as all that needs an extra.
pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

READ_S = 1.0
PATIENCE_S = READ_S + 4  # for a busy machine
CONFIG = f"most_candidates=8, queue=4, connections=40, read_s={READ_S}"
BODY = json.dumps({"candidates": [rows()[0]]}).encode()

# A server of an export; BEFORE may change the service. A signal ends it as it ends the command.
PROGRAM = """
import sys, pathlib, threading, time
from recjax.serving import server
from recjax.serving.service import ServiceConfig
service, _ = server.opened(pathlib.Path(sys.argv[1]), ServiceConfig({config}))
{before}
try:
    server.serve(service, server.listening("127.0.0.1", 0), lambda url: print(url, flush=True))
except server.StoppedError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
"""


@contextlib.contextmanager
def started(exported, config=CONFIG, before=""):
    """The process and port of a server; it is killed at the end if it is there."""
    program = PROGRAM.format(config=config, before=before)
    pipes = {"stdout": forked.subprocess.PIPE, "stderr": forked.subprocess.PIPE, "text": True}
    with forked.Popen([sys.executable, "-c", program, str(exported)], **pipes) as process:
        try:
            yield process, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def port(exported):
    """One server for all tests; at the end it stops as it should."""
    with started(exported) as (process, port):
        yield port
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 143 and "Traceback" not in err, err


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def head(path="/score", size=None, more=""):
    size = len(BODY) if size is None else size
    return f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {size}\r\n{more}\r\n".encode()


def answer(client):
    """(status, headers, JSON) of what is read until the server closes; status 0 if nothing comes."""
    text = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            text += part
    first, _, body = text.partition(b"\r\n\r\n")
    status = int(first.split()[1]) if text else 0
    return status, first.decode().lower(), json.loads(body) if body else None


def score(port):
    """The status of a good request."""
    with connect(port) as client:
        client.sendall(head(more="Connection: close\r\n") + BODY)
        return answer(client)[0]


def seconds_until_closed(act):
    began = time.monotonic()
    found = act()
    return time.monotonic() - began, found


@pytest.mark.parametrize("sent", [b"", b"POST /score HT", head()[:-2]])
def test_a_connection_without_a_whole_head_ends(port, sent):
    with connect(port) as client:
        client.sendall(sent)
        took, (status, _, text) = seconds_until_closed(lambda: answer(client))
    assert READ_S / 2 < took < PATIENCE_S and status == (408 if sent else 0)
    assert not sent or "the head of the request did not come within 1 s" in text["error"]


def test_bytes_now_and_then_do_not_prolong_a_head(port):
    def drip():
        with contextlib.suppress(ConnectionError):
            for byte in head() * 9:
                client.sendall(bytes([byte]))
                time.sleep(0.1)

    with connect(port) as client:
        client.sendall(head() + BODY)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        time.sleep(2 * READ_S)  # an idle connection may wait longer, until a request begins
        took, _ = seconds_until_closed(drip)
    assert READ_S / 2 < took < PATIENCE_S


def test_the_rest_of_an_answered_request_must_come_in_time(port):
    """A path that is not there is answered at once, whatever its body."""
    with connect(port) as client:
        client.sendall(head("/nothing", 1000) + b"x")
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 3 * PATIENCE_S:
                client.sendall(b"x")
                time.sleep(0.1)
        assert READ_S / 2 < time.monotonic() - began < PATIENCE_S


def test_a_slow_body_is_answered(port):
    with connect(port) as client:
        client.sendall(head() + BODY[:1])
        took, (status, _, text) = seconds_until_closed(lambda: answer(client))
    assert READ_S / 2 < took < PATIENCE_S and status == 408 and "did not come within 1 s" in text["error"]


def test_a_client_that_reads_no_answers_is_cut_off(port):
    ask, sent = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n", 0
    with connect(port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0.3)
        with pytest.raises((TimeoutError, ConnectionError)):  # the buffers of both sides are full
            while sent < 1 << 28:
                sent += client.send(ask * 1000)
        time.sleep(2 * READ_S)
        client.settimeout(PATIENCE_S)
        text = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(1 << 20):
                text += part
    assert text.count(b"HTTP/1.1 200") < sent // len(ask)
    assert score(port) == 200


def test_clients_that_send_slowly_do_not_keep_others_out(port):
    """Seven times as many as requests may be under way."""
    with contextlib.ExitStack() as stack:
        for _ in range(28):
            stack.enter_context(connect(port)).sendall(head() + BODY[:1])
        assert [score(port) for _ in range(5)] == [200] * 5


def test_connections_beyond_the_limit_are_refused_at_once(port):
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connect(port)).sendall(head() + BODY[:1])
        with connect(port) as client:
            took, (status, first, text) = seconds_until_closed(lambda: answer(client))
        assert status == 503 and took < READ_S / 2
        assert "retry-after: 1" in first and "40 connections are open, and no more are taken" in text["error"]
    until = time.monotonic() + PATIENCE_S
    while score(port) != 200:
        assert time.monotonic() < until


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (head(more="Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n", 400, "Transfer-Encoding stands beside"),
        (head().replace(b"1.1", b"3.0"), 505, "its version is HTTP/3.0"),
        (head().replace(b"1.1", b"1.2"), 505, "its version is HTTP/1.2"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "its version is HTTP/2.0"),
        (b"POST /score HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "or in HTTP/1.0"),
        (head(more="Content-Length: 3\r\n") + b"abc", 400, "conflicting Content-Length"),
        (head(size=-1), 400, "bad Content-Length"),
        (head().replace(b"Host: here\r\n", b""), 400, "[Hh]ost"),
        (b"\x16\x03\x01\x02\x00", 400, "illegal request line"),
        (b"GET /" + b"x" * 100_000, 431, "too long|too large"),
    ],
)
def test_what_is_no_plain_http_is_refused_and_closed(port, sent, status, words):
    with connect(port) as client:
        client.sendall(sent)
        found, first, text = answer(client)
    assert found == status and "connection: close" in first
    assert list(text) == ["error"] and re.search(words, text["error"]), text


class Stream:
    """A request whose body comes in parts of 50,000 bytes."""

    def __init__(self, size):
        self._size = size

    async def stream(self):
        for start in range(0, self._size, 50_000):
            yield b"x" * min(50_000, self._size - start)


def test_memory_of_bodies_on_their_way_is_bounded():
    """Large ones are refused while there is no room; small ones never are; and room comes back."""

    async def main():
        bodies = BodyReader(200_000, 10.0)
        async with contextlib.AsyncExitStack() as stack:
            held, status = 0, 0
            while not status:
                try:
                    held += len(await stack.enter_async_context(bodies.read_text(Stream(200_000))))
                except RefusedError as error:
                    status = error.status
            small = [await stack.enter_async_context(bodies.read_text(Stream(60_000))) for _ in range(100)]
            assert status == 503 and set(map(len, small)) == {60_000}
        async with bodies.read_text(Stream(200_000)) as body:
            assert len(body) == 200_000
        with pytest.raises(RefusedError, match=r"has 200,001 bytes, and 200,000 are the most"):
            async with bodies.read_text(Stream(200_001)):
                pass
        return held

    assert 32 * 200_000 <= asyncio.run(main()) <= 50 * 200_000


STUCK = """
plain, model = service.reader.read, service.scorer.start
def read(body):
    return time.sleep(3600) if b"stuck" in body else plain(body)
def start(requests):
    return time.sleep(3600) if requests[0].size == 7 else model(requests)
service.reader.read, service.scorer.start = read, start
"""


def test_threads_that_hang_hold_neither_answers_nor_the_end(exported):
    """One hangs as it reads a request, one as it scores; both are answered, and SIGTERM ends the process in time."""
    many = json.dumps({"candidates": rows()[:7]}).encode()
    with started(exported, f"{CONFIG}, stop_s=9.0", STUCK) as (process, port):
        with connect(port) as client:
            client.sendall(head(size=5, more="Connection: close\r\n") + b"stuck")
            status, _, text = answer(client)
        assert status == 503 and "could not be read within 1 s" in text["error"]
        assert score(port) == 200, "a thread is left to read"
        with connect(port) as client:
            client.settimeout(30)
            client.sendall(head(size=len(many)) + many)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            took, (status, _, text) = seconds_until_closed(lambda: answer(client))
            assert status == 503 and "the server ends" in text["error"] and took < 9
        _, err = process.communicate(timeout=15)
    assert process.returncode == 143 and "Traceback" not in err, err
    assert "stopped by SIGTERM: 3 requests were answered." in err and "a thread does not end" in err


def test_more_requests_than_connections_are_refused():
    with pytest.raises(ConfigError, match="queue is 600 and connections 512: .*Give more connections"):
        ServiceConfig(queue=600)
