"""Numbers of hot rows by turns, beside the one that `embedding.hot.rows=auto` takes by a machine's curves.

Is the choice right? The time of a training step is measured for each number, and for none twice, which shows how much
of a difference is the clock's. Ratios are taken within a round, so that what slows all down counts for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recjax import settings
from recjax.config.run import RunConfig
from recjax.data.source import mean_ids
from recjax.embedding.plan import Plan
from recjax.lab.studies.hot_rows.measure import Arm, Contestant, turns
from recjax.lab.studies.hot_rows.study import Options, about_run
from recjax.lab.studies.report import Report, Row, Section, Table
from recjax.parallel.mesh import MeshConfig, make_mesh
from recjax.planning import hot
from recjax.planning.hot import ranked
from recjax.planning.resolve import resolve
from recjax.train.table_specs import specs
from recjax.utils.files import write_whole

NEAR = 0.05  # more than the shortest step, that a chosen number's may take
Say = Callable[[str], None]


def sweep(config: RunConfig, options: Options, machine: str, out: Path, say: Say) -> dict[str, Any]:
    """Measures steps with numbers of hot rows.

    Args:
      config: data and model.
      options: numbers of rows, as many of which are tried as the memory of `embedding.hot` has room for, and of
        devices; rounds and steps.
      machine: file or name, by whose curves one is chosen.
      out: folder for the plans of the numbers.
      say: called with what is being done.

    Returns:
      JSON values: "about"; "sweeps", for each number of devices "devices", "choice" (of `hot.describe_hot`), "arms"
      and "verdict", see `verdict`. An arm has "rows" (K), "label", "covered", "predicted_us", "ms" and "cpu_ms" (wall
      and CPU time of a step, of each round).

    Raises:
      ConfigError, DataError, DeviceError: as `build_trainer`.
    """
    make_mesh(MeshConfig(max(options.devices), config.mesh.platform))  # the largest first: see there
    own = settings.override(config, [f"embedding.hot.machine={machine}"])
    found = [_on(number, own, options, out, say) for number in options.devices]
    return {"about": about_run(config, options) | {"choice_by": machine}, "sweeps": found}


def _on(devices: int, config: RunConfig, options: Options, out: Path, say: Say) -> dict[str, Any]:
    """One number of devices."""
    config = settings.override(config, [f"mesh.devices={devices}"])
    source = config.data.open()
    tables, features = specs(config, source.schema, mean_ids(source))
    none = settings.override(config, ["embedding.hot.rows=0"])
    plan, _ = resolve(none, source, tables, features, config.mesh.shape)
    say(f"{devices} device(s): counting ids")
    found, presence = ranked(plan, config, source, tables, features, config.mesh.shape)
    copies = hot.copies_of(config, config.mesh.shape)
    chosen = hot.choose(found, presence, settings.override(config, ["embedding.hot.rows=auto"]), copies)
    numbers = sorted({0, chosen.rows, *(count for count in options.rows if count <= chosen.curve[-1].rows)})
    costs = {of.rows: of for of in chosen.curve}
    arms: list[dict[str, Any]] = []
    contestants = []
    for count in [*numbers, 0]:
        label = f"{count:,}" if count or not arms else "none, again"
        choice = hot.choose(found, presence, settings.override(config, [f"embedding.hot.rows={count}"]), copies)
        held = hot.with_hot_rows(plan, choice, tables)
        say(f"{devices} device(s): compiling {label} hot rows")
        contestants.append(_contestant(label, none, held, out / f"plan_{devices}_{count}.json"))
        estimate = costs.get(count) or hot.estimate(count, found, copies, None)
        predicted = estimate.cost if count in costs else None
        arms.append({"rows": count, "label": label, "covered": estimate.covered, "predicted_us": predicted})
    say(f"{devices} device(s): taking turns")
    for arm, times_Rx3 in zip(arms, np.moveaxis(turns(contestants, options.rounds, options.steps), 1, 0), strict=True):
        arm |= {"cpu_ms": times_Rx3[:, 1].tolist(), "ms": times_Rx3[:, 2].tolist()}
    described = hot.describe_hot(chosen)
    return {"devices": devices, "choice": described, "arms": arms, "verdict": verdict(arms, chosen.rows)}


def _contestant(label: str, config: RunConfig, plan: Plan, file: Path) -> Contestant:
    """A way to hold the tables by a plan, which is written to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, plan.to_json().encode())
    return Contestant(Arm(label, ()), settings.override(config, [f"plan={file}"]), 4)


