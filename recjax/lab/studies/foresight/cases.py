"""Cases to predict and measure: random configs, changes of them, workloads and plans. All are drawn by a seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from recjax import settings
from recjax.config import presets
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.optim import RowWiseAdagrad
from recjax.errors import ConfigError
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig

_MOST_FLOP = 4e10  # of a step's products: under a second on two cores
_MOST_BYTES = 2**28  # of a step's rows
# Changes whose effect a prediction should get right in sign: their overrides.
CHANGES: dict[str, tuple[str, ...]] = {
    "twice the batch": ("train.batch_size={twice}",),
    "half the columns": ("{half_dim}",),
    "bfloat16": ("compute_dtype=bfloat16",),
    "tables in bfloat16": ("embedding.dtype=bfloat16",),
    "owners that pool": ("plan=balanced", "embedding.exchange.kind=pooled"),
    "copies": ("plan=data_parallel",),
    "buckets of 1 MiB": ("train.bucket_mib=1",),
}
PLANS: dict[str, tuple[str, ...]] = {
    "auto": ("plan=auto",),
    "planner": ("plan=auto", "planner.machine={machine}", "planner.compile=4"),
    "rows": ("plan=row_wise", "embedding.exchange.kind=rows"),
    "balanced, pooled": ("plan=balanced", "embedding.exchange.kind=pooled"),
    "balanced, rows": ("plan=balanced", "embedding.exchange.kind=rows"),
    "copies": ("plan=data_parallel",),
    "owners, pooled": ("plan=table_wise", "embedding.exchange.kind=pooled"),
    "rows, pooled": ("plan=row_wise", "embedding.exchange.kind=pooled"),
    "owners, rows": ("plan=table_wise", "embedding.exchange.kind=rows"),
    "columns, rows": ("plan=column_wise", "embedding.exchange.kind=rows"),
    "columns, pooled": ("plan=column_wise", "embedding.exchange.kind=pooled"),
    "balanced": ("plan=balanced",),
}
BENCHED = ("bench_kaggle16", "bench_mlperf64", "bench_multihot")  # presets for speed that a small host trains
# With these numbers of ids that are copied, the rest as rows or pooled, there are 20 plans.
COPIED_ROWS = (300, 3000, 30_000, 300_000)


@dataclasses.dataclass(frozen=True)
class Case:
    """Something that is predicted and measured.

    Attributes:
      kind: "config", "change" or "plan".
      name: unique.
      base: name of the case that it is compared with; "" for none.
      config: of the run.
    """

    kind: str
    name: str
    base: str
    config: RunConfig


def configs(count: int, devices: int, seed: int) -> Iterator[RunConfig]:
    """Yields random DLRM and DCN-v2 models: B, tables, D, bags, layers, dtype.

    Args:
      count: how many.
      devices: that they train on.
      seed: of the draws; the first of more are the same.
    """
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        batch = 2 ** int(rng.integers(8, 15))
        tables = round(math.exp(rng.uniform(0, math.log(40))))
        dim = 2 ** int(rng.integers(2, 8))
        bag = int(rng.choice([1, 1, 1, 5, 10]))
        rows = tuple(int(math.exp(rng.uniform(math.log(10), math.log(5e5)))) for _ in range(tables))
        widths = [2 ** int(width) for width in rng.integers(5, 11, int(rng.integers(1, 4)))]
        bottom = tuple(2 ** int(width) for width in rng.integers(5, 10, int(rng.integers(0, 3))))
        dtype = str(rng.choice(["float32", "bfloat16"]))
        crossed = tables * dim + dim
        model: DLRMConfig | DCNv2Config
        if rng.random() < 0.5:
            model = DLRMConfig((*bottom, dim), (*widths, 1))
            values = sum(a * b for a, b in zip(widths, [*widths[1:], 1], strict=True)) + widths[0] * tables**2 / 2
        else:
            rank = int(rng.choice([16, 64]))
            model = DCNv2Config((*bottom, dim), int(rng.integers(1, 4)), rank, (*widths, 1))
            values = (
                6 * rank * crossed + crossed * widths[0] + sum(a * b for a, b in zip(widths, widths[1:], strict=False))
            )
        most = min(_MOST_FLOP / 6 / max(values, 1), _MOST_BYTES / (tables * bag * dim * 4))
        batch = max(256, min(batch, 2 ** int(math.log2(max(most, 256)))))
        made = _config(rows, (bag,), dim, model, batch, MeshConfig(devices))
        yield dataclasses.replace(made, compute_dtype=dtype)  # type: ignore[arg-type]


def _config(
    rows: tuple[int, ...], bags: tuple[int, ...], dim: int, model: DLRMConfig | DCNv2Config, batch: int, on: MeshConfig
) -> RunConfig:
    return RunConfig(
        data=ZipfStream(rows, ids_per_bag=bags, distinct_blocks=8),
        model=model,
        embedding=EmbeddingConfig(dim=dim, optimizer=RowWiseAdagrad(0.01)),
        train=TrainConfig(batch_size=batch, optimizer=DenseAdagrad(0.01), shuffle=False),
        mesh=on,
    )


def workloads(devices: int, platform: Any = "auto") -> Iterator[tuple[str, RunConfig]]:
    """Yields five models that differ in what their tables ask for."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int]] = {
        "bags of one": (tuple(10**n for n in (2, 3, 3, 4, 4, 5, 5, 6)), (1,), 16, 4096),
        "bags of twenty": (tuple(10**n for n in (3, 4, 4, 5, 5, 5)), (20,), 32, 2048),
        "many small tables": ((1000,) * 32, (1,), 16, 2048),
        "few wide tables": ((200_000,) * 4, (5,), 128, 2048),
        "mixed bags": ((100, 1000, 10_000, 100_000, 100_000, 500_000), (1, 1, 1, 1, 30, 30), 64, 1024),
    }
    for name, (rows, bags, dim, batch) in shapes.items():
        yield name, _config(rows, bags, dim, DLRMConfig((64, dim), (64, 1)), batch, MeshConfig(devices, platform))


