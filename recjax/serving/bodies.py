"""Reads the bodies of requests as they come: each within a time, and all together within some memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

_SMALL_BYTES = 64 << 10  # that every body may have, whatever else is on its way
_LARGE = 32  # bodies of the most bytes that there is room for, beyond that


class RefusedError(Exception):
    """A body that is not taken; the message is for its sender.

    Attributes:
      status: of the answer, as HTTP numbers them.
    """

    def __init__(self, status: int, text: str) -> None:
        """A body that is answered with this status and text."""
        super().__init__(text)
        self.status = status


class BodyReader:
    """Reads bodies. Of each the first 64 KiB have room; what is larger shares the room of 32 of the largest."""

    def __init__(self, most_bytes: int, seconds: float) -> None:
        """Takes bodies of at most so many bytes, which have come within so many seconds."""
        self._most, self._seconds = most_bytes, seconds
        self._room = _LARGE * most_bytes

    @contextlib.asynccontextmanager
    async def read_text(self, request: Any) -> AsyncIterator[bytes]:
        """The body of a `starlette.requests.Request`; its bytes count as memory until the context is left.

        A body that is not taken is read to its end all the same, so that the client reads our answer.

        Raises:
          RefusedError: it is too large; or comes too slowly; or not whole; or there is no room.
        """
        from starlette.requests import ClientDisconnect

        parts: list[bytes] = []
        size = shared = 0
        full = False
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    async for part in request.stream():
                        size += len(part)
                        more = max(size - _SMALL_BYTES, 0) - shared
                        full = full or (more > self._room and size <= self._most)
                        if full or size > self._most:
                            parts.clear()
                            continue
                        parts.append(part)
                        shared, self._room = shared + more, self._room - more
            except TimeoutError:
                text = f"the request did not come within {self._seconds:g} s. Send it faster."
                raise RefusedError(408, text) from None
            except ClientDisconnect:
                raise RefusedError(400, "the request broke off.") from None
            if size > self._most:
                text = f"the request has {size:,} bytes, and {self._most:,} are the most. Split it."
                raise RefusedError(413, text)
            if full:
                text = "as many large requests are on their way as there is room for. Try again in a second."
                raise RefusedError(503, text)
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            self._room += shared
