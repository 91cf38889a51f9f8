"""Configs for tests of the config machinery, none of which depend on what recjax trains."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from recjax import settings
from recjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Dot:
    kind: ClassVar[str] = "dot"
    dim: int = 16
    hidden: tuple[int, ...] = (512, 256, 64)


@dataclasses.dataclass(frozen=True)
class Cross:
    kind: ClassVar[str] = "cross"
    dim: int = 8
    layers: int = 3


@dataclasses.dataclass(frozen=True)
class Adam:
    kind: ClassVar[str] = "adam"
    rate: float = 0.001


@dataclasses.dataclass(frozen=True)
class Train:
    steps: int = 100
    batch_size: int = 64
    clip: float | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.steps % self.batch_size and self.steps > 1000:
            raise ConfigError("steps must be a multiple of batch_size")


@dataclasses.dataclass(frozen=True)
class Root:
    seed: int = 0
    name: str = "run"
    note: str | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    tags: tuple[str, ...] = ()
    rates: tuple[float, ...] = (0.5,)
    devices: int | Literal["auto"] = "auto"
    model: Dot | Cross = Dot()
    optimizer: Adam = Adam()
    teacher: Dot | Cross | None = None
    train: Train = Train()


@dataclasses.dataclass(frozen=True)
class Odd:
    kind: str = "a field here, not a tag"
    level: Literal[0, 1] = 0


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.1


@dataclasses.dataclass(frozen=True)
class Before:
    must: int
    inner: Inner = Inner(rate=0.5)
    choice: Dot | Inner | None = None


def changed(*assignments: str) -> Root:
    return settings.override(Root(), assignments)
