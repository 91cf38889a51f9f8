"""Ids of jagged bags, as far as the data say: the one home of their mean."""

from __future__ import annotations

from recjax.data.source import BlockSource, has_blocks


def mean_ids(source: BlockSource) -> dict[str, float]:
    """Returns how many ids a bag of each jagged feature has, the mean over the first block of training samples.

    Features with bags of fixed size are left out; {} if there are no such samples. Without jagged features nothing is
    read.

    Raises:
      DataError: the block cannot be read.
    """
    jagged = [feature.name for feature in source.schema.features if feature.bag is None]
    if not jagged or not source.row_counts("train").sum() or not has_blocks(source):
        return {}
    block = source.read("train", 0)
    return {name: block.bags[name].ids.size / block.size for name in jagged}
