"""Figures of a campaign: errors, how plans are ranked, and signs of changes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.planning.machine import HeldOut

VARIANTS = {
    "step_ms": "full prediction",
    "by_clock_ms": "full, at whatever speed",
    "kernels_ms": "kernels alone",
    "no_overhead_ms": "without overheads",
    "sketch_ms": "from sizes alone",
    "cpu_ms": "CPU time",
}


@dataclasses.dataclass(frozen=True)
class Found:
    """A case with its predicted times and the passes that measured it.

    Attributes:
      kind, name, base: as `cases.Case` has them.
      devices: how many.
      predicted: as `measure.foreseen` gives them.
      passes: as `measure.measured` gives them, or rounds of `measure.by_turns`, with "over_base" of a change; none of a
        plan whose program another one has.
    """

    kind: str
    name: str
    base: str
    devices: int
    predicted: Mapping[str, Any]
    passes: Sequence[Mapping[str, Any]]

    def measured(self, what: str = "steady_ms") -> float:
        """The median over passes.

        Args:
          what: "step_ms" or "cpu_ms"; "steady_ms" or "steady_cpu_ms", the same at the speed that the machine had in the
            calibration, or on average in the rounds by turns.
        """
        return float(np.median(self.times(what)))

    @property
    def speed_known(self) -> bool:
        """True if references of the calibration were trained by turns with it, so that its speed then is known."""
        return all("slower" in one for one in self.passes)

    @property
    def repeat(self) -> float:
        """The repeat error: of the passes' step times the largest over the least; 1 of a single pass."""
        times = self.times()
        return max(times) / min(times)

    def times(self, what: str = "steady_ms") -> list[float]:
        """Time of each pass, as `measured` has it of all."""
        steady = {"steady_ms": "step_ms", "steady_cpu_ms": "cpu_ms"}
        if what in steady:
            return [one[steady[what]] / one.get("slower", one.get("round_slower", 1.0)) for one in self.passes]
        return [one[what] for one in self.passes]


def errors(found: Sequence[Found]) -> dict[str, Any]:
    """Errors of predictions, by number of devices and variant.

    Returns:
      number of devices -> variant -> "points", "ratio_mean" (geometric), "ratio_p50", "ratio_p90", "gmae", "worst"
      ratio, and "low", the share of cases that are predicted too short. "cpu_ms" is compared with the CPU time of a
      step, "by_clock_ms" with its time as it was measured, the others with that time; all but "by_clock_ms" at the
      speed of the calibration, where it is known (`Found.speed_known`). Where it is not there is no "by_clock_ms".
      "repeat": geometric mean of the measurements' own repeat errors.
    """
    result: dict[str, Any] = {}
    for devices in sorted({one.devices for one in found}):
        own = [one for one in found if one.devices == devices]
        of: dict[str, Any] = {}
        result[str(devices)] = of
        for variant in VARIANTS:
            key, against = {"cpu_ms": ("cpu_ms", "steady_cpu_ms"), "by_clock_ms": ("step_ms", "step_ms")}.get(
                variant, (variant, "steady_ms")
            )
            pairs = [
                (one.predicted[key], one.measured(against))
                for one in own
                if key in one.predicted and (one.speed_known or variant != "by_clock_ms")
            ]
            if pairs:
                worst = max(max(p / m, m / p) for p, m in pairs)
                low = sum(p < m for p, m in pairs) / len(pairs)
                of[variant] = dataclasses.asdict(HeldOut.of(pairs)) | {"worst": worst, "low": low}
        of["repeat"] = float(np.exp(np.mean([math.log(one.repeat) for one in own])))
    return result


