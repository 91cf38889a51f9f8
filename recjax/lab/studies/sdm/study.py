"""The study of inference from disk, after Ardestani et al. ("software defined memory", 2021).

Its question: what does it cost in requests a second and in latency to keep the tables of users on a disk, with a
cache of rows and one of pooled bags, and what does the memory that this saves mean in power? Here an untrained DLRM
with int8 rows is exported twice, with these tables on disk and in memory, and asked for scores of one user and many
candidates, of a few requests at once where these wait; the next ones' rows are read while the model runs. That is the
store and the model, without JSON and HTTP, which `recjax bench --serve` measures.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recjax.errors import ConfigError
from recjax.lab.studies.finished import Finished
from recjax.lab.studies.sdm import measure, power
from recjax.lab.studies.sdm.workload import Size, Workload, export_both
from recjax.serving import loader
from recjax.serving.loader import Model
from recjax.serving.requests import Scorable
from recjax.serving.scoring import Scorer
from recjax.tiers.records import UNITS

LOADED = 0.7  # of the lower of both bounds: the rate at which latencies are measured
TOGETHER = 8  # requests at most, of those that wait, which are served at once
_COUNTED = 2500  # requests for each second of a measurement whose hits are counted, and as many before


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of the study.

    Attributes:
      size: of tables and requests.
      shares: cache sizes, as shares of the tables' rows, at least one.
      seconds: of each measurement.
    """

    size: Size = Size()
    shares: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)
    seconds: float = 4.0

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ConfigError("--shares takes shares of the tables above 0 and up to 1, as in 0.05,0.1.")
        if not 0 < self.seconds <= 600:
            raise ConfigError(f"--seconds is {self.seconds}; give up to 600.")