def verdict(arms: list[dict[str, Any]], chosen: int) -> dict[str, Any]:
    """Judges a number of rows by the wall time of a step.

    Args:
      arms: as `sweep` gives them; the first has no hot row, and so has the last.
      chosen: the number.

    Returns:
      "ratios", for each arm the median over rounds of its step over that of the first arm in the same round, "low" and
      "high", the middle half of these; "band", how far the last arm's median or quarter is off 1; "best", the number
      of rows with the least ratio; "chosen_over_best"; "near", whether that is at most `NEAR`; "slower", whether the
      chosen step is slower than the first by more than the band.
    """
    ms_AxR = np.array([arm["ms"] for arm in arms])
    low_A, ratio_A, high_A = np.quantile(ms_AxR / ms_AxR[0], [0.25, 0.5, 0.75], axis=1)
    band = float(np.abs(np.array([low_A[-1], ratio_A[-1], high_A[-1]]) - 1).max())
    at = [arm["rows"] for arm in arms].index(chosen)
    best = int(ratio_A[:-1].argmin())
    over = float(ratio_A[at] / ratio_A[best])
    return {
        "ratios": ratio_A.tolist(),
        "low": low_A.tolist(),
        "high": high_A.tolist(),
        "band": band,
        "best": arms[best]["rows"],
        "chosen_over_best": over,
        "near": over <= 1 + NEAR,
        "slower": bool(ratio_A[at] > 1 + band),
    }


def report(result: Mapping[str, Any], about: Mapping[str, Any]) -> Report:
    """The report of `sweep`; `about` is of `report.provenance`."""
    own = result["about"]
    run = f"{own['model']} on {own['data']}, batches of {own['batch_size']:,}, D={own['dim']}"
    notes = (
        "Wall time of a training step, the next batch being routed meanwhile, of equal batches by turns; medians over "
        "rounds, and over the step without hot rows in the same round, with the middle half. The last line is measured "
        "like the first: its distance is that of the clock.",
    )
    return Report(
        "hot_rows_choice",
        f"The number of hot rows that is chosen, and others: {run}",
        "P2RES (poster) takes the items that most batches have; how many is not stated",
        about,
        [row for line in result["sweeps"] for row in _rows(line)],
        notes,
        [
            Section(f"{line['devices']} device(s)", (line["choice"]["why"],), [_table(line)])
            for line in result["sweeps"]
        ],
    )


def _rows(line: Mapping[str, Any]) -> Iterator[Row]:
    found, on = line["verdict"], f"{line['devices']} device(s)"
    chosen = line["choice"]["rows"]
    yield Row(
        "choice",
        f"step with the chosen number over the shortest one, {on}",
        "not stated",
        f"{found['chosen_over_best']:.3f} ({chosen:,} chosen, {found['best']:,} shortest)",
        None,
        f"{'at most' if found['near'] else 'more than'} {1 + NEAR:.2f}; band of the clock {found['band']:.1%}",
    )


def _table(line: Mapping[str, Any]) -> Table:
    rows = [
        ["hot rows", "ids covered", "ms a step", "over none", "middle half", "CPU ms", "tables' part, predicted us"]
    ]
    found = line["verdict"]
    for n, arm in enumerate(line["arms"]):
        predicted = "" if arm["predicted_us"] is None else f"{arm['predicted_us']:,.0f}"
        mark = " <-" if arm["rows"] == line["choice"]["rows"] and n + 1 < len(line["arms"]) else ""
        rows.append(
            [
                arm["label"],
                f"{arm['covered']:.1%}",
                f"{np.median(arm['ms']):.2f}",
                f"{found['ratios'][n]:.3f}",
                f"{found['low'][n]:.3f} to {found['high'][n]:.3f}",
                f"{np.median(arm['cpu_ms']):.1f}",
                predicted + mark,
            ]
        )
    return Table(f"band of the clock {found['band']:.1%}", rows)
