"""A training whose steps are timed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax

from recjax.config.run import RunConfig
from recjax.data.synthetic.stream import ZipfStreamSource
from recjax.train.build import build_trainer
from recjax.train.routers import PackedBatches


class Stepping:
    """A training on the training split. What would be drawn in its first steps is drawn before.

    Attributes:
      trainer: of the run.
      state: after the last step.
    """

    def __init__(self, config: RunConfig) -> None:
        """Makes the state before the first step.

        Raises:
          ConfigError, DataError, DeviceError: as `build_trainer`.
        """
        self.trainer = build_trainer(config, splits=("train",))
        if isinstance(self.trainer.source, ZipfStreamSource):
            self.trainer.source.draw("train")
        self.begin()

    def begin(self) -> None:
        """Makes the state before the first step, also after `release`."""
        self.state = self.trainer.init_state()

    def release(self) -> None:
        """Gives the memory of the state back, until `begin`."""
        del self.state

    def steps(self, stream: Iterator[PackedBatches]) -> Iterator[None]:
        """Dispatches a step, waits for the one before, as a training does, and yields, until the stream ends."""
        before = None
        for inputs in stream:
            self.state, metrics = self.trainer.train_step(self.state, inputs)
            if before is not None:
                jax.block_until_ready(before)
            before = metrics
            yield

    def warm(self, stream: Iterator[PackedBatches], count: int) -> None:
        """Trains so many steps, which compile and fill the pipeline, and waits for all of them."""
        for _ in itertools.islice(self.steps(stream), count):
            pass
        self.wait()

    def wait(self) -> None:
        """Waits for the last step."""
        jax.block_until_ready(self.state)
