"""Ids of jagged bags, as far as the data say: the one home of their mean."""

from __future__ import annotations

from recjax.data.source import BlockSource


def mean_ids(source: BlockSource, split: str = "train") -> dict[str, float]:
    """Returns how many ids a bag of each jagged feature has, the mean over the first block of a split.

    Features with bags of fixed size are left out; {} if the split has no rows. Without jagged features nothing is read.

    Raises:
      DataError: the block cannot be read.
    """
    jagged = [feature.name for feature in source.schema.features if feature.bag is None]
    if not jagged or not source.row_counts(split).sum():
        return {}
    block = source.read(split, 0)
    return {name: block.bags[name].ids.size / block.size for name in jagged}
