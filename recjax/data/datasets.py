"""The datasets by name. A config is a factory: `DATASETS[kind]().open()` is a `BlockSource`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recjax.data import movietweetings
from recjax.data.movietweetings import MovieTweetings
from recjax.data.synthetic import Synthetic

DATASETS: dict[str, type[MovieTweetings] | type[Synthetic]] = {
    MovieTweetings.kind: MovieTweetings,
    Synthetic.kind: Synthetic,
}

# Raw files to prepared blocks: prepare(config, source, out, overwrite=). Datasets that are absent need no preparation.
PREPARE: dict[str, Callable[..., Any]] = {MovieTweetings.kind: movietweetings.prepare}
