"""The one way from data to the step, which training, evaluation and prediction all iterate."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from recjax.embedding.routing.capacity import CapacityLadder
from recjax.parallel import watchdog
from recjax.train.routers import InFlight, Router
from recjax.train.step_inputs import StepInputs


class InputStream:
    """Reads, validates, routes and places batches, ahead of the step. Iterating gives `StepInputs`.

    Its state (`state_dict`: position, capacities, peaks) goes into the checkpoint, as that of a Grain iterator does.
    In a profile the host's part of a step is called count (in the reader's threads), input (waiting for these), route
    and place.

    Attributes:
      position: global index of the next sample: epoch * samples of an epoch + offset.
      latest: the batch that was given last, with what the host knows of it: samples, routing, signals.
    """

    latest: InFlight

    def __init__(
        self,
        read: Callable[[int], Iterator[InFlight]],
        router: Router,
        batch_size: int,
        epoch_samples: int,
        period: int | None,
    ) -> None:
        """Nothing is read before the first batch is asked for.

        Args:
          read: gives the routed batches from a position on.
          router: who routes.
          batch_size: B; the last batch of an epoch may hold fewer.
          epoch_samples: samples of an epoch.
          period: steps after which capacities may fall; None: they only grow.
        """
        self._read, self._router, self._period = read, router, period
        self._batch_size, self._epoch_samples = batch_size, epoch_samples
        self._batches: Iterator[InFlight] | None = None
        self._waiting: collections.deque[InFlight] = collections.deque()  # started, but not given
        self.load_state_dict({"position": 0, "capacities": {}, "peaks": {}})

    def state_dict(self) -> dict[str, Any]:
        """Returns what a stream needs to give the same batches from here on: JSON values."""
        ladder = self._ladder
        return {"position": self.position, "capacities": dict(ladder.capacities), "peaks": dict(ladder.peaks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the stream that gave this `state_dict` was, maybe on other devices.

        Capacities may be left empty: batches are the same, in arrays of other sizes.
        """
        self.close()
        self.position = int(state["position"])
        epoch, offset = divmod(self.position, self._epoch_samples)
        steps = epoch * -(-self._epoch_samples // self._batch_size) + offset // self._batch_size
        self._ladder = CapacityLadder(state["capacities"], state["peaks"], steps, self._period)

    @property
    def capacities(self) -> dict[str, int]:
        """Sizes of the arrays that were given last: a program is compiled for each set of them."""
        return self._ladder.capacities

    def __iter__(self) -> Iterator[StepInputs]:
        """Itself."""
        return self

    def __next__(self) -> StepInputs:
        """The next batch on the mesh; the router has begun with those after it."""
        if self._batches is None:
            self._batches = self._read(self.position)
        while len(self._waiting) <= self._router.depth:
            with jax.profiler.TraceAnnotation("input"):
                batch = next(self._batches, None)
            if batch is None:
                break
            required = [waiting.routed.required_capacities for waiting in (*self._waiting, batch)]
            self._waiting.append(self._router.start(batch, self._ladder.foresee(required)))
        if not self._waiting:
            raise StopIteration
        self.latest = self._waiting.popleft()
        capacities = self._ladder.fit(self.latest.required_capacities)
        watchdog.phase("dispatch")
        with jax.profiler.TraceAnnotation("place"):
            inputs = self._router.complete(self.latest, capacities)
        self.position += min(self._batch_size, self._epoch_samples - self.position % self._epoch_samples)
        return inputs

    def close(self) -> None:
        """Ends the reading. What is under way is read again if the stream goes on."""
        self._batches = None
        self._waiting.clear()
