"""k8s/render.sh, gke.sh and tpu_vm.sh, with fakes for kubectl and gcloud."""

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.launchers import RECORD, Desk, finish, golden, until

POD = ("--image", "registry/recjax:1", "--claim", "recjax-runs")
CLUSTER = ("--cluster", "c", "--location", "us-west4")
# Does as each of two workers what it is told, with the machine's name, which JAX's workers have a number in.
GCLOUD = (
    """#!/usr/bin/env bash
"""
    + RECORD
    + """\
for word in "$@"; do [[ $word != --command=* ]] || command=${word#*=}; done
worst=0 ids=()
for worker in 0 1; do
  mkdir -p "$FAKE/home-$worker"
  WORKER=$worker HOME=$FAKE/home-$worker RECJAX_PROCESS=$worker sh -c "$command" &
  ids+=("$!")
done
for id in "${ids[@]}"; do
  status=0
  wait "$id" || status=$?
  worst=$((worst ? worst : status))
done
exit "$worst"
"""
)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path)
    desk.write("kubectl")
    desk.write("gcloud")
    return desk


def job_set(text: str) -> dict[str, Any]:
    found: dict[str, Any] = next(d for d in yaml.safe_load_all(text) if d["kind"] == "JobSet")
    return found


def container(text: str) -> dict[str, Any]:
    pod = job_set(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return {"pod": pod, **pod["containers"][0]}


def test_the_manifest(desk: Desk) -> None:
    command = ("--", "train", "p", 'a="b c" $(HOME) \\', "mesh.platform=gpu", "mesh.devices=0")
    text = desk.dry("k8s/render.sh", *POD, "--processes", 4, "--gpus", 8, *command)
    golden("k8s_gpu.yaml", text)
    kinds = [document["kind"] for document in yaml.safe_load_all(text)]
    assert kinds == ["ServiceAccount", "NetworkPolicy", "JobSet"] and "@" not in text.replace("NAME@PROJECT", "")
    found = container(text)
    expanded = [argument.replace("$$", "$") for argument in found["args"]]  # as Kubernetes does
    assert found["command"] + expanded == ["recjax", *command[1:]]
    env = {e["name"]: e.get("value", e.get("valueFrom")) for e in found["env"]}
    name = job_set(text)["metadata"]["name"]
    assert env["RECJAX_COORDINATOR"] == f"{name}-workers-0-0.{name}:8476" and env["RECJAX_PROCESSES"] == "4"
    assert "job-completion-index" in env["RECJAX_PROCESS"]["fieldRef"]["fieldPath"]
    assert found["resources"]["limits"]["nvidia.com/gpu"] == 8
    job = job_set(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["parallelism"], job["completions"], job["backoffLimit"]) == ("Indexed", 4, 4, 0)
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == found["name"]
    assert not {4, 143, 137} & set(job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"])


def test_the_pod_has_no_rights(desk: Desk) -> None:
    found = container(desk.dry("k8s/render.sh", *POD, "--", "train", "p"))
    assert found["pod"]["securityContext"]["runAsNonRoot"] and found["pod"]["automountServiceAccountToken"] is False
    assert found["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert found["securityContext"]["readOnlyRootFilesystem"] and "hostNetwork" not in found["pod"]
    assert found["pod"]["terminationGracePeriodSeconds"] == 600


def test_tpu_slices(desk: Desk) -> None:
    options = ("--tpus", 4, "--slices", 2, "--user", 0, "--name", "my-run")
    text = desk.dry("k8s/render.sh", *POD, *options, "--", "train", "p")
    golden("k8s_tpu.yaml", text)
    env = {e["name"]: e["value"] for e in container(text)["env"]}
    assert env["RECJAX_CLUSTER"] == "auto" and "RECJAX_COORDINATOR" not in env
    assert job_set(text)["spec"]["replicatedJobs"][0]["replicas"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--claim", "c", "--", "train"), "--image"),
        (("--image", "i", "--", "train"), "--claim"),
        (POD, "nothing to run"),
        ((*POD, "--gpus", "8", "--tpus", "4", "--", "train"), "exclude"),
        ((*POD, "--slices", "2", "--", "train"), "--slices"),
        ((*POD, "--memory", "much", "--", "train"), "--memory"),
        ((*POD, "--name", "A B", "--", "train"), "--name"),
        ((*POD, "--", "train", "a=\n"), "control"),
        ((*POD, "--select", "x", "--", "train"), "--select"),
    ],
)
def test_bad_usage_of_render(desk: Desk, arguments: tuple[str, ...], says: str) -> None:
    done = desk.run("k8s/render.sh", *arguments)
    assert done.returncode == 2 and says in done.stderr and done.stdout == ""


def test_gke(desk: Desk) -> None:
    gpu = (*CLUSTER, *POD, "--gpu", "nvidia-h100-80gb", "--gpus", 8, "--again", "--", "train", "p")
    golden("gke_gpu.txt", desk.dry("gke.sh", *gpu))
    tpu = ("--project", "p", "--build", "tpu", "--tpu", "tpu-v5-lite-podslice", "--topology", "4x4", "--tpus", 4)
    golden("gke_tpu.txt", desk.dry("gke.sh", *CLUSTER, *POD, *tpu, "--", "train", "p"))
    done = desk.run("gke.sh", *gpu, env={"FAKE_READS": 1}, stdin=None)
    assert done.returncode == 0, done.stderr
    assert desk.calls("gcloud") == [["container", "clusters", "get-credentials", "c", "--location=us-west4"]]
    deleted, applied = desk.calls("kubectl")
    assert deleted[:2] == ["delete", "jobset"] and applied == ["apply", "-f", "-"]
    sent = (desk.fake / "kubectl.input").read_text()
    assert container(sent)["pod"]["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}


def test_gke_stops_where_a_step_fails(desk: Desk) -> None:
    (desk.fake / "gcloud.status").write_text("3")
    done = desk.run("gke.sh", *CLUSTER, *POD, "--", "train", "p")
    assert done.returncode == 3 and not desk.calls("kubectl")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*POD, "--", "train"), "--cluster"),
        ((*CLUSTER, "--", "train"), "--image"),
        ((*CLUSTER, *POD), "nothing to run"),
        ((*CLUSTER, *POD, "--tpu", "t", "--tpus", "4", "--", "train"), "--topology"),
        ((*CLUSTER, *POD, "--tpu", "t", "--tpus", "3", "--topology", "4x4", "--", "train"), "16 chips"),
    ],
)
def test_bad_usage_of_gke(desk: Desk, arguments: tuple[str, ...], says: str) -> None:
    done = desk.run("gke.sh", *arguments)
    assert done.returncode == 2 and says in done.stderr and not desk.calls("gcloud")


