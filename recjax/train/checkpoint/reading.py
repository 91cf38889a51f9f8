"""The folder of one checkpoint, verified and read by all processes of a run together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recjax.errors import TrainingError
from recjax.parallel import distributed
from recjax.train.checkpoint import array_store, manifest
from recjax.train.checkpoint.array_store import Arrays


def part(process: int) -> str:
    """The name of the folder of what a process held."""
    return f"part-{process:05}"


def verified(folder: Path, step: int) -> tuple[dict[str, Any], str]:
    """The manifest's content and "", or {} and what is damaged. Each process reads its share of the files.

    Raises:
      TrainingError: a file cannot be read by this user, or the checkpoint has another format.
    """
    try:
        content = manifest.verify(folder, (distributed.process(), distributed.processes()))
        said = content.get("step")
        return content, "" if said == step else f"its manifest is of step {said}"
    except PermissionError as error:
        raise unreadable(folder, error) from error
    except manifest.CorruptCheckpointError as damage:
        return {}, str(damage)
    except (OSError, ValueError, KeyError) as error:
        return {}, f"it cannot be read: {error}"


def read(folder: Path, content: dict[str, Any]) -> Arrays:
    """Returns the arrays of a checkpoint; `CorruptCheckpointError` if they are not as its manifest says (`content`)."""
    parts = [(folder / part(k), corners) for k, corners in enumerate(content.get("parts", ())) if corners]
    try:
        return array_store.read(folder / "state", content["arrays"], parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, manifest.CorruptCheckpointError) as error:
        raise manifest.CorruptCheckpointError(f"it cannot be read: {error}") from error


def agree(topic: str, damage: str) -> None:
    """Raises `CorruptCheckpointError` in all processes if any has found damage; `topic` names the question."""
    if found := next((d for d in distributed.gather(topic, damage) if d), ""):
        raise manifest.CorruptCheckpointError(found)


def gone(folder: Path) -> bool:
    """Tells all processes whether process 0 sees the folder no longer: a run that goes on has removed it."""
    return distributed.from_main("a folder", "" if folder.exists() else "gone") == "gone"


def unreadable(folder: Path, error: OSError) -> TrainingError:
    """The error for a path that this user may not read."""
    return TrainingError(
        f"cannot read {error.filename or folder}: {error.strerror}. Make the run folder readable for this user (uid "
        f"{os.geteuid()})."
    )
