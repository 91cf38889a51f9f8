"""From a config to a training: data are opened, a plan is chosen, the parts are put together; and remarks on that."""

from __future__ import annotations

from collections.abc import Sequence

from recjax import settings
from recjax.config.run import RunConfig
from recjax.data.source import SPLITS, BlockSource, mean_ids, require_rows
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import AXES, make_mesh
from recjax.settings.values import written
from recjax.train.planned import plan_of
from recjax.train.step_prediction import judge
from recjax.train.table_specs import check_shared_values, specs
from recjax.train.trainer import Trainer, assemble_trainer


def build_trainer(
    config: RunConfig, source: BlockSource | None = None, splits: Sequence[str] = (), weights: bool = True
) -> Trainer:
    """Builds all that a training needs. Starts the JAX back end.

    Args:
      config: the run's config.
      source: its data; None opens `config.data`.
      splits: those that must have rows, so that a run does not find out at its end.
      weights: False leaves the model without its initial weights, in shapes alone: to compile, not to run.

    Raises:
      ConfigError, DataError, DeviceError: what config, data or devices lack.
    """
    source = config.data.open() if source is None else source
    for split in splits:
        require_rows(source, split)
    config = config.for_rows(int(source.row_counts("train").sum()))
    if "train" in splits:  # what a run has learned otherwise stays usable
        check_shared_values(config, source)
    evaluates = splits and "train" not in splits  # by processes that read each block once
    tables, features = specs(config, source.schema, {} if evaluates else mean_ids(source))
    plan, chosen, _ = plan_of(config, source, tables, features, config.mesh.shape)  # before devices start
    mesh = make_mesh(config.mesh)
    shape = tuple(mesh.shape[axis] for axis in AXES)
    predicted = judge(config, source, mesh)
    if predicted or shape != config.mesh.shape:  # of all the devices that there are
        plan, chosen, _ = plan_of(config, source, tables, features, shape, predicted)
    return assemble_trainer(config, source, mesh, plan, tables, features, chosen=chosen, weights=weights)


def remarks(config: RunConfig, trainer: Trainer) -> list[str]:
    """A paragraph for each way in which the data make a training go otherwise than its config reads.

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
