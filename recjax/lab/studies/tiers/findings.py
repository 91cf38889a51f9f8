"""The report of the study of tables larger than memory: what its source says beside what comes out here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recjax.lab.studies.report import Picture, Report, Row, Section, Table, percent
from recjax.lab.studies.tiers.study import NODES, REUSE_STEPS, RULES
from recjax.utils import plots

SOURCE = (
    "H. T. Kassa et al., MTrainS: Improving DLRM Training Efficiency Using Heterogeneous Memories, arXiv:2305.01515 "
    "(2023)"
)
Lines = list[tuple[str, ...]]
PAPER = (4.0, 8.0)  # times fewer nodes
_FBGEMM = 4.8 / 4.1  # cache of 0.8 of the rows over all in device memory
_ASSUMPTIONS = (
    "The paper was not at hand: its 4 to 8 times are recalled, and so is that it keeps device and host memory as "
    "caches over storage-class memory, and prefetches. Its models and traces are not public.",
    "Ids follow the Zipf law of recjax's benchmarks (exponent 1.1, wrapped around at the rows), bags and tables are "
    "those of the presets bench_model_a, bench_model_f and bench_mlperf_dcnv2; float32 values, row-wise Adagrad.",
    "Nodes count bytes, the bandwidth of device memory, of the link to the host, and of disks; what the dense part "
    "computes, in float32 at 60% of the devices' peak; and of the hosts' memory 8 bytes for each row, and 28 for each "
    "row of a cache, by which rows are found. Rates of the nodes are chosen from data sheets; 80% of each memory is "
    "for rows. Samples a second are published for model A and chosen for the others.",
    "Every row counts, also one that is never named; behind a device there is room for all of them.",
)
_COLORS = (plots.GREY, plots.BLUE, plots.GREEN, plots.ORANGE)


def report(result: dict[str, Any], about: dict[str, Any]) -> Report:
    """Returns the report of `study.study`."""
    sections = [
        _curves(result["hits"]),
        *([_times(result["times"])] if result["times"] else []),
        _nodes(result["nodes"]),
        _needs(result["bandwidth"]),
        _reuse(result["reuse"]),
    ]
    return Report("tiers", "Tables larger than memory", SOURCE, about, [*rows(result)], _ASSUMPTIONS, sections)


def rows(result: dict[str, Any]) -> Iterator[Row]:
    """Rows that set our figures beside the source's."""
    for model in dict.fromkeys(one["name"] for one in result["nodes"]):
        most = max(one["samples_per_s"] for one in result["nodes"] if one["name"] == model)
        for kind, one in zip(("memory", "memory and disks"), _at(result["nodes"], model, most), strict=True):
            baselines = {"device memory alone": one["without"]["nodes"]}
            if kind != "memory":
                baselines["device memory and the hosts'"] = one["memory_nodes"]
            for baseline, nodes in baselines.items():
                with_ = one["with"]["nodes"]
                times = nodes / with_ if nodes and with_ else 0.0
                yield Row(
                    "abstract",
                    f"{model} with {kind}, over {baseline}: times fewer nodes at {most:.2g} samples/s",
                    "4 to 8",
                    f"{nodes} / {with_} = {times:.1f}" if times else "not to be had",
                    PAPER[0] <= times <= PAPER[1],
                    _why(one, baseline),
                )
        need = result["bandwidth"][model]
        yield Row(
            "bandwidth need",
            f"{model}: bytes/s that a table's look-ups read; share of the bytes that half of it is for",
            "tables differ; its numbers are not known here",
            f"{need['least'] / 1e9:.2g} to {need['most'] / 1e9:.2g} GB/s; {need['of_half']:.2%}",
            None,
            f"{need['tables']:.0f} tables at {most:.2g} samples/s; all of them read {need['total'] / 1e9:,.0f} GB/s",
        )
    for name, curve in result["reuse"].items():
        ten = min(curve, key=lambda line: abs(line["share"] - 0.1))
        yield Row(
            "locality",
            f"hits of a cache of {ten['share']:.0%} of the rows, LRU / Belady, by the look-ups of {name}",
            "few rows have most of the look-ups; its numbers are not known here",
            " / ".join(percent(ten["rules"][rule]["counted"]) for rule in ("LRU", "Belady")),
            None,
            "another source: histograms of Meta's synthetic look-ups" if name != "Zipf" else "exponent 1.1",
        )
    least = min(result["hits"], key=lambda one: one["share"])
    rules = least["rules"]
    lru, ahead, belady = (percent(rules[name]["counted"]) for name in ("LRU", "16 batches in sight", "Belady"))
    yield Row(
        "prefetching",
        f"hits, {least['share']:.0%} of the rows: LRU / 16 batches in sight / Belady",
        "not stated",
        f"{lru} / {ahead} / {belady}",
        None,
        "what is read ahead is exact: no row is fetched that is not asked for",
    )
    for one in result["times"]:
        if one["share"] == 0.8 and not one["disk"]:
            yield Row(
                "FBGEMM, H100",
                "step over one with all rows on the devices, 80% there",
                f"{_FBGEMM:.2f}",
                f"{one['ratio']:.2f}",
                None,
                "another machine and model: ten tables of 26.8 million rows there",
            )


