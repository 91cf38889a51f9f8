"""Figure by figure: what the report of UW-Madison shows, and what the study found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recjax.lab.studies import report as reports
from recjax.lab.studies.replica_groups import draw
from recjax.lab.studies.replica_groups.cost import PARTS, PRECISIONS
from recjax.lab.studies.replica_groups.curves import Curves, Spread, milliseconds
from recjax.lab.studies.report import Row

ONE, EXACT, OWN = "1 group, samples random", "2 groups, exact, samples random", "2 groups, own tables, samples random"
PARTED = "2 groups, own tables, samples fixed"
SEEDED = "2 groups, own tables, seeds of their own, samples whole"
ALIKE = "2 groups, own tables, samples whole"
PLATEAU = 0.25  # of the largest change over a third of the training: less in the last one is called a plateau
SETTLED = 0.05  # of the norm: less change in the last third is called settled

ASSUMPTIONS = (
    "A node of the source is a replica group here. Groups share this machine's processors, where nodes had GPUs of "
    "their own: times compare ways to synchronise, not machines.",
    f"A norm is on a plateau if it changes in the last third of a training by less than {PLATEAU:.0%} of its largest "
    f"change over a third; it has settled if it changes there by less than {SETTLED:.0%} of itself.",
    "Samples random: drawn again for the groups in each epoch. Samples fixed (partitioned): each group keeps its part. "
    "Samples by_feature: likewise, and all samples of an item are in one part. Samples whole (not partitioned): every "
    "group meets all samples, in an order of its own.",
    "The widths that the source names for figures 13 and 14 are those of the bottom MLP, where the data have dense "
    "features, and of the top MLP before its logit; batches are of 512 samples a group.",
    "Seeds differ in initial weights, in initial tables and in the order of samples. Given are the mean and, in "
    "brackets, the least and the largest over them.",
    "Accuracy in training is that on the first samples that each group has met, at the parameters of that iteration; "
    "of a cluster, the mean over the groups' own models, each on its own samples.",
)


def rows(result: Mapping[str, Any]) -> list[Row]:
    """The values of the source beside the study's: see `study.study`."""
    curves = Curves(result["trainings"])
    return [*_norms(curves), *_training(curves), *_times(result), *_nodes(curves), *_left_open(result, curves)]


def report(result: Mapping[str, Any]) -> reports.Report:
    """The study for people, from its figures: see `study.study`."""
    curves = Curves(result["trainings"])
    notes = [
        f"{result['about']['model']} on {result['about']['data']}, {result['about']['samples']:,} training samples, "
        f"{result['about']['batch_size_of_a_group']:,} a group and iteration."
    ]
    sections = [
        reports.Section("Trainings", notes, [reports.Table("at the end", _table(curves))], draw.of_trainings(result)),
        reports.Section("Time of an iteration", (), _time_tables(result), draw.of_times(result)),
        reports.Section("Bytes to keep tables synchronous", (), [_byte_table(result)], [draw.of_bytes(result)]),
    ]
    return reports.Report(
        "replicas",
        "Replica groups with tables of their own",
        "UW-Madison, report on distributed DLRM: two nodes, each with embedding tables of its own, synchronise "
        "their MLPs alone",
        result["about"],
        rows(result),
        ASSUMPTIONS,
        sections if result["series"] else [sections[0], sections[2]],
    )


