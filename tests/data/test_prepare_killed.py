"""A preparation that is killed with SIGKILL, at any of four places, goes on and ends with the same data."""

import json
import signal

import pytest
from support import criteo as criteo_support
from support.commands import start

KILL = """
import os, signal
from recjax.data.prepare import prepare, work_folder
after = {after}
original = work_folder.WorkFolder.{method}
def method(self, *arguments, **options):
    global after
    after -= 1
    if after < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *arguments, **options)
work_folder.WorkFolder.{method} = method
from recjax.data.datasets import criteo
criteo._PIECE_BYTES = 2000
criteo.CriteoReader.__init__.__defaults__ = (2000,)
"""


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    (folder / "train.txt").write_bytes(criteo_support.text(criteo_support.random_rows(300)))
    return folder


def command(raw, out):
    return ("data", "prepare", "criteo_kaggle", "--from", raw, "--json", "--out", out)


@pytest.fixture(scope="module")
def clean(raw, tmp_path_factory):
    """The report of a preparation that nobody killed."""
    out = tmp_path_factory.mktemp("clean") / "out"
    with start(*command(raw, out), before=KILL.format(after=10**9, method="read")) as process:
        return json.loads(process.communicate()[0])


@pytest.mark.full
@pytest.mark.parametrize(("method", "after"), [("write", 9), ("finish", 5), ("train_counts", 30), ("read", 4)])
def test_a_killed_command_goes_on(raw, clean, tmp_path, method, after):
    never = KILL.format(after=10**9, method=method)
    with start(*command(raw, tmp_path / "out"), before=KILL.format(after=after, method=method)) as process:
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    with start(*command(raw, tmp_path / "out"), before=never) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "going on with" in err
    assert json.loads(out)["fingerprint"] == clean["fingerprint"]
