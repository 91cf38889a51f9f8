"""The study of predictions: figures by hand, cases drawn by a seed, and a campaign that goes on where it was."""

import dataclasses
import json
import math

import pytest
from support.commands import assert_refused, inside
from support.machines import MACHINE

from recjax.errors import ConfigError
from recjax.lab.predict import in_training
from recjax.lab.studies.finished import RECORDS, Finished
from recjax.lab.studies.foresight import cases, findings, measure, published, study
from recjax.lab.studies.foresight.analysis import Found, errors, kendall_tau, outside, rankings, signs
from recjax.planning.machine import write

pytestmark = pytest.mark.light_compile

TINY = study.Size({1: 2, 2: 1}, 0, 1, 3, 1, (2,), 2, 0.01, True)


def found(name, predicted, *measured, kind="config", base="", devices=1, slower=(), **more):
    passes = [{"step_ms": ms, "cpu_ms": 2 * ms, "others": 0.0} for ms in measured]
    for one, times in zip(passes, slower, strict=False):
        one["slower"] = times
    return Found(kind, name, base, devices, {"step_ms": predicted, "sketch_ms": predicted, **more}, passes)


def test_errors_are_ratios_of_medians():
    of = errors([found("a", 2.0, 1.0, 1.0, 3.0, kernels_ms=0.5), found("b", 1.0, 4.0, kernels_ms=4.0)])["1"]
    assert of["step_ms"]["ratio_mean"] == pytest.approx(math.sqrt(2 * 4)) and of["step_ms"]["worst"] == 4
    assert of["step_ms"]["low"] == 0.5 and of["kernels_ms"]["ratio_mean"] == pytest.approx(math.sqrt(2))
    assert of["repeat"] == pytest.approx(math.sqrt(3 * 1)) and "cpu_ms" not in of
    cpu = errors([found("a", 1.0, 1.0, cpu_ms=2.0)])["1"]["cpu_ms"]
    assert cpu["ratio_mean"] == 1  # against the CPU time


def test_steps_are_compared_at_the_speed_that_the_machine_had_in_the_calibration():
    """The references took twice as long, then four times; so did the model, whose step is predicted right."""
    one = found("a", 3.0, 6.0, 12.0, slower=(2.0, 4.0), cpu_ms=6.0)
    of = errors([one])["1"]
    assert of["step_ms"]["worst"] == 1 and of["by_clock_ms"]["worst"] == 3 and of["cpu_ms"]["worst"] == 1
    assert one.measured() == 3 and one.repeat == of["repeat"] == 1
    assert "by_clock_ms" not in errors([found("a", 3.0, 6.0, 12.0, slower=(2.0,))])["1"]  # not known of all passes


def test_classes_far_outside_are_counted_over_cases():
    sort, copy = ({"kernel": name, "times": times, "share": 0.1} for name, times in (("sort", 10.0), ("copy", None)))
    of = outside(
        [found("a", 1, 1, outside=[sort, copy]), found("b", 1, 1, outside=[copy | {"share": 0.5}]), found("c", 1, 1)]
    )
    assert of == [copy | {"cases": 2, "share": 0.5}, sort | {"cases": 1}]


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3], [1, 3, 2], 1 / 3),
        ([1, 1, 2], [1, 2, 3], 2 / math.sqrt(2 * 3)),  # tau-b, with one tie
    ],
)
def test_kendalls_tau_of_rankings_by_hand(one, other, tau):
    assert kendall_tau(one, other) == pytest.approx(tau)


def test_rankings_say_how_good_the_planners_choice_is():
    plans = {"auto": (10, 12.0), "planner": (8, 11.0), "copies": (9, 10.0)}
    (row,) = rankings([found(f"few on 2: {name}", p, m, kind="plan") for name, (p, m) in plans.items()])
    assert row["workload"] == "few on 2" and row["best"] == "copies" and row["tau"] == pytest.approx(1 / 3)
    assert row["planner"] == pytest.approx(1.1) and row["auto"] == pytest.approx(11 / 12)
    assert row["planner_is_best"] is False and row["noise"] == 1


