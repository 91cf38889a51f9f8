"""Object storage for tests: what gcsfs would be, in this process's memory."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Bucket(MemoryFileSystem):
    """The `gs` file system of fsspec, in memory; counts what is read.

    Attributes:
      opened: paths that were opened to read, in their order.
      refuse: an error to raise instead of opening anything.
    """

    protocol = ("gcs", "gs")
    store: dict[str, Any] = {}
    pseudo_dirs: list[str] = [""]
    opened: list[str] = []
    refuse: Exception | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        bare = path.removeprefix("gs://").removeprefix("gcs://").strip("/")
        return f"/{bare}" if bare else ""

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if (refuse := self.refuse) is not None:
            raise refuse
        if mode == "rb":
            self.opened.append(path)
        return super()._open(path, mode, **more)


def install() -> type[Bucket]:
    """Makes gs:// paths lie in memory, from now on, in an empty bucket."""
    Bucket.store.clear()
    Bucket.pseudo_dirs[:] = [""]
    Bucket.opened.clear()
    Bucket.refuse = None
    for name in ("gs", "gcs"):
        fsspec.register_implementation(name, Bucket, clobber=True)
    return Bucket