def outside(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Kernel classes that predictions carry on far beyond what was measured, as `recjax.planning.reach` finds them.

    Returns:
      for each class "kernel"; "cases", how many need it; "times" and "share", the largest of these; the class
      first that most cases need.
    """
    of: dict[str, list[Mapping[str, Any]]] = {}
    for case in found:
        for one in case.predicted.get("outside", ()):
            of.setdefault(one["kernel"], []).append(one)
    rows = [
        {
            "kernel": kernel,
            "cases": len(own),
            "times": None if any(one["times"] is None for one in own) else max(one["times"] for one in own),
            "share": max(one["share"] for one in own),
        }
        for kernel, own in of.items()
    ]
    return sorted(rows, key=lambda row: (-row["cases"], -row["share"]))


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings: 1 if all pairs are in the same order, -1 if none is.

    nan where all values of one are equal.
    """
    agree = ties_one = ties_other = pairs = 0
    for (a, x), (b, y) in itertools.combinations(zip(one, other, strict=True), 2):
        pairs += 1
        first, second = np.sign(a - b), np.sign(x - y)
        agree += int(first * second)
        ties_one += first == 0
        ties_other += second == 0
    below = math.sqrt((pairs - ties_one) * (pairs - ties_other))
    return agree / below if below else math.nan


def rankings(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Returns how plans of each workload are ranked. Plans that make the same program are one, with the passes of all.

    Returns:
      for each workload and number of devices "workload"; "plans", each with "plan", "also" (names of those that make
      the same program), "predicted_ms", "sketch_ms", "measured_ms" and "repeat", the fastest measured first; "tau" of
      the prediction of the compiled step and "tau_sketch"; "tau_repeat", that of two halves of the passes with each
      other, how well a measurement of half the length repeats itself, nan where one has none; "apart", the share of
      pairs whose measured times differ by more than their noise, and "tau_apart" of these; "best"; "planner", measured
      time of the planner's choice over the best one's, and "auto", over that of the plain rule; "noise", two standard
      errors of "planner", a ratio, or of the two fastest where there is none (1 where no program was measured twice);
      "planner_is_best", whether it is so within that.
    """
    of: dict[str, list[Found]] = {}
    for one in found:
        of.setdefault(one.name.partition(": ")[0], []).append(one)
    return [_ranking(workload, own) for workload, own in of.items()]


def _ranking(workload: str, found: Sequence[Found]) -> dict[str, Any]:
    programs: dict[str, list[Found]] = {}
    for one in found:
        programs.setdefault(one.predicted.get("program", one.name), []).append(one)
    joined = sorted(((_joined(same), _plan_names(same)) for same in programs.values()), key=lambda it: it[0].measured())
    own, names = [one for one, _ in joined], [of_one for _, of_one in joined]
    named = {name: one for one, of_one in joined for name in of_one}
    times = [one.measured() for one in own]
    predicted = [one.predicted["step_ms"] for one in own]
    spread = _spread(own)
    apart = [
        (faster, slower)
        for faster, slower in itertools.combinations(range(len(own)), 2)
        if times[slower] / times[faster] > _noise(spread, own[faster], own[slower])
    ]
    agree = sum(int(np.sign(predicted[slower] - predicted[faster])) for faster, slower in apart)
    row: dict[str, Any] = {
        "workload": workload,
        "plans": [
            {
                "plan": of_one[0],
                "also": of_one[1:],
                "predicted_ms": one.predicted["step_ms"],
                "sketch_ms": one.predicted["sketch_ms"],
                "measured_ms": one.measured(),
                "repeat": one.repeat,
            }
            for one, of_one in joined
        ],
        "tau": kendall_tau(predicted, times),
        "tau_sketch": kendall_tau([one.predicted["sketch_ms"] for one in own], times),
        "tau_repeat": _tau_of_halves(own),
        "apart": len(apart) / max(1, math.comb(len(own), 2)),
        "tau_apart": agree / len(apart) if apart else math.nan,
        "best": names[0][0],
        "noise": _noise(spread, *own[:2]) if len(own) > 1 else 1.0,
    }
    if "planner" in named:
        chosen = named["planner"]
        noise = _noise(spread, own[0], chosen)
        took = chosen.measured() / times[0]
        row |= {"planner": took, "noise": noise, "planner_is_best": took <= noise}
        if "auto" in named:
            row["auto"] = chosen.measured() / named["auto"].measured()
    return row


def _tau_of_halves(found: Sequence[Found]) -> float:
    """Kendall's tau of what every other pass measured with what the others did; nan where there is one pass only."""
    if any(len(one.passes) < 2 for one in found):
        return math.nan
    return kendall_tau(*([float(np.median(one.times()[first::2])) for one in found] for first in (0, 1)))


def _joined(same: Sequence[Found]) -> Found:
    return dataclasses.replace(same[0], passes=[one for each in same for one in each.passes])


def _plan_names(same: Sequence[Found]) -> list[str]:
    """Names of plans, those that are chosen by rule first."""
    names = [one.name.partition(": ")[2] for one in same]
    return sorted(names, key=lambda name: {"planner": 0, "auto": 1}.get(name, 2))


def _spread(found: Sequence[Found]) -> float:
    """Standard deviation of the logarithm of one pass's time, pooled over cases; 0 if none was measured twice."""
    logs = [np.log(one.times()) for one in found]
    free = sum(len(of_case) - 1 for of_case in logs)
    return math.sqrt(sum(float(np.sum((x - x.mean()) ** 2)) for x in logs) / free) if free else 0.0


def _noise(spread: float, one: Found, other: Found) -> float:
    """Two standard errors of the ratio of two cases' times, as a ratio."""
    return math.exp(2 * spread * math.sqrt(1 / len(one.passes) + 1 / len(other.passes)))


def signs(found: Sequence[Found]) -> dict[str, Any]:
    """Compares the signs of predicted and measured effects of changes.

    Returns:
      "changes", each with "change", "predicted" and "measured", time of a step over that of its base (the geometric
      mean over rounds by turns), "noise", two standard errors of that, a ratio, and "right", None where the measured
      effect is within the noise; "right", "wrong" and "within_noise", counts.
    """
    bases = {one.name: one for one in found if one.kind == "config"}
    rows: list[dict[str, Any]] = []
    for one in found:
        base = bases.get(one.base)
        if one.kind != "change" or base is None:
            continue
        predicted = one.predicted["step_ms"] / base.predicted["step_ms"]
        logs = np.log(one.times("over_base"))
        measured, noise = math.exp(logs.mean()), math.exp(2 * logs.std(ddof=1) / math.sqrt(len(logs)))
        right = (predicted > 1) == (measured > 1) if max(measured, 1 / measured) > noise else None
        rows.append({"change": one.name, "predicted": predicted, "measured": measured, "noise": noise, "right": right})
    counts = {
        name: sum(row["right"] is value for row in rows)
        for name, value in (("right", True), ("wrong", False), ("within_noise", None))
    }
    return {"changes": rows, **counts}