def _why(one: dict[str, Any], baseline: str) -> str:
    bound, without = one["with"]["bound_by"], one["without"]["bound_by"]
    if bound == without == "computing":
        return "what the dense part computes asks for as many nodes either way"
    if one["without"]["nodes"] == 1:
        return f"its {one['bytes'] / 1e9:,.0f} GB fit into the devices of one node"
    if baseline != "device memory alone":
        return f"bound by {bound} with disks"
    return f"bound by {bound} with tiers, by {without} without"


def _at(nodes: list[dict[str, Any]], model: str, rate: float) -> list[dict[str, Any]]:
    return [one for one in nodes if one["name"] == model and one["samples_per_s"] == rate]


def _curves(hits: list[dict[str, Any]]) -> Section:
    lines: Lines = [("cache", "slots", *(f"{name}, {kind}" for name in RULES for kind in ("counted", "model")))]
    for one in hits:
        cells = [percent(one["rules"][name][kind]) for name in RULES for kind in ("counted", "model")]
        lines.append((f"{one['share']:.0%}", f"{one['slots']:,}", *cells))
    notes = (
        "Counted: batches of a training go through its directories, half of them to fill the caches, with so many "
        "batches in sight beside the one that is trained. LRU sees one, since the rows of the next batch must stay. "
        "Model: the closed form that `recjax plan --tiers` uses. -: two batches do not fit.",
    )
    return Section("Hits over the size of the cache", notes, [Table("", lines)], [_picture(hits)])


def _picture(hits: list[dict[str, Any]]) -> Picture:
    with plots.literal():
        figure = plots.figure(7.0, 4.0)
        axes = figure.subplots()
        plots.plain(axes, grid="both")
        for name, color, style, marker in zip(RULES, _COLORS, ("-", "--", "-.", ":"), plots.MARKERS, strict=False):
            some = [one for one in hits if one["rules"][name]["counted"] is not None]
            axes.plot(
                [100 * one["share"] for one in hits],
                [100 * one["rules"][name]["model"] for one in hits],
                style,
                color=color,
                linewidth=1,
            )
            axes.plot(
                [100 * one["share"] for one in some],
                [100 * one["rules"][name]["counted"] for one in some],
                marker,
                color=color,
                markersize=5,
                label=name,
            )
        axes.plot([], [], color="black", linewidth=1, label="lines: closed form; points: counted")
        axes.set(xlabel="rows that the cache holds, %", ylabel="hits, % of the rows that a step names")
        plots.legend_of_all(figure, axes, 3)
        png = plots.png(figure)
    return Picture("hits.png", "Hits by each rule: points are counted, lines the closed form.", png)


def _times(times: list[dict[str, Any]]) -> Section:
    lines: Lines = [
        ("rows on the devices", "ms", "ratio", "moves ms", "waits ms", "CPU ms", "hits", "misses", "disk reads")
    ]
    lines += [
        (
            one["label"],
            f"{one['ms']:.1f}",
            f"{one['ratio']:.2f}",
            f"{one['admit_ms']:.1f}",
            f"{one['waited_ms']:.1f}",
            f"{one['cpu_ms']:.1f}",
            f"{one['hits']:,.0f}",
            f"{one['misses']:,.0f}",
            f"{one['reads']:,.0f}",
        )
        for one in times
    ]
    notes = (
        "By turns, medians over rounds; the ratio is to the step with all rows on the devices in the same round. On "
        "CPU devices are the cores of the host, and their memory is the host's: moves cost copies, and no link.",
    )
    with plots.literal():
        figure = plots.figure(7.0, 4.0)
        axes = figure.subplots()
        plots.plain(axes, grid="both")
        axes.axhline(1, color=plots.GREY, linewidth=1, linestyle="--", label="all rows on the devices")
        kinds = {
            "the other rows in memory": ("-", plots.BLUE),
            "half of all in memory, others in a file": ("none", plots.ORANGE),
        }
        for (label, (style, color)), marker, disk in zip(kinds.items(), plots.MARKERS, (False, True), strict=False):
            if some := [one for one in times if bool(one["disk"]) == disk and one["share"] < 1]:
                axes.plot(
                    [100 * one["share"] for one in some],
                    [one["ratio"] for one in some],
                    color=color,
                    linestyle=style,
                    marker=marker,
                    label=label,
                )
        highest = max(one["ratio"] for one in times)
        axes.set(
            xlabel="rows on the devices, %",
            ylabel="time of a step / with all rows on the devices",
            xlim=(0, 103),
            ylim=(0, 1.15 * highest),
        )
        plots.legend_of_all(figure, axes)
        png = plots.png(figure)
    picture = Picture("times.png", "Time of a step over the share of the rows that are on the devices.", png)
    return Section("Steps over the budget", notes, [Table("", lines)], [picture])


