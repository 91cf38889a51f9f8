"""A command starts itself anew with huge pages, once, where the system gives them to those who ask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recjax import pages

SCRIPT = """
import os, sys
from pathlib import Path
from recjax import pages
pages._SYSTEM = Path(sys.argv[1])
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), flush=True)
pages.restart_with_huge_pages()
print("runs")
"""


@pytest.mark.parametrize(
    ("system", "given", "starts"),
    [
        ("always [madvise] never", None, ["None", "glibc.malloc.hugetlb=1"]),
        ("always [madvise] never", "glibc.malloc.check=1", ["glibc.malloc.check=1"]),  # the user's own choice
        ("[always] madvise never", None, ["None"]),
        (None, None, ["None"]),
    ],
)
def test_it_restarts_at_most_once(tmp_path, system, given, starts):
    if system is not None:
        (tmp_path / "enabled").write_text(system)
    environment = {key: value for key, value in os.environ.items() if key != pages._TUNABLES}
    environment["PYTHONPATH"] = str(Path(pages.__file__).parent.parent)
    if given is not None:
        environment[pages._TUNABLES] = given
    command = [sys.executable, "-c", SCRIPT, tmp_path / "enabled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    assert last == "runs"
    assert [line.split()[1] for line in lines] == starts
    assert len({line.split()[0] for line in lines}) == 1  # the same process
