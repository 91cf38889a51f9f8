"""Python imports this first in every process that tests start: what JAX compiles there goes into the tests' cache.

It imports nothing that the process would not import itself: tests look at what a command loads.
"""

import importlib.util
import sys
from typing import Any


class _WhenJaxIsImported:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Adds to the import of the one module, and leaves."""
        if name != "jax._src.compilation_cache":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            from support import compile_cache

            compile_cache.install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WhenJaxIsImported())
