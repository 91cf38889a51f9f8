"""Several real processes on this machine, joined over loopback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from support import forked
from support.commands import arrays, lines_of

PROGRAM = "import sys; from recjax.cli.main import main; sys.exit(main())"
_LIGHT = f"from support import light_compile; light_compile.stay_as(); {PROGRAM}"


def environment(processes: int, process: int, port: int, limit_s: int = 60) -> dict[str, str]:
    """Of one process of several; of the only one, that of this process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RECJAX_")}
    clean |= {"GLIBC_TUNABLES": ""}
    if processes == 1:
        return clean
    return clean | {
        "RECJAX_COORDINATOR": f"127.0.0.1:{port}",
        "RECJAX_PROCESSES": str(processes),
        "RECJAX_PROCESS": str(process),
        "RECJAX_LIMIT_S": str(limit_s),
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Job:
    """`recjax train` in several processes, each of which compiles for itself, lightly; every process has a log."""

    def __init__(
        self,
        out: Path,
        preset: Path,
        overrides: Sequence[str],
        processes: int,
        limit_s: int = 60,
        own: Callable[[int, int], tuple[list[str], list[str], dict[str, str]]] = lambda k, port: ([], [], {}),
    ) -> None:
        """Starts them.

        Args:
          out: run folder.
          preset: file.
          overrides: of all.
          processes: how many.
          limit_s: RECJAX_LIMIT_S.
          own: (process, port) -> what stands before its command, overrides of its own, and further variables.
        """
        self.out, port = out, free_port()
        self.logs = [out.parent / f"{out.name}.{time.monotonic_ns()}.{k}.log" for k in range(processes)]
        self.processes = []
        for k, log in enumerate(self.logs):
            before, further, variables = own(k, port)
            command = [
                *before,
                sys.executable,
                "-c",
                _LIGHT,
                "train",
                str(preset),
                *overrides,
                *further,
                "--out",
                str(out),
            ]
            with open(log, "w") as file:
                env = environment(processes, k, port, limit_s) | variables
                process = forked.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
            self.processes.append(process)

    def worker(self, k: int) -> int:
        """Process id of the child that a supervisor watches."""
        pid = self.processes[k].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def step(self) -> int:
        """The last step that has a line."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int(json.loads((self.out / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        return 0

    def wait_for(self, reached: Callable[[], bool], seconds: float = 180) -> None:
        """Returns when it is so, or when a process has ended."""
        end = time.monotonic() + seconds
        while not reached() and all(p.poll() is None for p in self.processes):
            if time.monotonic() > end:
                raise TimeoutError(self.tail())
            time.sleep(0.01)

    def wait(self, seconds: float) -> list[int]:
        """The statuses when all have ended. What has not by then is killed and counts as -999."""
        end = time.monotonic() + seconds
        while any(p.poll() is None for p in self.processes) and time.monotonic() < end:
            time.sleep(0.05)
        statuses = [-999 if p.poll() is None else p.returncode for p in self.processes]
        for k, p in enumerate(self.processes):
            if p.poll() is None:
                with contextlib.suppress(OSError, IndexError):
                    os.kill(self.worker(k), 9)
                p.kill()
                p.wait()
        return statuses

    def tail(self) -> str:
        """The ends of all logs."""
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in self.logs)

    def messages(self) -> list[str]:
        """The errors that they ended with."""
        lines = [line for log in self.logs for line in log.read_text(errors="replace").splitlines()]
        return [line.removeprefix("recjax: error: ") for line in lines if line.startswith("recjax: error: ")]


def train_together(processes: int, out: Path, preset: Path, overrides: Sequence[str], timeout_s: float = 300) -> None:
    """Trains to the end, or fails with what the processes wrote."""
    job = Job(out, preset, overrides, processes)
    assert job.wait(timeout_s) == [0] * processes, job.tail()


def newest(run: Path) -> dict[str, np.ndarray]:
    """The arrays of a run's newest checkpoint by their path."""
    return arrays(run, max(int(p.name) for p in (run / "checkpoints").glob("[0-9]*")))


def assert_equal(one: Path, other: Path, tolerance: float) -> None:
    """Losses, tables, slots and dense parts agree, relative to each value and absolutely near 0."""
    a, b = ([(line["step"], line["loss"]) for line in lines_of(run, "train")] for run in (one, other))
    assert [step for step, _ in a] == [step for step, _ in b]
    np.testing.assert_allclose([loss for _, loss in a], [loss for _, loss in b], rtol=tolerance)
    found, wanted = newest(other), newest(one)
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        np.testing.assert_allclose(found[path], array, rtol=tolerance, atol=tolerance, err_msg=path)
