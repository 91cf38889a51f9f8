"""The choice of whole checkpoints and increments in a training: see `recjax/train/checkpoint/chain.py`."""

from __future__ import annotations

from typing import Any

from recjax.tiers.changes import Changes
from recjax.train.checkpoint.array_store import size_bytes
from recjax.train.checkpoint.chain import Chain
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer


class Increments:
    """Decides which a checkpoint is, and says from which one the marks of changed rows (`Changes`) count.

    A checkpoint is an increment after the one that was complete last, also if that was the one that the run goes on
    from, unless `train.checkpoint_increments` of them are in its chain already; or they and it would together hold more
    bytes than the whole one; or its chain is not there any more, or is of this step too; or the rows on the host are
    not from a checkpoint as they were, since the run began, or was resumed with another seed or from tables that were
    all on devices.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints) -> None:
        """Takes the trainer of a run and its checkpoints."""
        self._trainer, self._checkpoints = trainer, checkpoints
        self._changes: Changes | None = None
        self._begun = 0  # of `Changes.begun`, the checkpoint that is being written

    def wait(self) -> None:
        """Waits for the checkpoint that is being written, from which changes count then: see `Checkpoints.wait`."""
        chain = self._checkpoints.wait()
        if chain and self._changes is not None and self._changes.begun == self._begun:
            self._changes.complete(chain)

    def arrays(self, state: TrainState, step: int) -> tuple[dict[str, Any], Chain]:
        """Begins a checkpoint, after `wait`.

        Returns:
          Its arrays, and the chain of which it is an increment; () if it is whole.
        """
        tier = state.host.tier
        self._changes = None if tier is None else tier.rows.changes
        if self._changes is None:
            return self._trainer.checkpoint(state), ()
        found = self._increment(state, step, self._changes.since) or (self._trainer.checkpoint(state), ())
        self._begun = self._changes.begun
        return found

    def _increment(self, state: TrainState, step: int, chain: Chain) -> tuple[dict[str, Any], Chain] | None:
        most = self._trainer.config.train.checkpoint_increments
        if 0 < len(chain) <= most and chain[-1].step < step and self._checkpoints.holds(chain):
            whole, *before = (link.bytes for link in chain)
            arrays = self._trainer.checkpoint(state, increment=True)
            if sum(before) + size_bytes(arrays) <= whole:
                return arrays, chain
        return None