def test_plans_that_make_one_program_are_one_plan_that_was_measured_more_often():
    """By hand: passes of 10 and 10 e^0.2, 20 and 20 e^0.2: a deviation of 0.1 sqrt(2) of one of them, pooled."""
    up = math.exp(0.2)
    row = rankings(
        [
            found("few on 2: auto", 9.0, 10.0, kind="plan", program="a"),
            found("few on 2: planner", 9.0, 10.0 * up, kind="plan", program="a"),
            found("few on 2: copies", 6.0, 20.0, 20.0 * up, kind="plan", program="b"),
            found("few on 2: rows", 7.0, 12.5, kind="plan", program="c"),
        ]
    )[0]
    assert [(plan["plan"], plan["also"]) for plan in row["plans"]] == [
        ("planner", ["auto"]),
        ("rows", []),
        ("copies", []),
    ]
    assert row["best"] == "planner" and row["planner"] == row["auto"] == 1
    assert row["noise"] == pytest.approx(math.exp(2 * 0.1 * math.sqrt(2)))
    # Copies differ from both by more than that; rows do not from the planner's: exp(2 x 0.141 x sqrt(1/2 + 1)) = 1.41.
    assert row["apart"] == pytest.approx(2 / 3) and row["tau_apart"] == -1 and row["tau"] == -1


def test_how_well_two_halves_of_the_rounds_agree_on_a_ranking():
    """Rounds 1 and 3 find the order a, b, c, rounds 2 and 4 the order a, c, b: of three pairs two agree."""
    of_rounds = {"a": (1.0, 1.0, 1.1, 1.1), "b": (2.0, 3.0, 2.1, 3.1), "c": (3.0, 2.0, 3.1, 2.1)}
    plans = [found(f"few on 2: {name}", of[0], *of, kind="plan") for name, of in of_rounds.items()]
    assert rankings(plans)[0]["tau_repeat"] == pytest.approx(1 / 3)
    once = [found(f"few on 2: {name}", of[0], of[0], kind="plan") for name, of in of_rounds.items()]
    assert math.isnan(rankings(once)[0]["tau_repeat"])


def changed(name, predicted, *over_base):
    one = found(name, predicted, *over_base, kind="change", base="base")
    for of_round, ratio in zip(one.passes, over_base, strict=True):
        of_round["over_base"] = ratio
    return one


def test_signs_count_only_what_is_beyond_the_noise():
    """By hand: logarithms 0.1 and 0.3 have the mean 0.2, and a standard error of 0.1."""
    base = found("base", 10.0, 10.0)
    some, up = [math.exp(x) for x in (0.1, 0.3)], [math.exp(x) for x in (0.2, 0.3)]
    of = signs([base, changed("right", 20.0, *up), changed("wrong", 8.0, *up), changed("noise", 20.0, *some)])
    assert (of["right"], of["wrong"], of["within_noise"]) == (1, 1, 1)
    row = of["changes"][2]
    assert row["measured"] == pytest.approx(math.exp(0.2)) and row["noise"] == pytest.approx(math.exp(0.2))
    assert row["predicted"] == 2 and [row["right"] for row in of["changes"]] == [True, False, None]


def test_cases_are_drawn_by_the_seed_alone_and_more_of_them_begin_alike():
    few, many, other = (list(cases.configs(n, 2, seed)) for n, seed in ((3, 1), (12, 1), (12, 2)))
    assert few == many[:3] and many != other
    assert {config.model.kind for config in many} == {"dlrm", "dcnv2"}
    assert {config.compute_dtype for config in many} == {"float32", "bfloat16"}
    assert all(256 <= config.train.batch_size <= 16_384 and 4 <= config.embedding.dim <= 128 for config in many)
    every = cases.cases({1: 2, 2: 1}, 2, 1, 20, 5, (2, 8), "machine.json", 0)
    assert [case.name for case in every[:3]] == ["bench_kaggle16 on 1", "bench_mlperf64 on 1", "config 0 on 1"]
    assert sum(case.kind == "plan" for case in every) == 200  # 20 plans x 5 workloads x {2, 8} devices
    assert len({case.name for case in every}) == len(every)
    assert {case.base for case in every if case.kind == "change"} == {"config 0 on 2"}


