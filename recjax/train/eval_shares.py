"""Shares of an evaluation: the rows of a split that each process reads, and how many of them at a time."""

from __future__ import annotations

import itertools

from jax.sharding import Mesh

from recjax.data.pipeline import shares
from recjax.data.source import BlockSource
from recjax.embedding.routing import host
from recjax.parallel.mesh import Share


def eval_shares(source: BlockSource, split: str, mesh: Mesh) -> list[tuple[range, Share]]:
    """Returns for each process its rows of a split, and its devices."""
    of_all = Share.of_all(mesh)
    edges = shares(source.row_counts(split), [share.count for share in of_all]).tolist()
    return [(range(*edge), share) for edge, share in zip(itertools.pairwise(edges), of_all, strict=True)]


def share_size(batch_size: int, share: Share) -> int:
    """Returns how many samples a process reads at a time, where batches of all are of `batch_size`."""
    first, end = host.samples_of(share, batch_size)
    return min(end - first, batch_size)
