"""HTTP/1.1 as `recjax serve` speaks it: uvicorn's, with limits of time and number that uvicorn does not have.

A connection that has sent a part of a head, has left an answered request unfinished, or does not read its answer, is
closed after a time; and beyond a number of connections a new one is refused. What uvicorn would read in one way and a
proxy before it in another (two lengths of one body, another version of HTTP) is refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any


def make_protocol(seconds: float, connections: int, count: Callable[[int], None]) -> type[asyncio.Protocol]:
    """The class of a connection, for `uvicorn.Config(http=...)`.

    Args:
      seconds: time for a client to send the head of a request, and to read an answer.
      connections: that may be open at once.
      count: called with the status of each answer that is given here, before there is a request.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class StrictConnection(h11.Connection):
        def next_event(self) -> Any:
            event = super().next_event()
            if isinstance(event, h11.Request):
                names = {name for name, _ in event.headers}
                version = event.http_version.decode()
                if version not in ("1.0", "1.1"):
                    raise h11.RemoteProtocolError(f"its version is HTTP/{version}", 505)
                if b"transfer-encoding" in names and (b"content-length" in names or version == "1.0"):
                    raise h11.RemoteProtocolError("Transfer-Encoding stands beside Content-Length, or in HTTP/1.0")
            return event

    class Protocol(H11Protocol):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.conn = StrictConnection(h11.SERVER)
            self._until_read: asyncio.TimerHandle | None = None  # what we wait for must have come
            self._until_written: asyncio.TimerHandle | None = None  # what we sent must have been taken

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # so that `pause_writing` hears of every byte that is not taken
            if len(self.connections) > connections:
                self._refuse(503, f"{connections} connections are open, and no more are taken. Try again in a second.")
            else:
                self._watch(head=True)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch(head=True)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch(head=bool(self.conn.trailing_data[0]))  # else uvicorn's time for an idle connection runs

        def _watch(self, head: bool) -> None:
            """Has the time run while a `head`, or the rest of a body that was answered already, is to come."""
            answered = self.cycle is not None and self.cycle.response_complete
            waits = {h11.IDLE: head, h11.SEND_BODY: answered}.get(self.conn.their_state, False)
            if not waits or self.transport.is_closing():
                self._stop_watching()
            elif self._until_read is None:
                self._until_read = self.loop.call_later(seconds, self._end_late)

        def _stop_watching(self) -> None:
            if self._until_read is not None:
                self._until_read.cancel()
                self._until_read = None

        def _end_late(self) -> None:
            self._until_read = None
            if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
                self._refuse(408, f"the head of the request did not come within {seconds:g} s. Send it faster.")
            else:
                self.transport.close()

        def send_400_response(self, msg: str) -> None:  # which uvicorn calls while it handles the error
            error = sys.exception()
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is on its way
                self.transport.close()
                return
            status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
            self._refuse(status, f"this is no request of HTTP/1.1: {str(error or msg)[:200]}. Correct the client.")

        def _refuse(self, status: int, text: str) -> None:
            body = json.dumps({"error": text}).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
            headers += [("connection", "close"), *([("retry-after", "1")] if status == 503 else [])]
            answer = h11.Response(status_code=status, headers=headers, reason=b"")
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()
            count(status)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._until_written = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._until_written is not None:
                self._until_written.cancel()
                self._until_written = None

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_watching()
            self.resume_writing()

    return Protocol
