"""ssh.sh with a fake ssh that runs what it is sent on this machine, in an environment with nothing of ours."""

import os
import signal
from pathlib import Path

import pytest
from support.launchers import RECORD, Desk, alive, finish, golden, until

# Records its arguments; then the other machine's bash reads our input.
SSH = (
    """#!/usr/bin/env bash
"""
    + RECORD
    + """\
cd / && exec env -i PATH="$PATH" FAKE="$FAKE" bash -s
"""
)
HOSTS = "# two machines\nnode1  processes=2\n\nme@node2  address=10.0.0.2  # by its other name\n"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path)
    desk.write("ssh", SSH)
    (desk.folder / "hosts").write_text(HOSTS)
    return desk


def test_dry_run(desk: Desk) -> None:
    options = ("--hosts", "hosts", "--dir", "/shared/my runs", "--gpus", "--env", "TOKEN", "--restarts", 2)
    secrets = {"TOKEN": "it's secret", "NCCL_SOCKET_IFNAME": "eth0"}
    text = desk.dry("ssh.sh", *options, "--", "train", "p", "--out", "runs/it's mine", env=secrets)
    assert "secret" not in text
    golden("ssh.txt", text)


def test_each_process_is_told_who_it_is(desk: Desk) -> None:
    options = ("--hosts", "hosts", "--devices", 2, "--env", "SECRET")
    done = desk.run("ssh.sh", *options, "--", "train", "p", "a=$HOME 'x'", env={"SECRET": "it's $HOME"})
    assert done.returncode == 0, done.stderr
    calls = desk.calls("ssh")
    probes, calls = [call for call in calls if call[-1] == "true"], [call for call in calls if call[-1] != "true"]
    assert sorted(call[-2] for call in probes) == ["me@node2", "node1"]
    assert [call[-3] for call in calls] == ["node1", "node1", "me@node2"]
    assert all(call[-2:] == ["bash", "-s"] and "BatchMode=yes" in call for call in calls)
    assert not any("secret" in word or "$HOME" in word for call in calls for word in call)
    seen = [desk.environment(i) for i in range(3)]
    assert [s.pop("RECJAX_PROCESS") for s in seen] == ["0", "1", "2"]
    wanted = {
        "RECJAX_COORDINATOR": "node1:8476",
        "RECJAX_PROCESSES": "3",
        "RECJAX_LIMIT_S": "60",
        "PYTHONUNBUFFERED": "1",
        "NPROC": "16",
        "SECRET": "it's $HOME",
    }
    assert seen[0] == seen[1] == seen[2] == wanted
    assert desk.arguments(2) == ["train", "p", "a=$HOME 'x'", "mesh.platform=cpu", "mesh.devices=6"]
    assert (desk.fake / "attempts-0").read_text().split()[1] == str(desk.folder)
    assert done.stdout == "out of 0\n" and "err of 0" in done.stderr
    assert "out of 2\n" in next(desk.folder.rglob("process-2.log")).read_text()


def test_a_gpu_for_each_process(desk: Desk) -> None:
    assert desk.run("ssh.sh", "--hosts", "hosts", "--gpus", "--", "train", "p").returncode == 0
    assert [desk.environment(i)["RECJAX_LOCAL_DEVICES"] for i in range(3)] == ["0", "1", "0"]
    assert desk.arguments(0)[-2:] == ["mesh.platform=gpu", "mesh.devices=3"]


def test_restarts(desk: Desk) -> None:
    desk.does(0, "exit 4", "exit 0")
    desk.does(2, "die", "exit 0")
    done = desk.run("ssh.sh", "--hosts", "hosts", "--restarts", 1, "--", "train", "p")
    assert done.returncode == 0 and [len(desk.attempts(i)) for i in range(3)] == [2, 2, 2]


def test_a_machine_that_cannot_be_reached(desk: Desk) -> None:
    """Nothing is started, and no restart is spent on it."""
    desk.write("ssh", SSH.replace("cd /", "if [[ $* == *node2* ]]; then echo no route >&2; exit 255; fi; cd /"))
    done = desk.run("ssh.sh", "--hosts", "hosts", "--restarts", 3, "--", "train", "p")
    assert done.returncode == 1 and not desk.attempts(0) and not list(desk.folder.rglob("*.log"))
    assert "ssh.sh: me@node2 cannot be reached: no route\n" in done.stderr and "nothing was started" in done.stderr
    assert "node1" not in done.stderr and "lost" not in done.stderr


def test_a_machine_that_is_lost_later(desk: Desk) -> None:
    broken = 'if [[ $* == *"node2 bash -s" ]] && mkdir "$FAKE/once" 2>&-; then echo broken pipe >&2; exit 255; fi'
    desk.write("ssh", SSH.replace("cd /", f"{broken}\ncd /"))
    done = desk.run("ssh.sh", "--hosts", "hosts", "--restarts", 1, "--", "train", "p")
    assert done.returncode == 0 and "0 0 255" in done.stderr and len(desk.attempts(0)) == 2
    assert "broken pipe" in next(desk.folder.rglob("process-2.log")).read_text()


def test_a_folder_that_is_not_there(desk: Desk) -> None:
    done = desk.run("ssh.sh", "--hosts", "hosts", "--dir", "/not/there", "--restarts", 3, "--", "train", "p")
    assert done.returncode == 2 and "/not/there" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_stops_the_others(desk: Desk, how: signal.Signals) -> None:
    for process in range(3):
        desk.does(process, "wait")
    with desk.start("ssh.sh", "--hosts", "hosts", "--restarts", 5, "--", "train", "p") as script:
        until(lambda: len(list(desk.fake.glob("waits-*"))) == 3)
        if how == signal.SIGKILL:
            os.kill(script.pid, how)
            script.wait(timeout=10)
        else:
            script.send_signal(how)
            assert finish(script).returncode == (130 if how == signal.SIGINT else 143)
        until(lambda: not any(alive(desk.attempts(i)[0]) for i in range(3)))
    for i in range(3):
        log = next(desk.folder.rglob(f"process-{i}.log"))
        until(lambda log=log, i=i: f"checkpoint of {i}\n" in log.read_text())


@pytest.mark.parametrize(
    ("hosts", "arguments", "says"),
    [
        ("node1\n", (), "nothing to run"),
        ("node1\n", ("--", "--x"), "no verb"),
        ("", ("--", "train"), "no machine"),
        ("node1 processes=0\n", ("--", "train"), "hosts:1: processes"),
        ("a\n-oProxyCommand=x\n", ("--", "train"), "hosts:2"),
        ("node1 slots=2\n", ("--", "train"), "slots=2"),
        ("node1\n", ("--env", "NO_SUCH", "--", "train"), "NO_SUCH"),
    ],
)
def test_bad_usage(desk: Desk, hosts: str, arguments: tuple[str, ...], says: str) -> None:
    (desk.folder / "hosts").write_text(hosts)
    done = desk.run("ssh.sh", "--hosts", "hosts", *arguments)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not desk.calls("ssh")
