"""The Slurm scripts with fakes for srun, scancel, squeue and scontrol; by hand they ran on a real Slurm."""

import re
import signal
from pathlib import Path

import pytest
from support.launchers import LAUNCH, RECORD, TOP, Desk, finish, golden, until

# Starts its tasks as srun does: status and signals of all, a log for each; the highest status is its own.
SRUN = (
    """#!/usr/bin/env bash
"""
    + RECORD
    + """\
while [[ $1 == --* ]]; do
  [[ $1 != --output=* ]] || output=${1#*=}
  shift
done
ids=() worst=0
for ((task = 0; task < ${SLURM_NTASKS:-1}; task++)); do
  SLURM_PROCID=$task "$@" >>"${output//%t/$task}" 2>&1 &
  ids+=("$!")
done
for id in "${ids[@]}"; do
  status=0
  wait "$id" 2>/dev/null || status=$?
  worst=$((status > worst ? status : worst))
done
exit "$worst"
"""
)
SCANCEL = (
    """#!/usr/bin/env bash
"""
    + RECORD
    + """\
for file in "$FAKE"/attempts-*; do kill -TERM "$(tail -n 1 "$file" | cut -d ' ' -f 1)"; done
"""
)
JOB = {
    "SLURM_JOB_ID": 7,
    "SLURM_NTASKS": 2,
    "SLURM_NTASKS_PER_NODE": 2,
    "SLURM_CPUS_PER_TASK": 3,
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_NUM_NODES": 1,
}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path)
    desk.write("srun", SRUN)
    desk.write("scancel", SCANCEL)
    for name in ("squeue", "scontrol"):
        desk.write(name)
    (desk.fake / "squeue.out").write_text("RUNNING\n")
    return desk


def test_dry_runs(desk: Desk) -> None:
    outside = {"SLURMD_NODENAME": "n1"}
    golden("slurm.txt", desk.dry("slurm.sbatch", "--", "train", "p", "--out", "runs/it's mine", env=outside))
    nodewise = JOB | {"SLURM_NTASKS_PER_NODE": 1, "SLURM_GPUS_ON_NODE": 4}
    options = ("--restarts", 0, "--requeues", 1, "--logs", "logs")
    golden("slurm_node.txt", desk.dry("slurm.sbatch", *options, "--", "bench", "b", env=nodewise))
    golden("slurm_array.txt", desk.dry("slurm_array.sbatch", "my sweep.toml", "--out", "/shared/sweep", env=outside))


def test_tasks_and_logs(desk: Desk) -> None:
    done = desk.run("slurm.sbatch", "--logs", "logs", "--", "train", "p", "a=b c", env=JOB | {"http_proxy": "http://p"})
    assert done.returncode == 0, done.stderr
    assert desk.arguments(1) == ["train", "p", "a=b c"]
    wanted = {
        "RECJAX_CLUSTER": "slurm",
        "RECJAX_LIMIT_S": "60",
        "PYTHONUNBUFFERED": "1",
        "NPROC": "16",
        "no_grpc_proxy": "n1",
    }
    assert desk.environment(0) == desk.environment(1) == wanted
    assert (desk.folder / "logs/process-1.log").read_text() == "out of 1\nerr of 1\n"


def test_the_script_is_found_from_the_folder_of_slurm(desk: Desk) -> None:
    copy = desk.folder / "slurm_script"
    copy.write_text((LAUNCH / "slurm.sbatch").read_text())
    done = desk.run(str(copy), "--", "train", "p", env=JOB | {"SLURM_SUBMIT_DIR": TOP})
    assert done.returncode == 0, done.stderr
    lost = desk.run(str(copy), "--", "train", "p", env=JOB | {"SLURM_SUBMIT_DIR": "/tmp"})
    assert lost.returncode == 2 and "RECJAX_LAUNCH" in lost.stderr


