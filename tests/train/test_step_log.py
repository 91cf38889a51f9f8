"""Counts of a run's log beside the metrics."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from jax import monitoring

from recjax.train.step_log import StepLog


def test_seconds_of_compiling_are_counted_from_the_start_to_the_end():
    trainer: Any = SimpleNamespace(total_steps=3, mesh=SimpleNamespace(devices=np.zeros(1)))

    def compiled(seconds, what="backend_compile"):
        monitoring.record_event_duration_secs(f"/jax/core/compile/{what}_duration", seconds)

    log = StepLog(trainer)
    compiled(1.0)
    with log:
        compiled(2.0)
        log.start()
        compiled(4.0)
        compiled(8.0, "jaxpr_trace")
        compiled(16.0)
    compiled(32.0)
    assert log.compile_s == 20.0
    with StepLog(trainer):  # of a run that had nothing left to train
        pass
