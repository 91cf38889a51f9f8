"""Remarks before a training starts: where the data make it go otherwise than its config reads."""

from __future__ import annotations

from recjax import settings
from recjax.config.run import RunConfig
from recjax.data.source import SPLITS
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig
from recjax.settings.values import written
from recjax.train.trainer import Trainer


def remarks(config: RunConfig, trainer: Trainer) -> list[str]:
    """A paragraph for each such thing.

    Args:
      config: as it was asked for.
      trainer: of the run; its config is that for so many training samples.
    """
    return [*_smaller(config, trainer), *_unvalidated(trainer), *_without_bottom(trainer), *_always_whole(trainer)]


def _smaller(config: RunConfig, trainer: Trainer) -> list[str]:
    """Says so where settings give way to those for few samples."""
    if trainer.config == config:
        return []
    samples = int(trainer.source.row_counts("train").sum())
    if samples >= config.small.below_rows:
        return [
            f"train.batch_size is {config.train.batch_size:,}, but the training split has {samples:,} samples: each "
            "step takes all of them"
        ]
    instead = [f"{key}={written(new)}" for key, old, new in settings.diff(config, trainer.config) if new is not None]
    return [
        f"the training split has fewer samples than small.below_rows={config.small.below_rows:,}, so small.* holds "
        f"instead of the recipe: {', '.join(instead)}. Settings that an override gives are kept; those of a config "
        "from Python or a config.json give way. Set small.* to change them; small.below_rows=0 keeps the recipe."
    ]


def _unvalidated(trainer: Trainer) -> list[str]:
    """Says so where there is no split that could choose a step."""
    source, patience = trainer.source, trainer.config.train.patience
    if source.row_counts("validation").sum() > 0:
        return []
    there = ", ".join(split for split in SPLITS if source.row_counts(split).sum() > 0)
    early = f", and train.patience={patience} stops nothing" if patience else ""
    return [
        f"{source.name} has no validation split (it has {there}): the result is that of the last step, for nothing "
        f"chooses an earlier one{early}"
    ]


def _without_bottom(trainer: Trainer) -> list[str]:
    """Says so where the data leave a bottom MLP nothing to see."""
    model = trainer.config.model
    if trainer.source.schema.dense or not isinstance(model, DLRMConfig | DCNv2Config) or not model.bottom:
        return []
    return [
        f"the data have no dense features, so the model has no bottom MLP: model.bottom={written(model.bottom)} is not "
        "used, and the embeddings interact alone"
    ]


def _always_whole(trainer: Trainer) -> list[str]:
    """A remark where increments are asked for and each checkpoint is whole all the same."""
    most = trainer.config.train.checkpoint_increments
    if not most or trainer.makes_increments:
        return []
    why = "there are several processes" if trainer.bound.cached else "all rows are on the devices"
    return [f"train.checkpoint_increments={most} changes nothing, each checkpoint is whole: {why}"]
