"""From a config to a training: the data are opened, a plan is chosen, and the parts are put together."""

from __future__ import annotations

from collections.abc import Sequence

from recjax.config.run import RunConfig
from recjax.data.bag_sizes import mean_ids
from recjax.data.source import BlockSource, require_rows
from recjax.parallel.mesh import AXES, make_mesh
from recjax.train.planned import plan_of
from recjax.train.step_prediction import judge
from recjax.train.table_specs import specs
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
    evaluates = splits and "train" not in splits  # by processes that read each block once
    tables, features = specs(config, source.schema, {} if evaluates else mean_ids(source))
    plan, chosen, _ = plan_of(config, source, tables, features, config.mesh.shape)  # before devices start
    mesh = make_mesh(config.mesh)
    shape = tuple(mesh.shape[axis] for axis in AXES)
    predicted = judge(config, source, mesh)
    if predicted or shape != config.mesh.shape:  # of all the devices that there are
        plan, chosen, _ = plan_of(config, source, tables, features, shape, predicted)
    return assemble_trainer(config, source, mesh, plan, tables, features, chosen=chosen, weights=weights)
