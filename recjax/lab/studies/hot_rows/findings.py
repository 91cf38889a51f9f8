"""Figures of P2RES beside those of this study, as a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recjax.data import presence
from recjax.lab.studies.report import Picture, Report, Row, Section, Table

SPEED = (2.16, 16.8)  # times faster than TFDE, TorchRec and HugeCTR on 32 V100 (PCIe)
_KAGGLE = "2.2% of the items on Criteo Kaggle, 13% (for 86%) on Taobao"
_IN_NEXT = f"of another batch; its numbers ({_KAGGLE}) may be of the batches that define the items"
_FIRST = "row-wise, no dedup"


def report(result: Mapping[str, Any], about: Mapping[str, Any], pictures: Sequence[Picture]) -> Report:
    """The report of `study.study`; `about` is of `report.provenance`, and pictures of `draw.pictures`."""
    own = result["about"]
    run = f"{own['model']} on {own['data']}, batches of {own['batch_size']:,}, D={own['dim']}"
    described = result["presence"]
    seen = [picture for picture in pictures if picture.name == "presence.png"]
    drawn = [picture for picture in pictures if picture.name == "copies.png"]
    others = [picture for picture in pictures if picture not in (*seen, *drawn)]
    sections = [
        Section(
            "Presence of items",
            (f"In {described['batches']} batches of {described['batch_size']:,}.",),
            [
                Table("items that take most look-ups", presence.item_rows(described)),
                Table("items by the number of batches that they are in", presence.batch_rows(described)),
                *(
                    [Table("and what the next batch has of them", presence.next_rows(described))]
                    if described.get("next")
                    else []
                ),
            ],
            seen,
        ),
        Section(
            "Ways to hold the tables",
            (
                "Bytes are those that a device sends for the tables in a step, padding included; times are CPU times "
                "of all threads, route those of routing, packing and placing the next batch, step all others. Owners' "
                "max/mean: rows that the owner asked for most is asked for, over the mean; contiguous: the same if "
                "each owner had a contiguous range of the ids.",
            ),
            [_arms(result, line["devices"]) for line in result["summary"]],
            others,
        ),
    ]
    if result["copies"]:
        sections.append(
            Section(
                "Copies on devices and on hosts",
                (
                    "Bytes of a device, by the collectives of the compiled step, with dedup and padding. Held are hot "
                    "rows between steps, without the optimizer's slots; sent are their gradients and new rows; all are "
                    "these with the lists of the other rows. Across hosts a ring that goes host by host is assumed for "
                    "reductions, and that gathers send each part to every device.",
                ),
                [_copies(result["copies"])],
                drawn,
            )
        )
    return Report(
        "hot_rows",
        f"Copies of hot rows: {run}",
        "P2RES (poster): two-fold parallelism, copies of the items that are in most batches, on 32 V100",
        about,
        [*_presence(described, own["data"]), *_gains(result), *_on_hosts(result["copies"])],
        (
            "The baseline exchanges every id, row-wise and without dedup, as the systems that the source compares "
            "with.",
            "An item is hot if it is in most of the counted batches; each number of hot rows is tried with and without "
            "dedup.",
        ),
        sections,
    )


def _presence(described: Mapping[str, Any], data: str) -> Iterator[Row]:
    of = described["all"]
    at = max((place for place, share in enumerate(presence.COVERAGES) if share <= 0.9), default=0)
    share = presence.COVERAGES[at]
    yield Row(
        "coverage",
        f"share of the items that takes {share:.0%} of the look-ups",
        _KAGGLE,
        f"{of['items_for_share'][at]:.1%} on {data}",
        None,
        "a property of the data: the same only on the same",
    )
    if described["new"] is not None:
        yield Row(
            "coverage",
            "items of a batch that no batch before it had",
            "under 1%",
            f"{described['new']:.2%}",
            described["new"] < 0.01,
            f"batches of {described['batch_size']:,}, mean of the later half of {described['batches']}: the share "
            "falls with larger batches and more of them",
        )
    if described.get("next"):
        most = described["next"]["in"][0]
        yield Row(
            "coverage",
            f"items in more than {most['more_than']} of {described['batches']} batches: of the items, of the next "
            "batch's look-ups",
            _IN_NEXT,
            f"{most['items']:.2%}, {most['accesses']:.1%} on {data}",
            None,
            "counted on a batch that they were not chosen by; a property of the data",
        )


def _gains(result: Mapping[str, Any]) -> Iterator[Row]:
    for line in result["summary"]:
        for what, unit in (("cpu", "CPU time of a step"), ("bytes", "bytes sent")):
            if what not in line:
                continue
            best = max(line[what].values())
            ways = ", ".join(f"{way} {gain:.2f}" for way, gain in line[what].items())
            timed = what == "cpu"
            why = (
                "host devices share memory, so that an exchange costs no more than a copy, and the dense part, which "
                "no way changes, is in the time of all"
                if timed
                else "bytes are no times; dedup takes most of what copies would save"
            )
            yield Row(
                "speed",
                f"{unit}, times less than {_FIRST}, {line['devices']} device(s)",
                f"{SPEED[0]} to {SPEED[1]} times faster",
                f"best {best:.2f} ({ways})",
                SPEED[0] <= best <= SPEED[1] if timed else None,
                why,
            )


def _on_hosts(copies: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """A row for each pair of copies on devices and on hosts."""
    for on_devices, on_hosts in zip(copies[::2], copies[1::2], strict=True):
        of = {name: on_hosts[name] / on_devices[name] for name in ("held", "sent", "across") if on_devices[name]}
        ours = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in of.items())
        where = f"{on_devices['rows']:,} hot rows, {on_devices['devices']} devices in {on_devices['hosts']} host(s)"
        why = "a device holds a part of its host's copy, and across hosts sends that part alone"
        what = f"bytes with copies on hosts, over those on devices, {where}"
        yield Row("copies", what, "not stated", ours, None, why)


def _copies(copies: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        ["devices", "hosts", "hot rows", "copies on", "held", "sent", "across hosts", "all sent", "all across hosts"]
    ]
    for of in copies:
        sizes = [f"{of[name]:,.0f}" for name in ("held", "sent", "across", "all_sent", "all_across")]
        rows.append([str(of["devices"]), str(of["hosts"]), f"{of['rows']:,}", f"{of['on']}s", *sizes])
    return Table("bytes of a device", rows)


def _arms(result: Mapping[str, Any], devices: int) -> Table:
    own = [of for of in result["arms"] if of["devices"] == devices]
    timed = "times" in own[0]
    head = ["way", "ids covered", "bytes sent", "times fewer", "owners' max/mean", "contiguous"]
    head += ["route CPU ms", "step CPU ms", "CPU, times less", "+-"] if timed else []
    rows = [head]
    for of in own:
        padded = of["bytes"]["padded"]
        row = [
            of["label"],
            f"{of['covered']:.0%}",
            f"{padded:,.0f}",
            f"{own[0]['bytes']['padded'] / max(1.0, padded):.2f}",
            f"{of['imbalance']:.3f}",
            f"{of['contiguous_imbalance']:.2f}",
        ]
        if timed:
            times, first = of["times"], own[0]["times"]
            row += [
                f"{times['route_cpu_ms']:.2f}",
                f"{times['step_cpu_ms']:.1f}",
                f"{first['cpu_ms'] / times['cpu_ms']:.2f}",
                f"{times['noise']:.0%}",
            ]
        rows.append(row)
    return Table(f"{devices} device(s)", rows)
