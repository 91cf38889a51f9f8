"""What the processes that write a checkpoint together tell each other, from the threads that write.

`turn` counts the saves, alike in all processes.
"""

from __future__ import annotations

import json
from typing import Any

from recjax.errors import TrainingError
from recjax.parallel import distributed


def post(turn: int, topic: str, text: str) -> None:
    """Process 0 says something to the others; what begins with an exclamation mark is an error."""
    distributed.post(f"save/{turn}/{topic}", text)


def said(turn: int, topic: str) -> str:
    """What process 0 says; its error is raised."""
    text = distributed.fetch(f"save/{turn}/{topic}", distributed.PATIENCE_S)
    if text is None:
        raise TrainingError(f"process 0 did not say within {distributed.PATIENCE_S:g} s whether it saved a checkpoint.")
    if text.startswith("!"):
        raise TrainingError(f"the checkpoint could not be saved: {text[1:]}")
    return text


def tell(turn: int, what: dict[str, Any]) -> None:
    """Another process tells process 0 of its part, or of an "error"."""
    distributed.post(f"save/{turn}/part/{distributed.process()}", json.dumps(what))


def told(turn: int, process: int) -> dict[str, Any]:
    """What another process tells process 0 of its part; its error is raised."""
    text = distributed.fetch(f"save/{turn}/part/{process}", distributed.PATIENCE_S)
    told = json.loads(text) if text else {"error": f"it did not answer within {distributed.PATIENCE_S:g} s"}
    if "error" in told:
        raise TrainingError(f"process {process} could not save its part of the checkpoint: {told['error']}")
    return dict(told)


def forget(turn: int) -> None:
    """Removes what was said of a save: the store is process 0's memory."""
    distributed.forget(f"save/{turn}")