@pytest.mark.parametrize(
    ("ends", "attempts", "status"),
    [
        (("die", "exit 4"), 2, 0),
        (("exit 4", "exit 4"), 2, 0),
        (("exit 2", "exit 2"), 1, 2),
        (("exit 1", "exit 0"), 1, 1),
    ],
)
def test_restarts(desk: Desk, ends: tuple[str, str], attempts: int, status: int) -> None:
    for task in (0, 1):
        desk.does(task, ends[task], "exit 0")
    done = desk.run("slurm.sbatch", "--restarts", 1, "--", "train", "p", env=JOB)
    assert done.returncode == status and len(desk.attempts(1)) == attempts


@pytest.mark.parametrize(
    ("before", "state", "requeued"),
    [(0, "RUNNING", True), (19, "RUNNING", True), (20, "RUNNING", False), (0, "CANCELLED", False)],
)
def test_the_signal_before_the_time_limit(desk: Desk, before: int, state: str, requeued: bool) -> None:
    (desk.fake / "squeue.out").write_text(f"{state}\n")
    for task in (0, 1):
        desk.does(task, "wait")
    with desk.start("slurm.sbatch", "--", "train", "p", env=JOB | {"SLURM_RESTART_COUNT": before}) as script:
        until(lambda: len(list(desk.fake.glob("waits-*"))) == 2)
        script.send_signal(signal.SIGTERM)
        done = finish(script)
    assert done.returncode == 143 and desk.calls("scancel") == [["--signal=TERM", "7"]]
    assert desk.calls("scontrol") == ([["requeue", "7"]] if requeued else [])
    assert len(desk.attempts(0)) == 1 and "checkpoint of 1" in next(desk.folder.rglob("process-1.log")).read_text()


def test_a_task_of_an_array(desk: Desk) -> None:
    task = {"SLURM_JOB_ID": 9, "SLURM_ARRAY_JOB_ID": 9, "SLURM_ARRAY_TASK_ID": 5}
    desk.does(0, "wait")
    with desk.start("slurm_array.sbatch", "--logs", "logs", "size", env=task) as script:
        until(lambda: (desk.fake / "waits-0").exists())
        script.send_signal(signal.SIGTERM)
        done = finish(script)
    assert done.returncode == 143 and desk.arguments(0) == ["sweep", "size", "--index", "5"]
    assert desk.calls("scancel") == [["--signal=TERM", "9_5"]]  # not 9: that is the whole array
    assert desk.calls("scontrol") == [["requeue", "9_5"]]
    assert "RECJAX_CLUSTER" not in desk.environment(0)
    assert "checkpoint of 0" in (desk.folder / "logs/run-5.log").read_text()


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_array.sbatch"])
def test_directives(name: str) -> None:
    text = (LAUNCH / name).read_text()
    before = text[: text.index("set -euo pipefail")]
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", before, re.M))
    assert directives["signal"] == "B:TERM@120" and "requeue" in directives and directives["open-mode"] == "append"
    assert "gpus-per-task" not in directives
    assert text.count("\n#SBATCH") == before.count("\n#SBATCH")  # Slurm reads none behind the first command


@pytest.mark.parametrize(
    ("script", "arguments", "says", "env"),
    [
        ("slurm.sbatch", (), "nothing to run", JOB),
        ("slurm.sbatch", ("--", "train", "p"), "no Slurm job", {}),
        ("slurm.sbatch", ("--nodes", "2", "--", "train"), "options of sbatch", JOB),
        ("slurm.sbatch", ("--", "train"), "3 GPUs", JOB | {"SLURM_GPUS_ON_NODE": 3}),
        ("slurm_array.sbatch", (), "which sweep", {"SLURM_ARRAY_TASK_ID": 1}),
        ("slurm_array.sbatch", ("size",), "no task of a Slurm array", {}),
    ],
)
def test_bad_usage(desk: Desk, script: str, arguments: tuple[str, ...], says: str, env: dict[str, object]) -> None:
    done = desk.run(script, *arguments, env=env)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not desk.calls("srun")