def _norms(curves: Curves) -> Iterator[Row]:
    """Figure 4."""
    for name, what, start, end in (
        (PARTED, "same seed, data partitioned", "0", "rises to a plateau"),
        (SEEDED, "different seeds, not partitioned", "above 0", "settles"),
    ):
        first, last = curves.first(name, "distance"), curves.last(name, "distance")
        growth, drift = curves.growth(name, "distance"), curves.drift(name, "distance")
        if name == PARTED:
            still, text = growth, f"last third {growth.text(2)} of the largest change"
        else:
            still, text = drift, f"last third {drift.text(3)} of the norm"
        there = max(map(abs, still.values)) < (PLATEAU if name == PARTED else SETTLED)
        at_zero = max(first.values) == 0
        quantity = f"norm of E0 - E1 at the start, {what}"
        yield Row("figure 4", quantity, start, first.text(2), at_zero == (start == "0"))
        moving = "" if there else _still_moving(curves, name)
        yield Row("figure 4", f"at the end, {what}", end, f"{last.text(2)}; {text}", there, moving)
        aligned = curves.last(name, "aligned")
        kept = aligned.mean / last.mean
        why = (
            "rotating each table of one node onto the other's takes little away: they differ in what they say"
            if kept > 0.8
            else "much of the norm is a rotation, which says nothing where rows are only multiplied with each other"
        )
        quantity = f"the same after orthogonal (Procrustes) alignment, {what}"
        yield _unstated("figure 4", quantity, f"{aligned.text(2)}, {kept:.0%} of the norm", why)
    if ALIKE in curves.arms:
        ours = f"{curves.last(ALIKE, 'distance').text(2)}, of which aligned {curves.last(ALIKE, 'aligned').text(2)}"
        why = "the part of the norm that the order of samples makes, without other seeds or other samples"
        yield _unstated("figure 4", "at the end, same seed, not partitioned", ours, why)


def _unstated(figure: str, quantity: str, ours: str, why: str = "") -> Row:
    """A value that the source has no number of."""
    return Row(figure, quantity, "not stated", ours, None, why)


def _untried(quantity: str, ours: str, why: str = "") -> Row:
    """A value of something that the source names as future work."""
    return Row("future work", quantity, "not tried", ours, None, why)


def _still_moving(curves: Curves, name: str) -> str:
    way = "grows" if curves.growth(name, "distance").mean > 0 else "falls"
    return f"it still {way} after {int(curves.iterations(name)[-1]):,} iterations"


def _training(curves: Curves) -> Iterator[Row]:
    """Figures 5 and 6, and what the source expects of them."""
    one, cluster = curves.last(ONE, "train_accuracy"), curves.last(PARTED, "own_train_accuracy")
    yield _unstated("figure 5", "accuracy in training, one node, at the end", one.text())
    yield _unstated("figure 6", "accuracy in training, two nodes, at the end", cluster.text())
    for name in interacting(curves):
        arm = curves.arms[name]
        figure, nodes, measure, plain = ("figure 5", "one node", "train_accuracy", ONE)
        if arm["groups"] == 2:
            figure, nodes, measure, plain = ("figure 6", "two nodes", "own_train_accuracy", PARTED)
        test = measure.replace("train_", "")
        quantity = f"the same with the {arm['interaction']} interaction, {nodes}"
        why = (
            f"on the test split {curves.last(name, test).text()}, with the other one {curves.last(plain, test).text()}"
        )
        yield _unstated(figure, quantity, curves.last(name, measure).text(), why)
    for name, prefix, what in (
        (PARTED, "own_", "the nodes' own tables, data partitioned"),
        (OWN, "", "the mean of the nodes' tables, samples at random"),
        (EXACT, "", "tables kept equal (recjax's default)"),
    ):
        for measure, split, theirs in (
            ("train_accuracy", "accuracy in training", "0.5"),
            ("accuracy", "test accuracy", "not stated"),
        ):
            share = curves.share_of_iterations(name, prefix + measure, ONE, measure)
            there = share is not None and share.mean <= 0.55
            yield Row(
                "figures 5-6",
                f"iterations to one node's best {split}, over those that it took: {what}",
                theirs,
                "not reached with every seed" if share is None else share.text(2),
                None if theirs == "not stated" else there,
                "" if there else _sees(name),
            )


def interacting(curves: Curves) -> list[str]:
    """Names of the arms with DLRM's other interaction."""
    return [name for name, arm in curves.arms.items() if arm["interaction"]]


