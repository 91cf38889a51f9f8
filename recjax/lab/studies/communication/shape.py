"""Model A of the study, whole or smaller, and the variations whose communication is compared.

A smaller model A has every n-th of its tables, so that dimensions, bags and rows are spread as in the whole one, the
same number of layers of a lesser width, and fewer samples a rank.
"""

from __future__ import annotations

import dataclasses
import heapq
from pathlib import Path

from recjax import settings
from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, Segment
from recjax.models.dlrm import DLRMConfig
from recjax.settings.values import Named
from recjax.utils.files import write_whole

PRESET = "bench_model_a"
PIECE = 32  # columns of a piece, where tables are cut by columns
BASE = "base"


@dataclasses.dataclass(frozen=True)
class Size:
    """Part of model A that is taken.

    Attributes:
      every: of so many tables one is kept.
      width: of the layers; 0: as in the preset.
      dense: dense features; 0: as in the preset.
      samples: a rank.
      buckets: MiB of dense gradients, which are tried.
      max_rows: of a table, at most; 0: no limit.
    """

    every: int = 1
    width: int = 0
    dense: int = 0
    samples: int = 512
    buckets: tuple[float, ...] = (25.0, 100.0)
    max_rows: int = 0


FULL = Size()
SMALL = Size(every=8, width=256, dense=64, samples=16, buckets=(0.5, 2.0))
MEASURED = Size(every=32, width=256, dense=64, samples=128, buckets=(0.5, 2.0), max_rows=2000)


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting of what varies.

    Attributes:
      variation: what varies: "base", "batch", "placement", "buckets", "dense" or "precision".
      name: of the value.
      overrides: of the base.
      cut: whether tables are cut by columns.
      precision: of the exchange.
    """

    variation: str
    name: str
    overrides: tuple[str, ...] = ()
    cut: bool = False
    precision: str = "float32"


def cases(size: Size, ranks: int) -> list[Case]:
    """The base, and one case for every other value of each of the five variations."""
    half, double = (f"train.batch_size={round(ranks * size.samples * factor)}" for factor in (0.5, 2))
    return [
        Case(BASE, "base"),
        Case("batch", "half the batch", (half,)),
        Case("batch", "twice the batch", (double,)),
        Case("placement", "column-wise", cut=True),
        *(Case("buckets", f"buckets of {mib:g} MiB", (f"train.bucket_mib={mib:g}",)) for mib in size.buckets),
        Case("dense", "dense part sharded", ("train.dense=sharded",)),
        *(Case("precision", name, precision=name) for name in ("bfloat16", "int8")),
    ]


def config(size: Size, ranks: int, case: Case, folder: Path, platform: str = "auto") -> RunConfig:
    """The training of a case.

    Args:
      size: of the model.
      ranks: devices, whether or not anybody owns them.
      case: what varies.
      folder: where a plan file is written if the case needs one.
      platform: of the devices.
    """
    whole = presets.load(PRESET, [])
    data, model = whole.data, whole.model
    assert isinstance(data, ZipfStream) and isinstance(model, DLRMConfig)
    chosen = range(size.every // 2, len(data.rows), size.every)
    dims = _dims(whole)
    tables = {f"sparse_{i}": whole.embedding.tables[f"sparse_{n}"] for i, n in enumerate(chosen)}
    if size.width:
        widths = (size.width,) * len(model.bottom), (size.width // 3, *(size.width,) * (len(model.top) - 2), 1)
        model = dataclasses.replace(model, bottom=widths[0], top=widths[1])
    # Bags go by the new number: by the old one every table of a small model would have the same.
    bags = tuple(data.ids_per_bag[i] for i in range(len(chosen)))
    rows = tuple(min(data.rows[n], size.max_rows or data.rows[n]) for n in chosen)
    data = dataclasses.replace(data, rows=rows, ids_per_bag=bags, dense=size.dense or data.dense)
    embedding = dataclasses.replace(whole.embedding, tables=Named(tables))
    made = dataclasses.replace(whole, data=data, model=model, embedding=embedding)
    precision = f"embedding.exchange.forward={case.precision}", f"embedding.exchange.backward={case.precision}"
    plan = "table_wise"
    if case.cut:
        path = folder / f"columns-{len(chosen)}-tables-{ranks}-ranks.json"
        text = cut_plan({f"sparse_{i}": dims[n] for i, n in enumerate(chosen)}, ranks).to_json()
        write_whole(path, text.encode())
        plan = str(path)
    common = (
        f"mesh.devices={ranks}",
        f"mesh.platform={platform}",
        f"train.batch_size={ranks * size.samples}",
        f"plan={plan}",
        "embedding.exchange.kind=pooled",
        *(() if case.precision == "float32" else precision),
    )
    return settings.override(made, [*common, *case.overrides])


def cut_plan(dims: dict[str, int], ranks: int) -> Plan:
    """Tables cut by columns into even pieces of at most `PIECE`, each whole on one device, as TorchRec's column-wise.

    The widest pieces first, each to the device that has the fewest columns: vectors travel, one for each sample, so
    columns are what a device sends.

    Args:
      dims: table -> D.
      ranks: devices.
    """
    pieces = []
    for table, dim in dims.items():
        count = -(-dim // PIECE)
        bounds = [dim * n // count for n in range(count + 1)]
        pieces += [(table, first, last) for first, last in zip(bounds, bounds[1:], strict=False)]
    loads = [(0, device) for device in range(ranks)]
    owners: dict[str, list[tuple[int, int, int]]] = {table: [] for table in dims}
    for table, first, last in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        load, device = heapq.heappop(loads)
        heapq.heappush(loads, (load + last - first, device))
        owners[table].append((first, last, device))
    exchange = Exchange("float32", "float32", "pooled")
    return Plan(
        {
            table: tuple(
                Segment(
                    "table_wise", columns="all" if len(of) == 1 else (first, last), owners=device, exchange=exchange
                )
                for first, last, device in sorted(of)
            )
            for table, of in owners.items()
        }
    )


def _dims(whole: RunConfig) -> list[int]:
    """D of each table, by number: settings by name are in the order of names."""
    tables = whole.embedding.tables
    return [tables[f"sparse_{n}"].dim or whole.embedding.dim for n in range(len(tables))]


def facts() -> dict[str, float]:
    """Returns the shape of model A, from the preset.

    Returns:
      "parameters"; "tables"; "least_dim", "mean_dim", "most_dim"; "pooling", ids a bag on average; "layers" and
      "mean_width"; "mflop", of the forward products of a sample; "samples" a rank; "ranks".
    """
    whole = presets.load(PRESET, [])
    data, model = whole.data, whole.model
    assert isinstance(data, ZipfStream) and isinstance(model, DLRMConfig)
    dims = _dims(whole)
    joined = model.bottom[-1] + sum(dims)  # a concatenation
    bottom, top = (data.dense, *model.bottom), (joined, *model.top)
    products = [a * b for widths in (bottom, top) for a, b in zip(widths, widths[1:], strict=False)]
    widths = [*model.bottom, *model.top]
    return {
        "parameters": sum(v * d for v, d in zip(data.rows, dims, strict=True)) + sum(products) + sum(widths),
        "tables": len(dims),
        "least_dim": min(dims),
        "mean_dim": sum(dims) / len(dims),
        "most_dim": max(dims),
        "pooling": sum(data.ids_per_bag) / len(data.ids_per_bag),
        "layers": len(widths),
        "mean_width": sum(widths) / len(widths),
        "mflop": 2 * sum(products) / 1e6,
        "samples": whole.train.batch_size / whole.mesh.devices,
        "ranks": whole.mesh.devices,
    }
