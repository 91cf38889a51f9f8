"""The report of the study of inference from disk: what the paper says beside what is measured here."""

from __future__ import annotations

from typing import Any

from recjax.lab.studies.report import Picture, Report, Row, Section, Table, percent
from recjax.lab.studies.sdm import power
from recjax.lab.studies.sdm.power import DEVICES
from recjax.lab.studies.sdm.study import LOADED, TOGETHER
from recjax.utils import plots

SOURCE = (
    "E. K. Ardestani et al., Supporting Massive DLRM Inference Through Software Defined Memory, arXiv:2110.11489 "
    "(2021), ICDCS 2022"
)
Lines = list[tuple[str, ...]]
_ASSUMPTIONS = (
    "Users come by a Zipf law, each with the same bags every time; ids in bags follow another. The paper's traces are "
    "not public.",
    f"Up to {TOGETHER} requests that wait are served at once, and the next ones' rows are read while the model runs; "
    "times are of the store and the model, without JSON and HTTP.",
    "Memory is what the caches take, with 5 bytes beside each of their rows; Python's own is left out.",
    "Watts cannot be measured here. QPS and power of the paper's hosts are inputs, in units of its largest host: they "
    "give the 5 to 29% of its abstract by construction, which is no result, and have to be checked with its deployment "
    "tables before they are used.",
    "Blocks and latencies of storage are about the paper's, recalled; reads at once and bytes a second are chosen.",
)


def report(result: dict[str, Any], about: dict[str, Any]) -> Report:
    """Returns the report of `study.study`."""
    return Report(
        "sdm",
        "Inference from disk",
        SOURCE,
        about,
        rows(result),
        _ASSUMPTIONS,
        [_sweep(result), _units(result), _pooled(result), _devices(result), _power(result)],
    )


def rows(result: dict[str, Any]) -> list[Row]:
    """Rows that set our figures beside the paper's."""
    small, large = result["units"]
    off, _, on = result["pooled"]
    shares = [scenario["saved"] for scenario in result["power"]]
    least, most = min(shares), max(shares)
    ratio = off["closed_qps"] / result["memory_qps"]
    per_row = [line["bytes_read_per_request"] / max(1e-9, line["misses_per_request"]) for line in (large, small)]
    fewer = per_row[0] / max(1, per_row[1])
    bits = "the bits of tables in memory" if result["same_bits"] else "not those of tables in memory"
    return [
        Row(
            "row cache",
            f"hits, {off['share']:.0%} of the rows in memory",
            "over 90%",
            percent(off["hit_rate"]),
            off["hit_rate"] > 0.9,
            f"here the law of ids is chosen; its offline curve says {percent(off['offline_hit_rate'])}",
        ),
        Row(
            "sub-block reads",
            "bytes read for a row, 4 KiB over 512 B",
            "up to 8 times",
            f"{fewer:.1f} times",
            4 < fewer <= 8.01,
            "records of 64 bytes; a block is read once for a request that needs several rows of it",
        ),
        Row(
            "pooled cache",
            "bags found; rows still read",
            "fewer reads",
            f"{percent(on['bag_hit_rate'])}; {on['misses_per_request']:.1f} of {off['misses_per_request']:.1f}",
            on["misses_per_request"] < off["misses_per_request"],
            "users come again with the same bags; as many rows are cached as without, and bags beside them",
        ),
        Row(
            "exactness",
            "scores with tables on disk",
            "not stated",
            bits,
            None,
            f"the same program gets the same rows; by pooled bags logits move by {result['pooled_error']:.1e} at most",
        ),
        Row(
            "power",
            "saved, least and most",
            "5% and 29%",
            f"{percent(least, 0)} and {percent(most, 0)}",
            None,
            "no result: the paper's own inputs give it back, see below",
        ),
        Row(
            "power",
            f"requests/s from disk over those from memory, {off['share']:.0%} of the rows in memory",
            "not stated",
            f"{ratio:.2f}",
            None,
            f"measured here, one at a time: power is saved where a host with a disk takes less than {ratio:.2f} of the "
            "other's",
        ),
        *(
            Row(
                "devices",
                f"requests/s that {device.name} allows, {off['share']:.0%} of the rows in memory",
                "not stated",
                f"{device.requests_per_s(off['misses_per_request']):,.0f}",
                None,
                f"{off['misses_per_request']:.1f} rows of a request are read, blocks of {device.block_bytes:,} B in "
                f"{device.latency_us:g} us; the processor here allows {result['bounds']['cached_qps']:,.0f}",
            )
            for device in DEVICES
        ),
    ]


def _sweep(result: dict[str, Any]) -> Section:
    bounds, lines = result["bounds"], result["sweep"]
    head = "cache, memory saved, hits, offline curve, requests/s, CPU ms, bound, "
    head += f"rate ({LOADED:.0%}), p50 ms, p95 ms, p99 ms"
    table: Lines = [tuple(head.split(", "))]
    for line in lines:
        seen = line["open"]
        table.append(
            (
                percent(line["share"], 0),
                percent(line["dram_saved"], 0),
                percent(line["hit_rate"]),
                percent(line["offline_hit_rate"]),
                f"{line['closed_qps']:.0f}",
                f"{line['cpu_ms']:.2f}",
                f"{line['bound_qps']:.0f}",
                f"{seen['qps']:.0f}",
                *(f"{seen[name]:.1f}" for name in ("p50_ms", "p95_ms", "p99_ms")),
            )
        )
    iops = ", ".join(f"{rate:,.0f}/s of {unit} bytes" for unit, rate in bounds["iops"].items())
    notes = (
        f"Random reads: {iops}. With all rows in the cache {bounds['cached_qps']:.0f} requests/s, {TOGETHER} at a "
        f"time; with the tables in memory {result['memory_qps']:.0f}, one at a time, as in the table. The bound is the "
        f"lower of the disk's and of requests/s {TOGETHER} at a time. At {LOADED:.0%} of it requests come at random "
        "times, whether or not others wait. Hits are counted after as many requests that are not.",
    )
    return Section("Cache size", notes, [Table("", table)], [_picture(lines)])