def _sees(name: str) -> str:
    if name == PARTED:
        return "a node's tables learn from its own samples alone, half of all: the other half teaches the MLPs only"
    if name == OWN:
        return "a row that one node alone has met moves by half as much in the mean"
    return "twice the samples of an iteration are not twice the progress: steps are as many, only less noisy"


def _find(result: Mapping[str, Any], label: str, devices: int = 1) -> Mapping[str, Any] | None:
    return next((of for of in result["series"] if of["label"] == label and of["devices"] == devices), None)


def _times(result: Mapping[str, Any]) -> Iterator[Row]:
    """Figures 7 to 12, and section 4.4."""
    one, two = _find(result, "1 group"), _find(result, "1 group", 2)
    own = _find(result, "2 groups, own tables")
    if one is None or own is None or two is None:
        return
    for figure, of, what in (("figure 7", one, "one node"), ("figure 8", own, "two nodes, MLPs synchronised")):
        series, half = of["ms"], len(of["ms"]) // 2
        ratio = milliseconds(series[half:])["median"] / milliseconds(series[:half])["median"]
        ours = f"{_text(series)}; second half {ratio:.2f} of the first"
        yield _unstated(figure, f"time of each iteration, {what}", ours)
    for figure, of, what in (("figure 9", one, "one node"), ("figure 10", own, "two nodes")):
        parts = sorted(((of["parts"][p], p) for p in (*PARTS, "other")), reverse=True)[:3]
        parts.append((of["parts"]["idle"], "idle"))
        shares = ", ".join(f"{p} {ms / of['parts']['total']:.0%}" for ms, p in parts)
        yield _unstated(figure, f"largest parts of an iteration, {what}", shares)
    ratio = milliseconds(own["ms"])["median"] / milliseconds(one["ms"])["median"]
    why = "here the second group also works on the processors of the first: part of this is no synchronisation"
    for of, what, theirs in ((one, "independent", "35 ms"), (own, "synchronised", "55 ms")):
        quantity = f"median iteration, {what}"
        yield Row("figures 11-12", quantity, theirs, _text(of["ms"]), None, "another machine")
    yield Row(
        "figures 11-12", "synchronised over independent", f"{55 / 35:.2f}, so slower", f"{ratio:.2f}", ratio > 1, why
    )
    ratio = milliseconds(two["ms"])["median"] / milliseconds(one["ms"])["median"]
    exchange = two["parts"]["exchange in the group"]
    yield Row(
        "section 4.4",
        "an iteration on two devices over that on one, same batch of a node",
        f"{35 / 8:.1f} (35 ms, 8 ms)",
        f"{ratio:.2f} ({_text(two['ms'])}; {_text(one['ms'])})",
        ratio > 1,
        f"{exchange:.1f} ms of it exchange rows between the two devices"
        + ("" if ratio > 1 else "; two devices here are also twice the threads for products"),
    )


def _text(series: list[float]) -> str:
    of = milliseconds(series)
    return f"{of['median']:.1f} ms ({of['p5']:.1f} to {of['p95']:.1f})"


def _nodes(curves: Curves) -> Iterator[Row]:
    """Figures 13 and 14."""
    shaped = [name for name, arm in curves.arms.items() if arm["shape"]]
    for figure, name in zip(("figure 13", "figure 14"), shaped, strict=True):
        first, second = (curves.last(name, f"accuracy_{g}") for g in range(2))
        apart = Spread(tuple(abs(a - b) for a, b in zip(first.values, second.values, strict=True)))
        shape = curves.arms[name]["shape"]
        what = f"D={shape['dim']}, {'-'.join(map(str, shape['widths']))}"
        why = f"the nodes differ by {apart.text()}"
        yield _unstated(figure, f"test accuracy of node 0, {what}", first.text())
        yield _unstated(figure, f"test accuracy of node 1, {what}", second.text(), why)


