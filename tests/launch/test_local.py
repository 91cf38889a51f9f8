"""local.sh for real, with a fake recjax."""

import os
import signal
from pathlib import Path

import pytest
from support.launchers import Desk, alive, finish, golden, until


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_dry_run(desk: Desk) -> None:
    command = ("--", "train", "movietweetings", "plan=my plan.json", "--out", "runs/it's mine")
    text = desk.dry("local.sh", "--processes", 2, "--devices", 4, "--port", 9000, "--restarts", 3, *command)
    golden("local.txt", text)
    options = ("--gpus", "--processes", 2, "--port", 9000, "--logs", "logs")
    gpus = desk.dry("local.sh", *options, "--", "bench", "bench_kaggle16")
    golden("local_gpus.txt", gpus)


def test_each_process_is_told_who_it_is(desk: Desk) -> None:
    options = ("--processes", 3, "--devices", 2, "--logs", "logs")
    env = {"NPROC": 1, "https_proxy": "http://p", "no_proxy": "here"}
    done = desk.run("local.sh", *options, "--", "train", "p", "a.b=c d", env=env)
    assert done.returncode == 0, done.stderr
    seen = [desk.environment(i) for i in range(3)]
    assert [s.pop("RECJAX_PROCESS") for s in seen] == ["0", "1", "2"]
    assert seen[0] == seen[1] == seen[2]
    host, port = seen[0].pop("RECJAX_COORDINATOR").split(":")
    assert host == "127.0.0.1" and 20000 <= int(port) < 30000
    assert seen[0] == {
        "RECJAX_PROCESSES": "3",
        "RECJAX_LIMIT_S": "60",
        "PYTHONUNBUFFERED": "1",
        "NPROC": "16",
        "no_grpc_proxy": "here,127.0.0.1",
    }
    assert desk.arguments(2) == ["train", "p", "a.b=c d", "mesh.platform=cpu", "mesh.devices=6"]


def test_logs_and_the_output_of_process_0(desk: Desk) -> None:
    done = desk.run("local.sh", "--logs", "logs", "--", "train", "p")
    assert done.stdout == "out of 0\n" and "err of 0\n" in done.stderr and "of 1" not in done.stderr
    for process in (0, 1):
        log = (desk.folder / f"logs/process-{process}.log").read_text()
        assert f"out of {process}\n" in log and f"err of {process}\n" in log
        assert "recjax train p" in log.splitlines()[0]


def test_the_same_command_has_the_same_folder_of_logs(desk: Desk) -> None:
    for preset in ("p", "p", "q"):
        desk.run("local.sh", "--", "train", preset)
    names = sorted(path.name for path in (desk.folder / "runs/logs").iterdir())
    assert len(names) == 2 and names[0].startswith("train-p-") and names[1].startswith("train-q-")
    assert (desk.folder / "runs/logs" / names[0] / "process-1.log").read_text().count("attempt 1") == 2


def test_lost_processes_are_restarted(desk: Desk) -> None:
    desk.does(0, "exit 4", "exit 0")
    desk.does(1, "die", "exit 0")
    done = desk.run("local.sh", "--restarts", 2, "--logs", "logs", "--", "train", "p")
    assert done.returncode == 0 and "restart 1 of 2" in done.stderr and "137" in done.stderr
    assert "Killed" not in done.stderr
    assert [len(desk.attempts(i)) for i in (0, 1)] == [2, 2]
    assert "attempt 2: recjax train p" in (desk.folder / "logs/process-1.log").read_text()


def test_lost_processes_when_no_restart_is_left(desk: Desk) -> None:
    desk.does(0, "exit 4", "exit 4", "exit 0")
    done = desk.run("local.sh", "--restarts", 1, "--", "train", "p")
    assert done.returncode == 4 and "no restart is left" in done.stderr
    assert len(desk.attempts(1)) == 2