def cases(
    counts: dict[int, int],
    benched: int,
    changed: int,
    plans: int,
    loads: int,
    plan_devices: Sequence[int],
    machine: str,
    seed: int,
) -> list[Case]:
    """All cases of a campaign.

    Args:
      counts: number of devices -> random configs on so many.
      benched: presets of `BENCHED`, on one device.
      changed: configs of which changes are measured, too.
      plans: for each workload.
      loads: workloads of which plans are measured.
      plan_devices: on so many.
      machine: file that the planner plans by.
      seed: of the draws.
    """
    found = [Case("config", f"{name} on 1", "", presets.load(name)) for name in BENCHED[:benched]]
    for devices, count in counts.items():
        for number, config in enumerate(configs(count, devices, seed)):
            found.append(Case("config", f"config {number} on {devices}", "", config))
    bases = [case for case in found if case.config.mesh.devices > 1] or found
    for base in bases[:changed]:
        for what, overrides in CHANGES.items():
            changed_config = _changed(base.config, overrides)
            if changed_config is not None:
                found.append(Case("change", f"{base.name}, {what}", base.name, changed_config))
    for devices in plan_devices:
        for name, load in list(workloads(devices))[:loads]:
            for what, overrides in list(_plans(load).items())[:plans]:
                own = [text.format(machine=machine) for text in overrides]
                found.append(Case("plan", f"{name} on {devices}: {what}", "", settings.override(load, own)))
    return found


def _changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig | None:
    """The config with a change; None if it cannot be changed so, or is so already."""
    dim = config.embedding.dim
    bottom = "-".join(map(str, (*config.model.bottom[:-1], max(2, dim // 2))))  # type: ignore[union-attr]
    own = [
        part
        for text in overrides
        for part in text.format(
            twice=2 * config.train.batch_size, half_dim=f"embedding.dim={max(2, dim // 2)} model.bottom={bottom}"
        ).split()
    ]
    try:
        changed = settings.override(config, own)
    except ConfigError:
        return None
    return None if changed == config or config.mesh.devices == 1 and "plan=" in own[0] else changed


def _plans(load: RunConfig) -> dict[str, tuple[str, ...]]:
    """20 plans: those of every model, and copies of all tables below a size."""
    found = dict(PLANS)
    data: Any = load.data
    for most in COPIED_ROWS:
        for kind in ("rows", "pooled"):
            copied = [
                f"embedding.tables.sparse_{n}.placement=data_parallel" for n, r in enumerate(data.rows) if r <= most
            ]
            rest = "row_wise" if kind == "rows" else "table_wise"
            found[f"copies up to {most:,} rows, else {kind}"] = (
                f"plan={rest}",
                f"embedding.exchange.kind={kind}",
                *copied,
            )
    return found
