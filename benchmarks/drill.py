"""A fault drill: real processes, real faults at random times, and what became of each run. Prints a table.

    python benchmarks/drill.py --faults 32

Each run trains the small preset in two processes of two devices, is hit once, and then resumes with the same command.
Of each the table tells in how many seconds all processes had ended, with which statuses, and what they said; whether
the run resumed and ended with the weights of an undisturbed run, bit for bit; and how many steps have no line in
metrics.jsonl or more than one (a sample that is lost or trained twice changes the weights, so their equality is the
proof). The lost link is a veth pair between two network namespaces, the full disk a small tmpfs: both need root.
Unequal data must be refused by both before the first step, which counts as resumed and equal.

32 faults with RECJAX_LIMIT_S=20 on two cores of an Intel Xeon that had other work too (Python 3.11, JAX 0.10.2), twice:
all ended as they should (kill -9 after 10 s, of process 0 at once; SIGSTOP 18 to 20; lost link 11 to 18; SIGTERM 1 to
4), 32 resumed, 32 with the weights of the undisturbed run, no step lost and none twice.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.commands import arrays, prepare, steps_of, write_preset
from support.processes import Job

STEPS = 150
SETTINGS = [f"train.steps={STEPS}", "train.checkpoint_every=20", "train.eval_every=1000", "train.log_every=1"]
SETTINGS += ["train.epochs=20", "mesh.devices=4"]
HOSTS = ("recjaxa", "recjaxb")  # network namespaces, one for each process
NET = "10.77.31."


@dataclasses.dataclass
class Row:
    """What became of one fault."""

    fault: str
    step: int = 0
    ended_s: float = 0.0
    statuses: list[int] = dataclasses.field(default_factory=list)
    message: str = ""
    resumed: bool = False
    equal: bool = False
    lost: int = 0
    twice: int = 0
    note: str = ""


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Two namespaces with a link between them; each host's name means its own address there."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    hosts = "".join(f"{NET}{k + 1} {name}\n" for k, name in enumerate(HOSTS))
    try:
        for name in HOSTS:
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
            ip("netns", "add", name)
        ip("link", "add", "rja", "netns", HOSTS[0], "type", "veth", "peer", "name", "rjb", "netns", HOSTS[1])
        for k, (name, link) in enumerate(zip(HOSTS, ("rja", "rjb"), strict=True)):
            for words in (
                ("addr", "add", f"{NET}{k + 1}/24", "dev", link),
                ("link", "set", link, "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("-n", name, *words)
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def saving(out: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(name.startswith(".unfinished") for name in os.listdir(out / "checkpoints"))
    return False


def hit(fault: str, job: Job, rng: random.Random, at: int) -> None:
    """Waits for the moment, and does it."""
    job.wait_for(lambda: job.step() >= at)
    victim = rng.randrange(2)
    if fault == "death while saving":
        job.wait_for(lambda: saving(job.out))
        time.sleep(rng.random() * 0.05)
    if fault in ("kill -9", "death while saving"):
        os.kill(job.worker(victim), signal.SIGKILL)
    elif fault == "kill -9 of all, newest checkpoint corrupt":
        for k in range(2):
            os.kill(job.worker(k), signal.SIGKILL)
    elif fault == "SIGSTOP":
        os.kill(job.worker(victim), signal.SIGSTOP)
    elif fault == "SIGTERM":
        job.processes[victim].send_signal(signal.SIGTERM)
    elif fault == "lost link":
        subprocess.run(["ip", "-n", HOSTS[0], "link", "set", "rja", "down"], check=True)
    elif fault == "full disk":
        with contextlib.suppress(OSError), open(job.out.parent / "fill", "wb") as file:
            while True:
                file.write(bytes(1 << 12))
                file.flush()


def run_one(fault: str, folder: Path, reference: Path, rng: random.Random, limit_s: int) -> Row:
    """One run: hit, ended, resumed, compared."""
    at, preset = rng.randrange(25, STEPS - 40), write_preset(folder)
    row, out = Row(fault, at), folder / "run"
    extra: list[list[str]] = [[], []]
    with contextlib.ExitStack() as stack:
        if fault == "lost link":
            stack.enter_context(network())
        if fault == "full disk":
            disk = folder / "disk"
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
            out = disk / "run"
        if fault == "unequal data":
            wrong = prepare(folder / "wrong", lambda block: block.dense.__iadd__(1))
            right = prepare(folder / "right")
            own = ["data=prepared", "train.batch_size=64"]
            extra = [[*own, f"data.path={right}"], [*own, f"data.path={wrong}"]]

        def process(k: int, port: int) -> tuple[list[str], list[str], dict[str, str]]:
            if fault != "lost link":
                return [], extra[k], {}
            named = f'hostname {HOSTS[k]} && exec "$@"'
            inside = ["ip", "netns", "exec", HOSTS[k], "unshare", "--uts", "sh", "-c", named, "sh"]
            return inside, [], {"RECJAX_COORDINATOR": f"{NET}1:{port}"}

        job = Job(out, preset, SETTINGS, 2, limit_s, process)
        if fault != "unequal data":  # that ends before its first step
            hit(fault, job, rng, at)
            row.step = job.step()
        began = time.monotonic()
        row.statuses = job.wait(limit_s * 2 + (120 if fault == "unequal data" else 0))
        row.ended_s = time.monotonic() - began
        messages = job.messages()
        row.message = max(messages, key=len, default="")
        if fault == "kill -9 of all, newest checkpoint corrupt":
            newest = max(p for p in (out / "checkpoints").iterdir() if p.name.isdigit())
            file = max((p for p in newest.rglob("*") if p.is_file() and p.suffix == ""), key=lambda p: p.stat().st_size)
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(bytes(data))
        if fault == "full disk":
            (out.parent / "fill").unlink()
        if fault == "lost link":
            subprocess.run(["ip", "-n", HOSTS[0], "link", "set", "rja", "up"], check=True)
        if fault == "unequal data":
            row.resumed = row.equal = not (out / "metrics.jsonl").exists() and 3 in row.statuses
            return row
        again = Job(out, preset, SETTINGS, 2, limit_s, process)
        statuses = again.wait(300)
        row.resumed = statuses == [0, 0]
        row.note = "" if row.resumed else again.tail()
        if row.resumed:
            steps = steps_of(out, "train")
            row.lost, row.twice = STEPS - len(set(steps)), len(steps) - len(set(steps))
            found, wanted = arrays(out, STEPS), arrays(reference, STEPS)
            row.equal = all(found[key].tobytes() == wanted[key].tobytes() for key in wanted)
    return row


STATUSES: dict[str, set[int]] = {"SIGTERM": {143}, "full disk": {1, 4}, "unequal data": {3}}  # of others: 4
FAULTS = (
    "kill -9",
    "SIGSTOP",
    "SIGTERM",
    "lost link",
    "death while saving",
    "kill -9 of all, newest checkpoint corrupt",
    "full disk",
    "unequal data",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=32)
    parser.add_argument("--only", choices=FAULTS)
    parser.add_argument("--limit", type=int, default=20, help="RECJAX_LIMIT_S")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    rows = []
    with tempfile.TemporaryDirectory(prefix="recjax-drill-") as name:
        folder = Path(name)
        reference = folder / "undisturbed"
        began = time.monotonic()
        job = Job(reference, write_preset(folder), SETTINGS, 2, options.limit)
        statuses = job.wait(600)
        assert statuses == [0, 0], job.tail()
        print(f"undisturbed: {time.monotonic() - began:.0f} s", file=sys.stderr)
        head = f"{'fault':42} {'step':>4} {'ended s':>7} {'statuses':>10} resumed equal lost twice  message"
        print(head, flush=True)
        for n in range(options.faults):
            fault = options.only or FAULTS[n % len(FAULTS)]
            own = folder / str(n)
            own.mkdir()
            row = run_one(fault, own, reference, rng, options.limit)
            rows.append(row)
            print(
                f"{row.fault:42} {row.step:4} {row.ended_s:7.1f} {','.join(map(str, row.statuses)):>10} "
                f"{'yes' if row.resumed else 'NO':>7} {'yes' if row.equal else 'NO':>5} {row.lost:4} {row.twice:5}  "
                f"{row.message[:150]}",
                flush=True,
            )
            if row.note:
                print(row.note, file=sys.stderr)
            shutil.rmtree(own, ignore_errors=True)
    right = [set(row.statuses) == STATUSES.get(row.fault, {4}) for row in rows]
    in_time = sum(ok and row.ended_s <= options.limit + 0.5 for ok, row in zip(right, rows, strict=True))
    resumed, equal = sum(row.resumed for row in rows), sum(row.equal for row in rows)
    print(
        f"\n{len(rows)} faults: {in_time} ended rightly within {options.limit} s, {resumed} resumed, {equal} with "
        f"the weights of the undisturbed run, {sum(row.lost for row in rows)} steps lost, "
        f"{sum(row.twice for row in rows)} twice"
    )


if __name__ == "__main__":
    main()
