"""A trace that two processes record is that of one process; and they replay it."""

import dataclasses
import json
from pathlib import Path

import pytest
from support.commands import inside, start, write_preset
from support.processes import environment, free_port

from recjax.lab.formats import read_trace
from recjax.lab.formats.trace import COMPUTE, Event, Trace

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile]


def together(*arguments: object) -> str:
    """Standard output of process 0 of two."""
    port = free_port()
    processes = [start(*arguments, env=environment(2, k, port)) for k in range(2)]
    ends = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    assert ends[1][0] == ""
    return ends[0][0]


def untimed(trace: Trace) -> dict[int, list[Event]]:
    """What does not depend on clocks: the collectives, without ids and dependencies."""
    return {
        rank: [
            dataclasses.replace(event, id=0, deps=(), start_ns=None, duration_ns=None)
            for event in events
            if event.kind != COMPUTE
        ]
        for rank, events in trace.ranks.items()
    }


def test_two_processes_of_two_devices(tmp_path: Path) -> None:
    run = (write_preset(tmp_path), "mesh.devices=4", "--steps", 2)
    formats = ("--format", "recjax", "--format", "chakra-et")
    shown = json.loads(together("trace", *run, "--out", tmp_path / "two", *formats, "--json"))
    assert inside("trace", *run, "--out", tmp_path / "one").status == 0
    one, two = (read_trace(tmp_path / name) for name in ("one", "two"))
    assert sorted(two.ranks) == [0, 1, 2, 3] and untimed(two) == untimed(one)
    assert all(event.duration_ns for _, event in two.collectives())
    assert untimed(read_trace(tmp_path / "two" / "chakra-et")) == untimed(two)
    assert shown["traces"][0]["ranks"] == 4
    replayed = json.loads(together("replay", tmp_path / "two", "--repeats", 2, "--json"))
    assert sum(line["count"] for line in replayed["collectives"]) == 10
    assert all(line["p50_us"] > 0 and line["original_us"] > 0 for line in replayed["collectives"])