def _picture(lines: list[dict[str, Any]]) -> Picture:
    with plots.literal():
        figure = plots.figure(10.0, 4.0)
        left, right = figure.subplots(1, 2)
        shares = [100 * line["share"] for line in lines]
        for axes in (left, right):
            plots.plain(axes, grid="both")
            axes.set_xlabel("rows that the cache holds, %")
        left.plot(shares, [100 * line["offline_hit_rate"] for line in lines], color=plots.GREY, label="offline curve")
        left.plot(shares, [100 * line["hit_rate"] for line in lines], "o", color=plots.BLUE, label="measured")
        left.set_ylabel("hits, %")
        plots.legend_of_all(figure, left)
        right.plot(shares, [line["closed_qps"] for line in lines], "o-", color=plots.ORANGE)
        right.set(ylabel="requests/s", ylim=(0, None))
        png = plots.png(figure)
    return Picture("cache.png", "Hits, and requests a second, over the size of the cache.", png)


def _units(result: dict[str, Any]) -> Section:
    table: Lines = [("read", "bytes a request", "requests/s", "CPU ms", "rate", "p50 ms", "p99 ms")]
    for line in result["units"]:
        table.append((f"{line['unit']} B", f"{line['bytes_read_per_request']:,.0f}", *_speed(line)))
    return Section("Reads of 512 bytes and of 4 KiB", (), [Table("", table)])


def _pooled(result: dict[str, Any]) -> Section:
    head = "rows, bags, rows found, bags found, rows read a request, requests/s, CPU ms, rate, p50 ms, p99 ms"
    table: Lines = [tuple(head.split(", "))]
    for line in result["pooled"]:
        bags = line["bag_hit_rate"]
        table.append(
            (
                percent(line["share"], 0),
                percent(line["pooled_share"], 0),
                percent(line["hit_rate"]),
                percent(bags),
                f"{line['misses_per_request']:.1f}",
                *_speed(line),
            )
        )
    note = "Memory of both caches as shares of the tables; the first two lines take the same, the third twice that."
    return Section("Bags from a cache", (note,), [Table("", table)])


def _speed(line: dict[str, Any]) -> tuple[str, ...]:
    seen = line["open"]
    return (
        f"{line['closed_qps']:.0f}",
        f"{line['cpu_ms']:.2f}",
        f"{seen['qps']:.0f}",
        f"{seen['p50_ms']:.1f}",
        f"{seen['p99_ms']:.1f}",
    )


def _devices(result: dict[str, Any]) -> Section:
    table: Lines = [
        ("device", "cache", "rows read a request", "requests/s allowed", "bytes a request", "reads take, us")
    ]
    for device in DEVICES:
        for line in result["sweep"]:
            misses = line["misses_per_request"]
            table.append(
                (
                    device.name,
                    percent(line["share"], 0),
                    f"{misses:.1f}",
                    f"{device.requests_per_s(misses):,.0f}",
                    f"{misses * device.block_bytes:,.0f}",
                    f"{device.request_us(misses):.0f}",
                )
            )
    inputs: Lines = [("device", "block, B", "latency, us", "reads at once", "GB/s", "reads/s")]
    inputs += [
        (
            device.name,
            f"{device.block_bytes:,}",
            f"{device.latency_us:g}",
            f"{device.outstanding}",
            f"{device.bytes_per_s / 1e9:g}",
            f"{device.reads_per_s:,.0f}",
        )
        for device in DEVICES
    ]
    notes = (
        "The rows that the caches above do not find, through one bound: requests/s = reads/s of the device / rows read "
        "a request; reads/s = reads at once / latency, or what its bytes a second allow.",
    )
    return Section("Two kinds of storage", notes, [Table("", table), Table("Inputs", inputs)])


def _power(result: dict[str, Any]) -> Section:
    table = [("deployment", "without", "with", "saved")]
    for found in result["power"]:
        ways = [found[way]["arithmetic"] for way in ("without", "with")]
        table.append((found["name"], *ways, percent(found["saved"])))
    inputs: Lines = [("deployment", "host", "requests/s", "power", "others for each", "power of these")]
    for scenario in power.PAPER:
        inputs += [
            (
                scenario.name,
                host.name,
                f"{host.qps:g}",
                f"{host.power:g}",
                f"{host.helpers:g}",
                f"{host.helper_power:g}",
            )
            for host in (scenario.without, scenario.with_)
        ]
    ratio = result["pooled"][0]["closed_qps"] / result["memory_qps"]
    notes = (
        "hosts = requests/s of all / requests/s of one, rounded up; power = hosts x power of one + others x power of "
        "one of these; saved = 1 - power with storage / power without.",
        f"Here a host that reads from disk answers {ratio:.2f} times the requests of one with the tables in memory: it "
        f"saves power where it takes less than {ratio:.2f} of the other's.",
    )
    return Section("Power", notes, [Table("", table, (0, 1, 2)), Table("Inputs", inputs, (0, 1))])