def study(out: Path, options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures everything.

    Args:
      out: folder; exports go to `out`/exports, and are taken from there if they are of this size.
      options: what to measure.
      say: takes a line about what is done.

    Returns:
      JSON values: "size", "same_bits", "pooled_error", "table_bytes", "bounds", "sweep", "units", "pooled",
      "memory_qps", "power".

    Raises:
      ConfigError: flatbuffers is not installed, or the folder holds exports of another size.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError("the study exports a model, which needs flatbuffers. Install the extra `export`.")
    say(f"writing the tables, {options.size.tables} of {options.size.rows:,} rows")
    folders = export_both(options.size, out / "exports")
    workload = Workload(options.size)
    asked = [workload.request(user) for user in workload.users(400).tolist()]
    bench = Bench(workload, asked, options.seconds)
    memory = bench.scorer(loader.load(folders[1], verify=False))
    plain = loader.load(folders[0], cache_bytes=1)
    pooled = loader.load(folders[0], cache_bytes=1, pooled_bytes=1)
    parts = Finished(out, dataclasses.asdict(options), "sdm")
    found: dict[str, Any] = {"size": dataclasses.asdict(options.size)}
    found |= parts.get("scores", lambda: _compared(memory, plain, pooled, bench))
    found["table_bytes"] = bench.table_bytes(plain)
    say("measuring the bounds: the disk, and the processor with all rows in the cache")
    files = list(plain.stores.files.values())

    def bounds() -> dict[str, Any]:
        iops = {str(unit): measure.records_per_s(files, unit, options.seconds) for unit in UNITS}
        return {"memory_qps": bench.closed(memory), "bounds": {"iops": iops, "cached_qps": bench.cached(plain)}}

    found |= parts.get("bounds", bounds)
    iops = found["bounds"]["iops"][str(UNITS[0])]

    def at(name: str, model: Model, share: float, unit: int = UNITS[0], **more: float) -> dict[str, Any]:
        say(name)
        measured: dict[str, Any] = parts.get(name, lambda: bench.at(model, share, unit, **more))
        return measured

    found["sweep"] = [at(f"a cache of {share:.0%} of the rows", plain, share, iops=iops) for share in options.shares]
    middle = min(options.shares, key=lambda share: abs(share - 0.1))
    rate = next(line["open"]["qps"] for line in found["sweep"] if line["share"] == middle)
    found["units"] = [at(f"reads of {unit} bytes", plain, middle, unit, qps=rate) for unit in UNITS]
    found["pooled"] = [
        at("bags: none from a cache", plain, middle, qps=rate),
        at("bags in half of the cache", pooled, middle / 2, qps=rate, pooled_share=middle / 2),
        at("bags beside the cache", pooled, middle, qps=rate, pooled_share=middle),
    ]
    found["power"] = [power.saved(scenario) for scenario in power.PAPER]
    return found


def _compared(memory: Scorer, plain: Model, pooled: Model, bench: Bench) -> dict[str, Any]:
    """Returns whether scores have the bits of tables in memory, and how far those of pooled bags are off."""
    scorers = [bench.scorer(model) for model in (plain, pooled)]
    same, error = True, 0.0
    for request in bench.asked[:50]:
        (truth,), (rows,), (bags,) = memory([request]), *(scorer([request]) for scorer in scorers)
        same &= bool(np.array_equal(truth, rows))
        error = max(error, float(np.abs(bags - truth).max()))
    return {"same_bits": same, "pooled_error": error}


@dataclasses.dataclass
class Bench:
    """Measures models on one workload.

    Attributes:
      workload: users and requests.
      asked: requests that are sent, over and over.
      seconds: of each measurement.
    """

    workload: Workload
    asked: list[Scorable]
    seconds: float

    def scorer(self, model: Model) -> Scorer:
        """Runs a model on as many requests as are served at once."""
        return Scorer(model, TOGETHER * self.workload.size.candidates)

    def closed(self, scorer: Scorer) -> float:
        """Requests a second of a scorer, one after the other."""
        scorer([self.asked[0]])
        return measure.closed_loop(scorer.start, self.asked, self.seconds, batches=1)

    def cached(self, model: Model) -> float:
        """Requests a second, `TOGETHER` at a time, with all rows in the cache."""
        file = next(iter(model.stores.files.values()))
        measure.fill(model, self.workload, file.records * (file.row_bytes + 5), file.unit, 0)
        scorer = self.scorer(model)
        scorer(self.asked[:TOGETHER])
        return measure.closed_loop(scorer.start, self.asked, self.seconds, TOGETHER)

    def table_bytes(self, model: Model) -> int:
        """Bytes of the encoded rows of the tables on disk."""
        return sum(file.records * file.row_bytes for file in model.stores.files.values())

    def _fresh(self) -> list[Scorable]:
        """Requests that were not sent before, about as many as are answered in a measurement."""
        return [self.workload.request(user) for user in self.workload.users(int(1500 * self.seconds) + 100).tolist()]

    def at(
        self,
        model: Model,
        share: float,
        unit: int,
        iops: float = 0.0,
        qps: float = 0.0,
        pooled_share: float = 0.0,
    ) -> dict[str, Any]:
        """Measures one setting of the caches.

        Args:
          model: with its tables on disk.
          share: of the rows that the cache has room for.
          unit: bytes of a read.
          iops: records a second that the disk gives: one bound. The other are requests a second, `TOGETHER` at a time,
            as fast as they are answered. Of the lower one `LOADED` is the rate for latencies.
          qps: that rate, where the bounds are of no interest.
          pooled_share: bytes of each table's cache of bags, as a share of its rows' bytes.

        Returns:
          {"share", "unit", "pooled_share", "closed_qps", "cpu_ms" (of a request, all threads), "hit_rate",
          "offline_hit_rate", "bag_hit_rate", "misses_per_request", "bytes_read_per_request", "dram_saved",
          "bound_qps", "open"}.
        """
        file = next(iter(model.stores.files.values()))
        of_one = file.records * (file.row_bytes + 5)
        rows_bytes, bags_bytes = int(share * of_one), int(pooled_share * of_one)
        settling = min(500, int(125 * self.seconds) + 1)
        measure.fill(model, self.workload, rows_bytes, unit, settling, bags_bytes)
        counted = int(_COUNTED * self.seconds) + 1
        hits, offline = (None, None) if bags_bytes else measure.hit_rates(model, self.workload, counted, counted)
        scorer = self.scorer(model)
        scorer.warm_up()
        # Other requests than those that are timed: rows of a few hundred requests over and over would all be hits.
        asked = self._fresh()
        measure.reset(model)
        before, cpu_s = sum(file.units_read for file in model.stores.files.values()), time.process_time()
        closed = measure.closed_loop(scorer.start, asked, self.seconds, batches=1)
        count = measure.counted(model)
        cpu_s = time.process_time() - cpu_s
        served = closed * self.seconds
        misses = count["misses"] / served
        read = (sum(file.units_read for file in model.stores.files.values()) - before) * unit / served
        bags = count["bags_hit"] + count["bags_missed"]
        line = {
            "share": share,
            "unit": unit,
            "pooled_share": pooled_share,
            "closed_qps": closed,
            "cpu_ms": 1e3 * cpu_s / served,
            "hit_rate": count["hits"] / max(1, count["hits"] + count["misses"]) if hits is None else hits,
            "offline_hit_rate": offline,
            "bag_hit_rate": count["bags_hit"] / bags if bags else None,
            "misses_per_request": misses,
            "bytes_read_per_request": read,
            "dram_saved": 1 - len(model.stores.files) * (rows_bytes + bags_bytes) / self.table_bytes(model),
        }
        asked = self._fresh()
        if not qps:
            most = measure.closed_loop(scorer.start, asked, self.seconds, TOGETHER)
            line["bound_qps"] = min(most, iops / misses if misses else most)
            qps = LOADED * line["bound_qps"]
        line["open"] = measure.open_loop(scorer.start, asked, qps, self.seconds, 0, TOGETHER)
        return line
