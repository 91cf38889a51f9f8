"""Sizes that the first batch of a training asks for: a step is compiled for them before it comes.

They come from ids that were really drawn or read: those of the first batch, or where these are more than COUNTED_IDS,
those of the first devices' shares.
"""

from __future__ import annotations

import dataclasses

import jax

from recjax.data.batch import Batch
from recjax.data.pipeline import batches
from recjax.embedding.routing import capacity, host
from recjax.embedding.routing.routed import GroupRouting
from recjax.train.trainer import Trainer

COUNTED_IDS = 2**24  # so many are counted in seconds; the shares of further devices are left alone


@dataclasses.dataclass(frozen=True)
class Sample:
    """Rows that the first batch asks for, as far as it was counted.

    Attributes:
      devices: whose shares were counted: the first so many.
      samples, ids: in these shares.
      ids_of: the ids by the name that a feature has in the data.
      capacities: that a training's first step has, if no share that was not counted needs more.
      counts: group name -> the counts of its routing, of these devices.
    """

    devices: int
    samples: int
    ids: int
    ids_of: dict[str, int]
    capacities: dict[str, int]
    counts: dict[str, GroupRouting]


def sample(trainer: Trainer) -> Sample:
    """Counts the first batch of a training, or of a large one the shares of some devices."""
    train, bound = trainer.config.train, trainer.bound
    b = host.local_samples(train.batch_size, bound.all_devices, train.accumulate)
    ids_per_sample = _ids(block := trainer.source.read("train", 0)) / block.size
    devices = min(bound.all_devices, max(1, int(COUNTED_IDS / (b * max(1.0, ids_per_sample)))))
    if bound.hosts > 1 or bound.replicas > 1:  # whose devices ask together, or add their gradients
        together = bound.devices if bound.replicas > 1 else bound.devices // bound.hosts
        devices = max(1, devices // together) * together
    stream = batches(
        trainer.source,
        "train",
        min(devices * b, train.batch_size),
        seed=trainer.config.seed,
        shuffle=train.shuffle,
        shuffle_blocks=train.shuffle_blocks if train.shuffle else 1,  # unshuffled: that reads no more than is counted
        workers=0,
    )
    batch: Batch = next(stream)
    if trainer.item_keys is not None:
        batch = trainer.item_keys.with_drawn(batch, trains=True)
    counted = host.route_on_host(batch, bound, train.batch_size, train.accumulate)
    counts = host.all_true_counts(bound, counted)
    counts = jax.tree.map(lambda of_all: of_all[:devices], counts)
    sizes = capacity.grow({}, counted.required_capacities, capacity.Kinds.of(bound))
    ids_of = {name: bags.ids.size for name, bags in batch.bags.items()}
    return Sample(devices, batch.size, _ids(batch), ids_of, sizes, counts)


def _ids(batch: Batch) -> int:
    return sum(bags.ids.size for bags in batch.bags.values())
