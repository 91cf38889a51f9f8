"""Readers of what stands around the trainer: traces, exports, requests, studies, searches, measured tables."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recjax.data.prepare.encoder import open_encoder
from recjax.lab.formats import FORMATS, kineto, read_trace
from recjax.lab.simulate import calibrated
from recjax.lab.studies.finished import Finished
from recjax.planning import product_table
from recjax.serving import loader
from recjax.serving.requests import BadRequestError, EncodedColumns, RequestReader
from recjax.sweep.search_file import read_search
from support import products, shop, traces
from support.fuzz_target import Random, Target, good, texts
from support.serving import export_shop

SEARCH = """\
preset = "synthetic"
overrides = ["train.epochs=2", "train.eval_every=50"]
trials = 30
sampler = "tpe"
warmup = 80_000
[search]
"train.optimizer.learning_rate" = {low = 0.001, high = 1.0, log = true}
"train.batch_size" = {low = 256, high = 1024, step = 256}
embedding.dim = [8, 16, 32]
"""
POINT = {"bytes": 1000, "last_us": 20.5, "done_us": 21}
UNEVEN = POINT | {"between_bytes": 4096, "skew_us": 3.5, "arrays": 1, "followed": False, "between_us": 0}
SWEEP = {
    "device": "cpu",
    "devices": 4,
    "collectives": {
        "all_reduce": {
            "points": [POINT, POINT | {"bytes": 8000, "last_us": 60}],
            "uneven": [UNEVEN, UNEVEN | {"arrays": 3, "bytes": 3000}, UNEVEN | {"followed": True, "between_us": 9}],
        }
    },
}
SETUP = {"ranks": 8, "machine": "m", "full": False}


def write_json(of: dict[str, Any]) -> Callable[[Path], None]:
    """Writes files, each a JSON value."""
    return texts({name: json.dumps(value) for name, value in of.items()})


def write_trace(folder: Path, size: int = 0, format: str = "recjax") -> None:
    """A trace of about so many bytes."""
    traces.save(traces.longer(traces.by_hand(), 1 + size // 4000), folder, format)


def write_study(folder: Path) -> None:
    """A study of which two parts are done."""
    study = Finished(folder, SETUP, "study")
    for part in ("a", "b"):
        study.get(part, lambda: {"time_ns": 3.5, "layers": [1, None]})


def export(folder: Path) -> None:
    """An export of an untrained model."""
    with tempfile.TemporaryDirectory() as around:
        export_shop(Path(around)).rename(folder / "e")


def renew_checksum(folder: Path, rng: Random) -> None:
    """Lets the manifest have its own checksum, as if somebody had written it so."""
    file = folder / "e" / "manifest.json"
    if rng.random() < 0.3:
        return
    try:
        manifest = json.loads(file.read_text())
        file.write_text(json.dumps(manifest | {"sha256": loader.own_checksum(manifest)}))
    except (ValueError, TypeError, RecursionError, OSError):
        return


def write_request(folder: Path) -> None:
    """A request for three of the shop's rows."""
    rows = shop.rows()[:3]
    (folder / "r.json").write_text(json.dumps({"user": {}, "candidates": rows}))


@functools.cache
def _requests() -> RequestReader:
    with tempfile.TemporaryDirectory() as folder:
        encoder = open_encoder(shop.prepare_shop(Path(folder) / "data").path)
    features = [{"name": feature.name, "side": "candidate"} for feature in encoder.features]
    inputs = {"dense": {"columns": list(encoder.dense)}, "features": features}
    return RequestReader(EncodedColumns(encoder, {}), inputs, most=600)


def read_request(folder: Path) -> None:
    """Reads a request, whose text is no file for the server."""
    file = folder / "r.json"
    if file.is_file():
        _requests().read(file.read_bytes())


TARGETS: dict[str, Target] = {
    **{
        f"trace, {name}": Target(
            functools.partial(write_trace, format=name),
            read_trace,
            zipped=name != "chakra-et",
            grow=functools.partial(write_trace, format=name),
        )
        for name in FORMATS
    },
    "trace, PyTorch's": Target(write_json({f"{r}.json": traces.pytorch(r) for r in (0, 1)}), read_trace, zipped=True),
    "trace, chakra-graph": Target(
        write_json({f"trace.{r}.json": traces.chakra_graph(r) for r in (0, 1)}), read_trace, zipped=True
    ),
    "profile, Kineto": Target(write_json({f"{r}.json": traces.profile(r) for r in (0, 1)}), kineto.read, zipped=True),
    "replay sweep": Target(write_json({"s.json": SWEEP}), lambda folder: calibrated.read_sweep(folder / "s.json")),
    "search, TOML": Target(texts({"s.toml": SEARCH}), lambda folder: read_search(folder / "s.toml")),
    "study folder": Target(write_study, lambda folder: Finished(folder, SETUP, "study")),
    "products": Target(
        lambda folder: products.write_table(folder / "p.json", products.times()),
        lambda folder: product_table.read(folder / "p.json"),
    ),
    "export": Target(
        good("export", export), lambda folder: loader.load(folder / "e"), renew_checksum, refusals=(loader.ExportError,)
    ),
    "export manifest": Target(
        good("export", export),
        lambda folder: loader.read_manifest(folder / "e"),
        renew_checksum,
        refusals=(loader.ExportError,),
    ),
    "request": Target(write_request, read_request, refusals=(BadRequestError,)),
}
