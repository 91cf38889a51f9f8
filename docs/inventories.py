"""Names of other projects that pages link to, and where their documentation has them.

Sphinx's intersphinx reads an inventory of each project, which it would load from the project's site. A build must need
no network, and its warnings are errors, so the few names that pages use stand here, and `write` makes inventories of
them.
A name that is not here is a dead reference, which fails the build: add it.

    python docs/inventories.py --check    # loads the real inventories: are all names still there?
"""

from __future__ import annotations

import sys
import urllib.request
import zlib
from pathlib import Path

# Project -> its site, and name -> (kind, page). A page that ends in # has the name as its anchor.
PROJECTS: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "python": (
        "https://docs.python.org/3/",
        {
            "KeyboardInterrupt": ("exception", "library/exceptions.html#"),
            "logging.getLogger": ("function", "library/logging.html#"),
        },
    ),
    "jax": (
        "https://docs.jax.dev/en/latest/",
        {
            "jax.ShapeDtypeStruct": ("class", "_autosummary/jax.ShapeDtypeStruct.html#"),
            "jax.distributed.initialize": ("function", "_autosummary/jax.distributed.initialize.html#"),
            "jax.ffi.ffi_call": ("function", "_autosummary/jax.ffi.ffi_call.html#"),
            "jax.lax.all_to_all": ("function", "_autosummary/jax.lax.all_to_all.html#"),
            "jax.lax.ragged_all_to_all": ("function", "_autosummary/jax.lax.ragged_all_to_all.html#"),
            "jax.shard_map": ("function", "_autosummary/jax.shard_map.html#"),
        },
    ),
    "flax": (
        "https://flax.readthedocs.io/en/stable/",
        {"flax.nnx.Module": ("class", "api_reference/flax.nnx/module.html#")},
    ),
    "optax": (
        "https://optax.readthedocs.io/en/latest/",
        {"optax.lion": ("function", "api/optimizers.html#")},
    ),
    "orbax": (
        "https://orbax.readthedocs.io/en/latest/",
        {"orbax.checkpoint.CheckpointManager": ("class", "api_reference/checkpoint.checkpoint_manager.html#")},
    ),
}


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Writes an inventory for each project; returns the value of `intersphinx_mapping`."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, (site, names) in PROJECTS.items():
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        lines = []
        for name, (kind, page) in names.items():
            lines.append(f"{name} py:{kind} 1 {page}{'$' if page.endswith('#') else ''} -\n")
        content = head.encode() + zlib.compress("".join(lines).encode())
        file = folder / f"{project}.inv"
        if not file.exists() or file.read_bytes() != content:
            file.write_bytes(content)
        mapping[project] = (site, str(file))
    return mapping


def check() -> list[str]:
    """Returns the names that the projects' own inventories lack, or have on another page; loads these."""
    wrong = []
    for site, names in PROJECTS.values():
        with urllib.request.urlopen(site + "objects.inv") as reply:
            lines = zlib.decompress(reply.read().split(b"zlib.\n", 1)[1]).decode().splitlines()
        pages = {line.split()[0]: line.split()[3].replace("$", "") for line in lines if " py:" in line}
        wrong += [name for name, (_, page) in names.items() if pages.get(name) != page]
    return wrong


if __name__ == "__main__":
    if "--check" not in sys.argv:
        sys.exit(__doc__)
    sys.exit("\n".join(check()) or 0)