@pytest.fixture
def faked(monkeypatch):
    """Returns what would be measured and predicted, without doing it."""
    calls = []

    def fake(config, *_):
        calls.append(config)
        ms = float(len(calls))
        return {
            "step_ms": ms,
            "sketch_ms": ms,
            "kernels_ms": ms / 2,
            "no_overhead_ms": ms / 2,
            "cpu_ms": ms,
            "steps": 5,
            "others": 0.5,
        }

    monkeypatch.setattr(measure, "foreseen", fake)
    monkeypatch.setattr(measure, "measured", fake)

    def by_turns(configs, rounds, _):
        return [[fake(config) | {"round_slower": 1.0} for _ in range(rounds)] for config in configs]

    monkeypatch.setattr(measure, "by_turns", by_turns)
    return calls


def test_a_campaign_goes_on_where_it_was_and_refuses_other_settings(tmp_path, faked):
    all_cases = cases.cases(TINY.configs, 0, 0, 0, 0, (), "", 0)
    assert study.run(Finished(tmp_path, {"seed": 0}, "trial"), all_cases, MACHINE, 2, 0.1, 0, lambda text: None, None)
    assert len(faked) == 3 * 3  # a prediction and two passes of each
    lines = (tmp_path / RECORDS).read_text().splitlines()
    (tmp_path / RECORDS).write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # killed while writing
    kept = Finished(tmp_path, {"seed": 0}, "trial")
    assert len(kept.results) == 8
    assert study.run(kept, all_cases, MACHINE, 2, 0.1, 0, lambda text: None, None) and len(faked) == 10
    with pytest.raises(ConfigError, match="other settings"):
        Finished(tmp_path, {"seed": 1}, "trial")


END_TO_END = "22.4% at the calibration's speed, of 2 cases, the worst 2.00x"


def test_the_report_sets_errors_beside_published_ones():
    """Predictions 5% and 100% off: a geometric mean of sqrt(0.05 x 1); kernels alone are 75% off in both cases."""
    configs = [found("a", 1.05, 1.0, 1.0, kernels_ms=0.25), found("b", 2.0, 1.0, 1.0, kernels_ms=0.25)]
    plans = [found(f"few on 2: {name}", p, m, kind="plan") for name, p, m in (("auto", 1, 1.0), ("planner", 2, 2.0))]
    about = {
        "machine": "here",
        "calibration": {},
        "seed": 0,
        "complete": False,
        "cases": 9,
        "done": 2,
        "caveat": "",
        "slower": [1.0, 1.5, 0.9],
        "device": "cpu",
    }
    model_a = [
        {"what": "slow", "step_ms": 100.0, "samples_per_s": 1e6, "exposed_share": 0.8},
        {"what": "large", "step_ms": None},
    ]
    far = {"kernel": "sort", "share": 0.25}
    foreseen = [found(n, 1.0, 1.0, outside=[far | {"times": t}]) for n, t in (("a", 9.0), ("b", 30.0))]
    result = {
        "about": about,
        "errors": errors(configs),
        "outside": outside(foreseen),
        "rankings": rankings(plans),
        "signs": signs(configs),
        "refused": {"c": "too large"},
        "lin": published.LIN,
        "published": {"rows": model_a, "assumptions": ["x"], "mflop_per_sample": 640.0, "published": published.MODEL_A},
    }
    report = findings.report(result, {}, [])
    rows = {row.figure: row for row in report.rows if row.quantity != "samples/s"}
    assert rows["end to end"].same is False and rows["end to end"].ours == END_TO_END
    assert (
        rows["kernels alone"].same is True
        and "GMAE 75.0%, the worst 4.00x; 100% too short" in rows["kernels alone"].ours
    )
    assert rows["ranking"].ours.startswith("tau 1.00") and "takes 2.00 of the best one's" in rows["ranking"].why
    speeds = [row for row in report.rows if row.quantity == "samples/s"]
    assert [(row.same, row.ours) for row in speeds] == [(True, "1,000,000 (predicted)"), (False, "no plan fits")]
    assert rows["model A"].same is False  # 80% against 40%
    assert [section.title for section in report.sections] == ["Errors", "Plans", "Model A", "Refused"]
    notes = report.sections[0].notes
    assert "Not complete: the same command goes on from here." in notes
    assert any("took 0.90 to 1.50 times as long as then (middle 1.00)" in note for note in notes)
    assert notes[1].startswith("In up to 2 cases far outside") and "sort (by a factor of up to 30, 25%" in notes[1]