def _left_open(result: Mapping[str, Any], curves: Curves) -> Iterator[Row]:
    """Rows on what the source names as future work."""
    exact = curves.last(EXACT, "auc")
    sent = result["bytes"]["2"]["sent"]
    for precision in PRECISIONS:
        name = _averaged(curves, precision)
        every = curves.arms[name]["every"]
        quantity = f"test AUC of tables averaged every {every} iterations in {precision}"
        why = (
            f"tables kept equal: {exact.text()}; a device sends {sent[f'tables {precision}, every 1'] / every:,.0f}"
            f" bytes an iteration, for those {sent['rows float32']:,.0f}"
        )
        yield _untried(quantity, curves.last(name, "auc").text(), why)
    for late in (name for name, arm in curves.arms.items() if arm["delay"]):
        on_time = late.replace(", late gradients", "")
        quantity = f"test AUC with the all-reduce of gradients one iteration late, {late.partition(', late')[0]}"
        why = f"on time: {curves.last(on_time, 'auc').text()}"
        yield _untried(quantity, curves.last(late, "auc").text(), why)
    delayed, own = _find(result, "2 groups, own tables, late gradients"), _find(result, "2 groups, own tables")
    if delayed and own:
        why = f"on time: {_text(own['ms'])}; within one process there is no network whose time could hide"
        yield _untried("median iteration with a late all-reduce", _text(delayed["ms"]), why)
    if "4 groups, exact, samples random" in curves.arms:
        four = curves.share_of_iterations("4 groups, exact, samples random", "accuracy", ONE, "accuracy")
        quantity = "more data: iterations of four nodes with equal tables to one node's best, over those that it took"
        yield _untried(quantity, "not reached with every seed" if four is None else four.text(2))
    ours = "a run goes on from its checkpoint, with every group's tables"
    yield _untried("fault tolerance", ours, "recjax train; another number of groups goes on with the means")


def _averaged(curves: Curves, precision: str) -> str:
    return next(n for n, a in curves.arms.items() if a["sync"] == "average" and a["precision"] == precision)


def _table(curves: Curves) -> list[list[str]]:
    rows = [["training", "test accuracy", "test AUC", "own accuracy", "in training", "norm", "aligned"]]
    for name in curves.arms:
        of = [("accuracy", 4), ("auc", 4), ("own_accuracy", 4), ("train_accuracy", 4), ("distance", 2), ("aligned", 2)]
        cells = [curves.last(name, m).text(d) if curves.get(name, m).size else "" for m, d in of]
        rows.append([name, *cells])
    return rows


def _time_tables(result: Mapping[str, Any]) -> list[reports.Table]:
    parts = (*PARTS, "other", "idle", "total")
    rows = [["ms of an iteration", "devices a group", "median (5 to 95%)", *parts]]
    for of in result["series"]:
        rows.append([of["label"], str(of["devices"]), _text(of["ms"]), *(f"{of['parts'][p]:.2f}" for p in parts)])
    varied = [["varied", "groups", "D", "batch of a group", "tables", *parts]]
    for of in result["times"]:
        words = [of["varied"], str(of["groups"]), str(of["dim"]), f"{of['batch']:,}"]
        varied.append([*words, of["sync"], *(f"{of['ms'][p]:.2f}" for p in parts)])
    return [
        reports.Table("one by one, and the parts of a profile", rows),
        reports.Table("parts, one device a group", varied),
    ]


def _byte_table(result: Mapping[str, Any]) -> reports.Table:
    rows = [["what travels", *(f"{groups} groups" for groups in result["bytes"])]]
    names = next(iter(result["bytes"].values()))["sent"]
    rows += [[name, *(f"{of['sent'][name]:,.0f}" for of in result["bytes"].values())] for name in names]
    return reports.Table("bytes an iteration that the fullest device sends to other groups", rows)