@pytest.mark.parametrize(
    ("ends", "status"),
    [(("exit 2", "exit 4"), 2), (("exit 4", "exit 3"), 3), (("exit 4", "exit 1"), 1), (("exit 0", "exit 143"), 143)],
)
def test_what_no_restart_mends_ends_at_once(desk: Desk, ends: tuple[str, str], status: int) -> None:
    for process in (0, 1):
        desk.does(process, ends[process])
    done = desk.run("local.sh", "--restarts", 5, "--", "train", "p")
    assert done.returncode == status and len(desk.attempts(0)) == 1


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_process(desk: Desk, name: signal.Signals) -> None:
    for process in range(3):
        desk.does(process, "wait")
    with desk.start("local.sh", "--processes", 3, "--restarts", 5, "--logs", "logs", "--", "train", "p") as script:
        until(lambda: len(list(desk.fake.glob("waits-*"))) == 3)
        script.send_signal(name)
        done = finish(script)
    assert done.returncode == (130 if name == signal.SIGINT else 143)
    assert "out of 0\ncheckpoint of 0\n" in done.stdout
    assert all("checkpoint" in (desk.folder / f"logs/process-{i}.log").read_text() for i in range(3))
    assert [len(desk.attempts(i)) for i in range(3)] == [1, 1, 1]


def test_a_signal_to_the_whole_group_as_ctrl_c_sends_it(desk: Desk) -> None:
    desk.does(0, "wait")
    desk.does(1, "wait")
    with desk.start("local.sh", "--logs", "logs", "--", "train", "p", start_new_session=True) as script:
        until(lambda: len(list(desk.fake.glob("waits-*"))) == 2)
        os.killpg(script.pid, signal.SIGINT)
        done = finish(script)
    assert done.returncode == 130 and "checkpoint of 0\n" in done.stdout
    assert "checkpoint of 0\n" in (desk.folder / "logs/process-0.log").read_text()


def test_a_second_signal_kills(desk: Desk) -> None:
    for process in (0, 1):
        desk.does(process, "wait")
    stubborn = (desk.fake.parent / "bin" / "recjax").read_text().replace("exit 143", "true")
    desk.write("recjax", stubborn)
    with desk.start("local.sh", "--", "train", "p") as script:
        until(lambda: len(list(desk.fake.glob("waits-*"))) == 2)
        script.send_signal(signal.SIGTERM)
        until(lambda: "checkpoint of 1" in next(desk.folder.rglob("process-1.log")).read_text())
        script.send_signal(signal.SIGTERM)
        done = finish(script)
    assert done.returncode == 143
    assert not any(alive(desk.attempts(i)[0]) for i in (0, 1))


def test_a_killed_process_is_noticed_and_a_stuck_one_killed_after_the_limit(desk: Desk) -> None:
    for process in (0, 1):
        desk.does(process, "wait", "exit 0")
    with desk.start("local.sh", "--restarts", 1, "--", "train", "p", env={"RECJAX_LIMIT_S": -59}) as script:  # so 1 s
        until(lambda: len(list(desk.fake.glob("waits-*"))) == 2)
        os.kill(desk.attempts(1)[0], signal.SIGKILL)
        done = finish(script)
    assert done.returncode == 0 and "killing them" in done.stderr and "restart 1 of 1" in done.stderr
    assert not alive(desk.attempts(0)[0])


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--",),
        ("train", "p"),
        ("--", "--processes", "2"),
        ("--processes", "0", "--", "train"),
        ("--processes",),
        ("--devices", "two", "--", "train"),
        ("--gpus", "--devices", "2", "--", "train"),
        ("--restarts", "-1", "--", "train"),
        ("--devices", "2", "--", "train", "p", "mesh.devices=3"),
        ("--port", "http", "--", "train"),
    ],
)
def test_bad_usage(desk: Desk, arguments: tuple[str, ...]) -> None:
    done = desk.run("local.sh", *arguments)
    assert done.returncode == 2 and done.stderr.startswith("local.sh: error: ") and done.stderr.count("\n") == 1
    assert not desk.attempts(0)


def test_without_recjax(desk: Desk) -> None:
    done = desk.run("local.sh", "--", "train", "p", env={"RECJAX_BIN": "/nowhere/recjax"})
    assert done.returncode == 127 and "nowhere/recjax" in done.stderr