def test_programs_are_compared_by_turns_each_once(tmp_path, faked, monkeypatch):
    """Two of three plans make one program; a changed config is refused; a change measured alone does not count."""
    all_cases = cases.cases({2: 1}, 0, 1, 3, 1, (2,), "machine.json", 0)
    _, load = next(cases.workloads(2))
    foreseen, asked = measure.foreseen, []

    def alike(config, *more):
        if config.train.bucket_mib == 1:
            raise ConfigError("too small")
        same = config.data == load.data and not config.planner.machine  # not the planner's
        return foreseen(config, *more) | ({"program": "one"} if same else {})

    def by_turns(configs, rounds, seconds):
        asked.append((len(configs), rounds, seconds))
        one = {"cpu_ms": 1.0, "others": 0.0}
        return [
            [one | {"step_ms": 2.0**place * (1 + n), "round_slower": 1.0 + n} for n in range(rounds)]
            for place in range(len(configs))
        ]

    monkeypatch.setattr(measure, "foreseen", alike)
    monkeypatch.setattr(measure, "by_turns", by_turns)
    kept = Finished(tmp_path, {"seed": 0}, "trial")
    assert study.run(kept, all_cases, MACHINE, 2, 0.8, 0, lambda text: None, None)
    kept.get("a change, 0", lambda: {"case": "config 0 on 2, twice the batch", "pass": 0, "step_ms": 9.0})
    known, refused = study.measured_cases(kept, all_cases)
    of_plans, of_changes = [one for one in known if one.kind == "plan"], [one for one in known if one.kind == "change"]
    compared = len([case for case in all_cases if case.kind == "change" and case.name not in refused]) + 1
    assert sorted(asked) == sorted(2 * [(2, study.ROUNDS, 0.8 / study.ROUNDS), (compared, *asked[0][1:])])
    assert [len(one.passes) for one in of_plans] == [2 * study.ROUNDS, 2 * study.ROUNDS, 0]
    (row,) = rankings(of_plans)
    assert [plan["also"] for plan in row["plans"]] == [["rows"], []] and row[
        "noise"
    ] == 1  # rounds differ by the speed alone
    assert [one.times("over_base")[-1] for one in of_changes] == [2.0 ** (1 + n) for n in range(len(of_changes))]
    assert len(of_changes) == compared - 1 >= 3 and [*refused] == ["config 0 on 2, buckets of 1 MiB"]


def test_passes_at_other_speeds_are_no_noise(tmp_path):
    """Plans of 10 and 11 ms, each to the bit in four rounds of a pass; the second pass took 1.3 times as long."""
    plans = [cases.Case("plan", f"few on 2: {name}", "", next(cases.workloads(2))[1]) for name in ("auto", "rows")]
    kept = Finished(tmp_path, {"seed": 0}, "trial")
    for plan, ms in zip(plans, (10.0, 11.0), strict=True):
        foreseen = {"case": plan.name, "pass": -1, "step_ms": ms, "sketch_ms": ms, "program": plan.name}
        kept.get(f"{plan.name}, -1", lambda foreseen=foreseen: foreseen)
    for number, slower in enumerate((1.0, 1.3)):
        one = {"cpu_ms": 1.0, "others": 0.0, "round_slower": 1.0}  # as each pass by itself has it
        rounds = {plan.name: [one | {"step_ms": ms * slower}] * 4 for plan, ms in zip(plans, (10.0, 11.0), strict=True)}
        kept.get(
            f"few on 2 by turns, {number}", lambda number=number, rounds=rounds: {"pass": number, "by_turns": rounds}
        )
    known, _ = study.measured_cases(kept, plans)
    (row,) = rankings(known)
    assert row["noise"] == pytest.approx(1) and row["apart"] == 1 and row["tau"] == 1
    assert known[1].measured() / known[0].measured() == pytest.approx(1.1)