def _nodes(nodes: list[dict[str, Any]]) -> Section:
    lines: Lines = [
        ("model", "rows", "samples/s", "nodes", "without", "bound by", "memory", "with tiers", "bound by")
        + ("times fewer", "than with memory")
    ]
    for one in nodes:
        lines.append(
            (
                one["name"],
                f"{one['bytes'] / 1e12:.2f} TB",
                f"{one['samples_per_s']:,.0f}",
                one["node"]["name"],
                f"{one['without']['nodes'] or '-'}",
                one["without"]["bound_by"] or "-",
                f"{one['memory_nodes'] or '-'}",
                f"{one['with']['nodes'] or '-'}",
                one["with"]["bound_by"] or "-",
                f"{one['times']:.1f}" if one["times"] else "-",
                f"{one['memory_nodes'] / one['with']['nodes']:.1f}"
                if one["memory_nodes"] and one["with"]["nodes"]
                else "-",
            )
        )
    inputs: Lines = [
        ("node", "device GB", "GB/s", "link GB/s", "memory GB", "disk GB", "reads/s", "written GB/s", "TFLOP/s")
    ]
    inputs += [
        (
            n.name,
            *(
                f"{value / 1e9:,.0f}"
                for value in (n.device_bytes, n.device_rate, n.link_rate, n.dram_bytes, n.disk_bytes)
            ),
            f"{n.disk_reads:,.0f}",
            f"{n.disk_rate / 1e9:,.0f}",
            f"{n.flops / 1e12:,.1f}",
        )
        for n in NODES
    ]
    notes = (
        "The fewest nodes on which no resource is asked for more than there is; without tiers all rows are in device "
        "memory; memory: in that of devices and hosts. What binds is what one node fewer would lack. On a disk a row "
        "takes a padded record.",
    )
    return Section("Nodes", notes, [Table("", lines, (0, 3, 5, 8)), Table("Inputs", inputs)])


def _needs(needs: dict[str, dict[str, float]]) -> Section:
    lines: Lines = [("model", "tables", "rows", "least a table", "middle", "most", "all", "half of it is for")]
    for model, need in needs.items():
        rates = (f"{need[key] / 1e9:,.2f} GB/s" for key in ("least", "middle", "most", "total"))
        size = f"{need['bytes'] / 1e12:.2f} TB"
        lines.append((model, f"{need['tables']:.0f}", size, *rates, f"{need['of_half']:.2%} of the bytes"))
    notes = (
        "Look-ups a second times the bytes of a row, of each table. The last column takes the tables that ask for most "
        "a byte first: the smaller the share, the more a small and fast memory takes of it by choosing tables.",
    )
    return Section("Bandwidth by table", notes, [Table("", lines)])


def _reuse(curves: dict[str, list[dict[str, Any]]]) -> Section:
    lines: Lines = [("look-ups", "cache", *(f"{name}, {kind}" for name in RULES for kind in ("counted", "model")))]
    for name, curve in curves.items():
        for line in curve:
            cells = [percent(line["rules"][rule][kind]) for rule in RULES for kind in ("counted", "model")]
            lines.append((name, f"{line['share']:.0%}", *cells))
    notes = (
        "2021, 2022: histograms of Meta's synthetic look-ups (facebookresearch/dlrm_datasets, MIT: 856 and 788 "
        "tables), taken for a law of 200,000 rows, of which batches of 128 samples are drawn; rows that one batch of "
        "the data does not name are in neither. Zipf: exponent 1.1, as many rows and look-ups as 2021. "
        f"Counted: {REUSE_STEPS} batches after as many that fill the cache.",
    )
    return Section("Locality as published", notes, [Table("", lines)])
