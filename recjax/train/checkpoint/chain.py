"""Chains of checkpoints: a whole one, and increments that are read over it, each over the one before.

An increment is a checkpoint but for tables in tiers, of which it holds the rows that have changed since the checkpoint
before it (`recjax/tiers/written.py`). In its manifest stands, beside what others say,

    "chain": [{"step": 100, "manifest": SHA-256 of its manifest.json, "bytes": of its arrays}, ...]

the whole checkpoint first and then the increments up to the one before. These manifests have the checksums of all other
files, so that nothing else can stand in for what the increment was made after.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recjax.tiers.written import WRITTEN, overlaid
from recjax.train.checkpoint import array_store, manifest, reading
from recjax.train.checkpoint.array_store import Arrays
from recjax.train.checkpoint.manifest import CorruptCheckpointError

Known = dict[int, tuple[dict[str, Any], str]]  # step -> what `reading.verified` has found


@dataclasses.dataclass(frozen=True)
class Link:
    """A checkpoint of a chain.

    Attributes:
      step: of the checkpoint.
      manifest: SHA-256 of its manifest.json, hexadecimal.
      bytes: of its arrays.
    """

    step: int
    manifest: str
    bytes: int


Chain = tuple[Link, ...]  # the whole checkpoint first


def of_content(content: Mapping[str, Any]) -> Chain:
    """Returns the chain that a manifest names, () of a whole checkpoint's; `CorruptCheckpointError` if it is none."""
    kinds = {"step": int, "manifest": str, "bytes": int}
    links = content.get("chain", [])
    try:
        fine = all(type(link[key]) is kind for link in links for key, kind in kinds.items())
        chain = tuple(Link(**link) for link in links)
    except (TypeError, KeyError) as error:
        raise CorruptCheckpointError("its manifest does not say after which checkpoints it was made") from error
    steps = [link.step for link in chain]
    if not fine or steps != sorted(set(steps)):
        raise CorruptCheckpointError("its manifest does not say after which checkpoints it was made")
    return chain


def is_there(folders: Mapping[int, Path], chain: Chain) -> bool:
    """Returns whether all checkpoints of a chain have the manifests that they had; other files are not looked at."""
    return all(link.step in folders and manifest.sha256_of(folders[link.step]) == link.manifest for link in chain)


def verified(folders: Mapping[int, Path], step: int, known: Known) -> tuple[list[dict[str, Any]], str]:
    """Verifies a checkpoint and all that it needs: see `reading.verified`.

    Args:
      folders: step -> folder, of all checkpoints.
      step: of the one.
      known: of those that were verified before; what is found now is added.

    Returns:
      The contents of the manifests, those of its chain first; and what is damaged, "" if nothing is.
    """
    content, damage = _verified(folders, step, known)
    if damage:
        return [], damage
    try:
        chain = of_content(content)
    except CorruptCheckpointError as error:
        return [], str(error)
    contents = []
    for link in chain:
        name = f"it goes on from checkpoint {link.step:08}, which is"
        if link.step not in folders:
            return [], f"{name} missing"
        if manifest.sha256_of(folders[link.step]) != link.manifest:
            return [], f"{name} not the one that it was made after: its manifest.json is another"
        before, damage = _verified(folders, link.step, known)
        if damage:
            return [], f"{name} damaged: {damage}"
        contents.append(before)
    return [*contents, content], ""


def _verified(folders: Mapping[int, Path], step: int, known: Known) -> tuple[dict[str, Any], str]:
    if step not in known:
        known[step] = reading.verified(folders[step], step)
    return known[step]


def read(folders: Mapping[int, Path], contents: Sequence[dict[str, Any]]) -> tuple[Arrays, Chain]:
    """Returns the arrays of a checkpoint whose `verified` gave `contents`, and its chain with itself as the last link.

    Raises:
      CorruptCheckpointError: they are not as the manifests say.
    """
    *before, arrays = [reading.read(folders[content["step"]], content) for content in contents]
    step = contents[-1]["step"]
    itself = Link(step, manifest.sha256_of(folders[step]), array_store.size_bytes(arrays))
    if before:
        try:
            arrays[WRITTEN] = overlaid([*(each[WRITTEN] for each in before), arrays[WRITTEN]])
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptCheckpointError(f"it cannot be laid over the checkpoints before it: {error}") from error
    return arrays, (*of_content(contents[-1]), itself)


def steps_that_stay(intact: Sequence[int], keep: int, content_of: Callable[[int], Mapping[str, Any]]) -> set[int]:
    """Returns the steps of the checkpoints that a run keeps.

    These are the newest ones; if they all share a link, the newest one that shares none with the last, so that no
    single file is needed by all; what these have pinned; and all that any of them needs.

    Args:
      intact: steps of checkpoints, ascending.
      keep: how many of the newest stay, at least 1.
      content_of: returns the content of the manifest of a step, {} where there is none.
    """

    def needed(step: int) -> set[int]:
        with contextlib.suppress(CorruptCheckpointError):
            return {step, *(link.step for link in of_content(content_of(step)))}
        return {step}

    stay, last = set(intact[-keep:]), needed(intact[-1])
    if all(needed(step) & last for step in stay):
        stay |= set([step for step in intact if not needed(step) & last][-1:])
    stay |= {step for step in (content_of(step).get("pinned") for step in stay) if isinstance(step, int)}
    return stay.union(*map(needed, stay))
