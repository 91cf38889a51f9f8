"""Requests made up of values that the training data had: to show how one is written, and to measure a service."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.data.arrow import roles
from recjax.data.original_ids import original_ids
from recjax.data.prepare.encoder import open_encoder
from recjax.errors import ConfigError
from recjax.serving.requests import BadRequestError
from recjax.serving.service import Service

_DRAWS = 32  # of a request, until the service takes a row of it
Make = Callable[[np.random.Generator], Any]


class Examples:
    """Draws requests to a service: ids evenly from the vocabularies, numbers with their means and deviations."""

    def __init__(self, service: Service, ids: int = 3) -> None:
        """With so many ids in a jagged bag."""
        self._make, self._reader = _makers(service, ids), service.reader
        self._fields: Mapping[str, str] = service.reader.fields
        of_row = [name for name in service.reader.columns if name not in self._fields]
        self._user = of_row if self._fields else service.reader.user or [service.reader.columns[0]]
        self._rest = [name for name in service.reader.columns if name not in self._user]

    def request(self, rng: np.random.Generator, candidates: int) -> dict[str, Any]:
        """A request of so many candidates, as JSON values; where the service refuses some of them others stand twice.

        It may refuse a row whose values do not keep to the conditions of the data. Where it refuses all that are drawn,
        the request is one of these.
        """
        for _ in range(_DRAWS):
            user = {name: self._make[name](rng) for name in self._user}
            rows = [self._candidate(rng) for _ in range(candidates)]
            if self._takes(user, rows):
                break
            if good := [row for row in rows if self._takes(user, [row])]:
                rows = (good * candidates)[:candidates]
                break
        return {"user": user, "candidates": rows}

    def _candidate(self, rng: np.random.Generator) -> dict[str, Any]:
        if self._fields:  # lists of the elements of a row, of which a candidate is one
            return {field: self._make[name](rng)[0] for name, field in self._fields.items()}
        return {name: self._make[name](rng) for name in self._rest}

    def _takes(self, user: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
        try:
            self._reader.read(json.dumps({"user": user, "candidates": rows}).encode())
        except BadRequestError:
            return False
        return True


def _makers(service: Service, ids: int) -> Mapping[str, Make]:
    """Raw column -> what draws a value of it."""
    inputs = service.signature["inputs"]
    if service.source is None or "encoder" not in service.source.about:
        made: dict[str, Make] = {name: _number(0, 1) for name in inputs["dense"]["columns"]}
        return made | {f["name"]: _rows(f["rows"], f["ids_per_bag"], ids) for f in inputs["features"]}
    encoder, described = open_encoder(service.source.path), service.source.about.get("table")
    stats = encoder.dense_stats
    deviations = np.sqrt(stats.squares / np.maximum(stats.count, 1))
    made = {n: _number(m, d) for n, m, d in zip(encoder.dense, stats.mean, deviations, strict=True)}
    specs = {spec.name: spec for spec in roles.from_json(described)} if described else {}
    for spec in specs.values():
        if spec.role == "vector":
            made[spec.name] = _vector([made.pop(name) for name in spec.dense_names])
        elif spec.role == "part" and spec.kind != "time":
            made[spec.column] = _number(1.7e9 * spec.per_second, 1e7 * spec.per_second)
        elif spec.kind == "time":
            made[spec.columns[0]] = _day
        elif spec.kind == "boolean":
            made[spec.name] = _flag
        elif spec.edges is not None:
            made[spec.name] = _number(spec.edges[0] if spec.edges else 0, 1)
    for feature, map_ in zip(encoder.features, encoder.maps, strict=True):
        if feature.name in specs and specs[feature.name].role in ("part", "cross"):  # made of others
            continue
        if feature.name not in specs or feature.name not in made:
            each = _value(_values(service, feature.name, feature.values, map_.table_rows))
            made[feature.name] = _bag(each, ids) if feature.jagged else each
    return made


def _values(service: Service, name: str, kind: str, rows: int) -> Any:
    """The values of a feature, or some where the data do not list them."""
    try:
        found = original_ids(service.source, name, rows).values()
    except ConfigError:  # hashed
        found = np.arange(rows)
        found = (
            found.astype("U") if kind == "text" else np.strings.zfill(found.astype("U"), 8) if kind == "hex" else found
        )
    return found if len(found) else np.array(["none"] if kind == "text" else ["0"] if kind == "hex" else [0])


def _value(values: Any) -> Make:
    return lambda rng: values[rng.integers(len(values))].item()


def _bag(each: Make, ids: int) -> Make:
    return lambda rng: [each(rng) for _ in range(ids)]


def _rows(rows: int, size: int | None, ids: int) -> Make:
    return lambda rng: rng.integers(rows, size=ids if size is None else size).tolist()


def _vector(each: Sequence[Make]) -> Make:
    return lambda rng: [draw(rng) for draw in each]


def _number(mean: float, deviation: float) -> Make:
    return lambda rng: float(f"{rng.normal(mean, deviation):.6g}")


def _flag(rng: np.random.Generator) -> bool:
    return bool(rng.integers(2))


def _day(rng: np.random.Generator) -> str:
    return str(datetime.date(2026, 1, 1) + datetime.timedelta(days=int(rng.integers(300))))