@pytest.fixture
def slice_(desk: Desk) -> Desk:
    desk.write("gcloud", GCLOUD)
    desk.write("hostname", "#!/bin/sh\necho t1v-n-1234-w-$WORKER\n")
    return desk


def test_tpu_vm(slice_: Desk) -> None:
    options = ("--tpu", "t", "--zone", "z", "--dir", "/mnt/my runs")
    golden("tpu_vm.txt", slice_.dry("tpu_vm.sh", *options, "--", "train", "p", "a=it's"))
    done = slice_.run("tpu_vm.sh", "--tpu", "t", "--dir", slice_.folder, "--", "train", "p", "a=it's $HOME")
    assert done.returncode == 0, done.stderr
    call = (slice_.fake / "gcloud.calls").read_text().splitlines()
    assert call[:6] == ["compute", "tpus", "tpu-vm", "ssh", "t", "--worker=all"]
    assert slice_.environment(1)["RECJAX_CLUSTER"] == "auto"
    assert slice_.arguments(1) == ["train", "p", "a=it's $HOME"]
    assert done.stdout == "out of 0\n"
    assert "out of 1\n" in next(slice_.folder.rglob("process-1.log")).read_text()


def test_tpu_vm_restarts(slice_: Desk) -> None:
    slice_.does(0, "exit 4", "exit 0")
    slice_.does(1, "die", "exit 0")
    done = slice_.run("tpu_vm.sh", "--tpu", "t", "--dir", slice_.folder, "--restarts", 1, "--", "train", "p")
    assert done.returncode == 0 and len(slice_.attempts(1)) == 2


@pytest.mark.parametrize("how", ["signal", "stop"])
def test_tpu_vm_stops(slice_: Desk, how: str) -> None:
    command = ("--tpu", "t", "--dir", slice_.folder, "--restarts", 3)
    for worker in (0, 1):
        slice_.does(worker, "wait")
    with slice_.start("tpu_vm.sh", *command, "--", "train", "p") as script:
        until(lambda: len(list(slice_.fake.glob("waits-*"))) == 2)
        if how == "stop":
            again = slice_.run("tpu_vm.sh", *command, "--", "train", "p")
            assert again.returncode == 5 and "still going on" in again.stderr
            assert slice_.run("tpu_vm.sh", *command, "--stop", "--", "train", "p").returncode == 0
        else:
            script.send_signal(signal.SIGTERM)
        done = finish(script)
    assert done.returncode == 143 and "checkpoint of 0\n" in done.stdout and len(slice_.attempts(0)) == 1


def test_tpu_vm_without_a_connection(desk: Desk) -> None:
    (desk.fake / "gcloud.status").write_text("255")
    done = desk.run("tpu_vm.sh", "--tpu", "t", "--dir", "/x", "--restarts", 3, "--", "train", "p")
    assert done.returncode == 1 and "connection" in done.stderr and len(desk.calls("gcloud")) == 1