def test_when_the_references_are_gone_no_case_is_to_blame(tmp_path, faked, monkeypatch):
    """The campaign ends with the reason, and goes on at the same case."""
    all_cases = cases.cases({1: 2}, 0, 0, 0, 0, (), "", 0)
    whole, left = measure.measured, iter([True, False])

    def ends(*how):
        if next(left, True):
            return whole(*how)
        raise in_training.ReferencesEnded("the process has ended")

    monkeypatch.setattr(measure, "measured", ends)
    how = (all_cases, MACHINE, 2, 0.1, 0, lambda text: None, None)
    with pytest.raises(in_training.ReferencesEnded):
        study.run(Finished(tmp_path, {"seed": 0}, "trial"), *how)
    kept = Finished(tmp_path, {"seed": 0}, "trial")
    assert "config 0 on 1, 0" in kept.results and "config 1 on 1, 0" not in kept.results
    assert study.run(kept, *how) and not study.measured_cases(kept, all_cases)[1]


@pytest.mark.full
def test_the_command_reports_draws_and_says_what_was_measured_under_load(tmp_path, faked, monkeypatch):
    monkeypatch.setattr(study, "SMALL", TINY)
    monkeypatch.setattr(
        published,
        "model_a",
        lambda: {
            "published": published.MODEL_A,
            "assumptions": ["x"],
            "mflop_per_sample": 1.0,
            "rows": [{"what": "y", "step_ms": None}],
        },
    )
    write(MACHINE, tmp_path / "given.json")
    out = tmp_path / "out"
    how = ("study", "foresight", "--out", out, "--machine", tmp_path / "given.json")
    done = inside(*how)
    assert done.status == 0, done.err
    says = ("MEASURED UNDER LOAD", "kernels alone", "tau", "signs of changes", "model A on 128 V100", "no plan fits")
    for text in says:
        assert text in done.out
    for picture in ("errors.png", "plans.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "foresight.json").read_text())
    assert result["about"]["complete"] and result["about"]["done"] == result["about"]["cases"]
    assert result["report"]["rows"] and (out / "foresight.html").is_file() and (out / "foresight.md").is_file()
    again = len(faked)
    assert inside(*how, "--json").status == 0 and len(faked) == again  # all was done before
    assert_refused(inside(*how, "--seed", "1"), 2, r"other settings \(seed\)")
    assert_refused(inside(*how, "--full"), 2, r"other settings \(full\)")  # whose parts are of other lengths


@pytest.mark.full
def test_a_step_is_measured_and_predicted(tmp_path):
    _, config = next(cases.workloads(1, "cpu"))
    train = dataclasses.replace(config.train, batch_size=256)
    small = dataclasses.replace(config, train=train, data=dataclasses.replace(config.data, rows=(100, 1000)))
    taken = measure.measured(small, 0.05, None)
    assert taken["steps"] >= 10 and "slower" not in taken and 0 < taken["step_ms"] and 0 < taken["cpu_ms"]

    class Turns:
        """References that took 1.5 times as long as in the calibration."""

        rounds = 0

        def round(self):
            self.rounds += 1

        def slower(self, rounds):
            assert rounds == self.rounds  # all of this case
            return 1.5

    references = Turns()
    assert measure.measured(small, 0.05, references)["slower"] == 1.5
    assert references.rounds == 3  # before, between and after two turns
    foreseen = measure.foreseen(small, MACHINE)
    assert foreseen["no_overhead_ms"] < foreseen["step_ms"] and foreseen["kernels_ms"] < foreseen["step_ms"]
    assert foreseen["sketch_ms"] > 0
