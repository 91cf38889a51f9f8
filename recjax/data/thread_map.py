"""Working ahead in threads without running far ahead."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

_T = TypeVar("_T")
_U = TypeVar("_U")


def ahead(pool: Executor, depth: int, function: Callable[[_T], _U], items: Iterable[_T]) -> Iterator[_U]:
    """`map(function, items)`, in order, in the threads of `pool`.

    Args:
      pool: runs the function.
      depth: results that may wait or be in the making; `items` is read in the caller's thread, no further than that.
      function: raises in the caller's thread what it raises.
      items: read once.
    """
    waiting: collections.deque[Future[_U]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:  # the caller has left
            future.cancel()
