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


@pytest.mark.full
@pytest.mark.parametrize(("method", "after"), [("write", 9), ("finish", 5), ("train_counts", 30), ("read", 4)])
def test_a_killed_command_goes_on(tmp_path, method, after):
    (tmp_path / "train.txt").write_bytes(criteo_support.text(criteo_support.random_rows(300)))
    command = ("data", "prepare", "criteo_kaggle", "--from", tmp_path, "--json", "--out")
    never = KILL.format(after=10**9, method=method)
    with start(*command, tmp_path / "clean", before=never) as process:
        clean = json.loads(process.communicate()[0])
    with start(*command, tmp_path / "out", before=KILL.format(after=after, method=method)) as process:
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    with start(*command, tmp_path / "out", before=never) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "going on with" in err
    assert json.loads(out)["fingerprint"] == clean["fingerprint"]
