"""Python imports this first in every process that tests start: what JAX compiles there goes into the tests' cache.

It imports nothing that the process would not import itself: tests look at what a command loads.
"""

import importlib.util
import sys
from typing import Any

# What `support.compile_cache` does to modules of JAX when they have been imported.
_CHANGES = {
    "jax._src.compilation_cache": "install",
    "jax._src.compiler": "share",
    "jax._src.cache_key": "leave_out_devices",
}


class _WhenJaxIsImported:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Adds to the import of these modules, and leaves with the last of them."""
        change = _CHANGES.pop(name, None)
        if change is None:
            return None
        if not _CHANGES:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            from support import compile_cache

            getattr(compile_cache, change)(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WhenJaxIsImported())
