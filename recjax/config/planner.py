"""Settings of the planner: what `plan=auto` plans by."""

from __future__ import annotations

import dataclasses

from recjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class PlannerConfig:
    """The machine that `plan=auto` chooses for, and what it may use of it."""

    machine: str = ""  # machine file of `recjax calibrate`, or a shipped one such as h200; empty: the plain rule
    memory_gib: float = 0.0  # GiB that a device may use; 0: the memory that the machine file states
    buckets: bool = True  # whether it chooses the buckets of dense gradients where train.bucket_mib is 0
    compile: int = 0  # number of best plans to compile and compare with the plain rule's; 0: none

    def __post_init__(self) -> None:
        if not 0 <= self.memory_gib < float("inf"):
            raise ConfigError(f"memory_gib is {self.memory_gib}; give what a device may use, for example 80, or 0.")
        if self.compile < 0:
            raise ConfigError(f"compile is {self.compile}; give how many plans to compile, for example 4, or 0.")
