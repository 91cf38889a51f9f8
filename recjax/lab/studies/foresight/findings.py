"""The report of a campaign: errors of predictions beside published ones, rankings of plans, signs of changes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recjax.lab.studies.foresight import published
from recjax.lab.studies.foresight.analysis import VARIANTS
from recjax.lab.studies.foresight.draw import ERRORS, PLANS
from recjax.lab.studies.report import Picture, Report, Row, Section, Table
from recjax.planning.predict import outside_text


def report(result: Mapping[str, Any], about: Mapping[str, Any], pictures: Sequence[Picture]) -> Report:
    """The report of `study.study`; `about` is of `report.provenance`, and pictures of `draw.pictures`."""
    rows = [*_errors(result), *_rankings(result["rankings"]), *_signs(result["signs"])]
    drawn = {picture.name: [picture] for picture in pictures}
    errors = Table("predicted over measured time", _error_rows(result["errors"]), (0, 1))
    sections = [Section("Errors", _conditions(result), [errors] if result["errors"] else [], drawn.get(ERRORS, ()))]
    if result["rankings"]:
        sections.append(Section("Plans", (), [_plan_table(row) for row in result["rankings"]], drawn.get(PLANS, ())))
    if result["signs"]["changes"]:
        sections.append(Section("Changes", (), [_change_table(result["signs"])]))
    assumptions: tuple[str, ...] = ()
    if found := result["published"]:
        rows += published.rows("model A", found["rows"])
        assumptions = tuple(f"Model A: {text}." for text in found["assumptions"])
        note = f"Forward products of the preset: {found['mflop_per_sample']:,.0f} MFLOP a sample."
        sections.append(Section("Model A", (note,), [_published(found)]))
    if result["refused"]:
        sections.append(Section("Refused", [f"{name}: {why}" for name, why in result["refused"].items()]))
    return Report(
        "foresight",
        "Predictions of step times against measurements",
        "Z. Lin et al. (arXiv:2201.07821): building a performance model for deep learning recommendation model "
        "training on GPUs; C.-H. Chu et al. (Meta): workload model A on 128 V100",
        {**about, **{key: result["about"][key] for key in ("machine", "seed", "complete", "cases", "done", "device")}},
        rows,
        assumptions,
        sections,
    )


def _conditions(result: Mapping[str, Any]) -> list[str]:
    about = result["about"]
    note = about["calibration"].get("note", "")
    on = f"{about['machine']}{f' ({note})' if note else ''}"
    found = [f"Predicted on {on}; {about['done']} of {about['cases']} cases done."]
    if far := outside_text(result["outside"]):
        most = max(row["cases"] for row in result["outside"])
        found.append(f"In up to {most} cases {far}, where that is most: errors say little of a full calibration.")
    if speeds := about["slower"]:
        found.append(
            "Models that the calibration had trained were trained by turns with every case. They took "
            f"{min(speeds):.2f} to {max(speeds):.2f} times as long as then (middle {statistics.median(speeds):.2f}), "
            "and measured times are over that, except where it says at whatever speed, and of plans and changes."
        )
    found += [f"{about['caveat']}: say so with every figure."] if about["caveat"] else []
    return found + ([] if about["complete"] else ["Not complete: the same command goes on from here."])


def _errors(result: Mapping[str, Any]) -> Iterator[Row]:
    lin = result["lin"]
    for devices, of in result["errors"].items():
        full, alone = of["step_ms"], of.get("kernels_ms")
        on = f"{devices} device(s)"
        theirs = lin["end_to_end_gmae"]
        by_clock = f"; by the clock {of['by_clock_ms']['gmae']:.1%}" if "by_clock_ms" in of else ""
        yield Row(
            "end to end",
            f"GMAE of a step's predicted time, {on}",
            f"{theirs:.2%} (one V100)",
            f"{full['gmae']:.1%} at the calibration's speed{by_clock}, of {full['points']} cases, the worst "
            f"{full['worst']:.2f}x",
            full["gmae"] <= theirs,
            f"another machine; repeat error of the measurement {of['repeat']:.3f}; the same if no larger, at the "
            "calibration's speed: the source's machine is not shared",
        )
        if alone:
            yield Row(
                "kernels alone",
                f"error of the sum of kernels alone, {on}",
                f"up to {lin['kernels_alone_worst']:.0%}, above that of all",
                f"GMAE {alone['gmae']:.1%}, the worst {alone['worst']:.2f}x; {alone['low']:.0%} too short",
                alone["gmae"] > full["gmae"],
                "the same if above that of the full prediction: what lies between kernels counts",
            )


def _rankings(rankings: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for row in rankings:
        text = f"tau {row['tau']:.2f}, from sizes alone {row['tau_sketch']:.2f}; best plan {row['best']}"
        why = f"noise {row['noise']:.2f}"
        if not math.isnan(row["tau_repeat"]):
            why += f"; tau {row['tau_repeat']:.2f} of two halves of the rounds"
        if row["apart"]:
            why += f"; tau {row['tau_apart']:.2f} over the {row['apart']:.0%} of pairs beyond their noise"
        if "planner" in row:
            why = f"the planner's plan takes {row['planner']:.2f} of the best one's time" + (
                f" and {row['auto']:.2f} of the plain rule's; {why}" if "auto" in row else f"; {why}"
            )
        yield Row(
            "ranking",
            f"order of plans, predicted and measured: {row['workload']} devices",
            "not asked",
            text,
            None,
            why,
        )


def _signs(signs: Mapping[str, Any]) -> Iterator[Row]:
    if not signs["changes"]:
        return
    counts = f"{signs['right']} right, {signs['wrong']} wrong, {signs['within_noise']} within the noise"
    yield Row(
        "changes",
        "signs of changes of a step's time",
        "not asked",
        counts,
        None,
        "noise: two standard errors of the ratio",
    )


def _error_rows(errors: Mapping[str, Any]) -> list[list[str]]:
    table = [["devices", "prediction", "cases", "ratio, mean", "p50", "p90", "worst", "GMAE", "too short"]]
    for devices, variants in errors.items():
        for key, name in VARIANTS.items():
            if key in variants:
                of = variants[key]
                ratios = [f"{of[ratio]:.3f}" for ratio in ("ratio_mean", "ratio_p50", "ratio_p90", "worst")]
                table.append([devices, name, str(of["points"]), *ratios, f"{of['gmae']:.1%}", f"{of['low']:.0%}"])
        table.append([devices, "repeat error of the measurement", "", f"{variants['repeat']:.3f}", *[""] * 5])
    return table


def _plan_table(row: Mapping[str, Any]) -> Table:
    rows = [["plan", "measured, ms", "predicted, ms", "from sizes alone, ms", "repeat error"]]
    for plan in row["plans"]:
        times = (plan[key] for key in ("measured_ms", "predicted_ms", "sketch_ms"))
        name = f"{plan['plan']} (also {', '.join(plan['also'])})" if plan["also"] else plan["plan"]
        rows.append([name, *(f"{ms:.2f}" for ms in times), f"{plan['repeat']:.2f}"])
    return Table(f"{row['workload']} devices", rows)


def _change_table(signs: Mapping[str, Any]) -> Table:
    rows = [["change", "predicted", "measured", "noise", "sign"]]
    for row in signs["changes"]:
        right = "within the noise" if row["right"] is None else "right" if row["right"] else "wrong"
        rows.append([row["change"], *(f"{row[key]:.3f}" for key in ("predicted", "measured", "noise")), right])
    return Table("time of a step over that of its base", rows)


def _published(found: Mapping[str, Any]) -> Table:
    rows = [["model A on 128 V100", "ms a step", "samples/s", "exposed"]]
    speed = found["published"]["samples_per_s"]
    exposed = f"about {found['published']['exposed_share']:.0%}"
    rows.append(["published (Chu et al.)", f"{65_536 / speed * 1e3:.3g}", f"{speed:,.0f}", exposed])
    for row in found["rows"]:
        cells = ["no plan fits", "", ""]
        if row["step_ms"] is not None:
            cells = [f"{row['step_ms']:.3g}", f"{row['samples_per_s']:,.0f}", f"{row['exposed_share']:.0%}"]
        rows.append([row["what"], *cells])
    return Table("", rows)
