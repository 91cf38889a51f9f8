"""What the processes that write a checkpoint together tell each other, from the threads that write."""

from __future__ import annotations

import json
from typing import Any

from recjax import distributed
from recjax.errors import TrainingError


def said(key: str) -> str:
    """What process 0 says under `key`; its error is raised."""
    text = distributed.fetch(key, distributed.PATIENCE_S)
    if text is None:
        raise TrainingError(f"process 0 did not say within {distributed.PATIENCE_S:g} s whether it saved a checkpoint.")
    if text.startswith("!"):
        raise TrainingError(f"the checkpoint could not be saved: {text[1:]}")
    return text


def told(key: str, process: int) -> dict[str, Any]:
    """What another process tells process 0 of its part; its error is raised."""
    text = distributed.fetch(key, distributed.PATIENCE_S)
    told = json.loads(text) if text else {"error": f"it did not answer within {distributed.PATIENCE_S:g} s"}
    if "error" in told:
        raise TrainingError(f"process {process} could not save its part of the checkpoint: {told['error']}")
    return dict(told)
