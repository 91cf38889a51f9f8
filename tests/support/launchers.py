"""The launch scripts with fakes first on PATH: each fake records how it was called, and does what a test tells it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[2]
LAUNCH = TOP / "launch"
# What a background job of a shell ignores its children ignore too, and bash cannot trap it any more.
_HEED = ("env", "--default-signal=INT,HUP,QUIT")
GOLDEN = TOP / "tests" / "golden" / "launch"

# Does one thing an attempt, line by line of does-I: "exit N", "wait" (for SIGTERM: 143, SIGINT: 130), "die" (SIGKILL).
RECJAX = """#!/usr/bin/env bash
if [[ $1 == show || ${!#} == --help || ${!#} == --dry-run ]]; then # what a dry run checks the command by
  printf '%s\n' "$*" >>"$FAKE/checks"
  if [[ -e $FAKE/refuses ]]; then printf '\nrecjax: error: %s\n' "$(cat "$FAKE/refuses")" >&2; exit 2; fi
  cat "$FAKE/shows" 2>/dev/null
  exit 0
fi
i=${RECJAX_PROCESS:-${SLURM_PROCID:-0}}
env | grep -E '^(RECJAX_|NPROC=|PYTHONUNBUFFERED=|no_grpc_proxy=|SECRET=)' | sort >"$FAKE/env-$i"
printf '%s\\n' "$@" >"$FAKE/arguments-$i"
echo "$$ $PWD" >>"$FAKE/attempts-$i"
echo "out of $i"
echo "err of $i" >&2
does=$(sed -n "$(wc -l <"$FAKE/attempts-$i")p" "$FAKE/does-$i" 2>/dev/null)
case $does in
  wait) trap 'echo "checkpoint of $i"; exit 143' TERM; trap 'echo "checkpoint of $i"; exit 130' INT
        touch "$FAKE/waits-$i"
        for _ in {1..1200}; do sleep 0.05; done ;;
  die) kill -9 $$ ;;
  exit*) exit "${does#exit }" ;;
esac
"""
# Bash that records a script's arguments, a line each. Calls run at once, and bash writes line by line: so cat writes.
RECORD = """call=$FAKE/${0##*/}.call-$$
{ printf '%s\\n' "$@"; echo --; } >"$call"
cat "$call" >>"$FAKE/${0##*/}.calls"
rm "$call"
"""
# Also records its standard input; answers what the test put into NAME.out.
RECORDER = (
    f"#!/usr/bin/env bash\nname=${{0##*/}}\n{RECORD}"
    + """\
if [[ ! -t 0 && -n ${FAKE_READS:-} ]]; then cat >"$FAKE/$name.input"; fi
cat "$FAKE/$name.out" 2>/dev/null
exit "$(cat "$FAKE/$name.status" 2>/dev/null || echo 0)"
"""
)


class Desk:
    """A working folder with fakes.

    Attributes:
      folder: where scripts run.
      fake: where the fakes find their orders and leave their records.
    """

    def __init__(self, root: Path) -> None:
        self.folder, self.fake, self._bin = root / "work", root / "fake", root / "bin"
        for folder in (self.folder, self.fake, self._bin):
            folder.mkdir()
        self.write("recjax", RECJAX)
        ours = ("RECJAX_", "SLURM_", "NPROC", "JAX_", "XLA_", "NCCL_", "CLOUDSDK_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and "prox" not in k}
        self.env = kept | {"PATH": f"{self._bin}:{os.environ['PATH']}", "FAKE": str(self.fake), "HOME": str(root)}

    def write(self, name: str, text: str = RECORDER) -> None:
        """Puts a program first on PATH."""
        path = self._bin / name
        path.write_text(text)
        path.chmod(0o755)

    def does(self, process: int, *attempts: str) -> None:
        """What the fake recjax of a process does, attempt by attempt."""
        (self.fake / f"does-{process}").write_text("".join(f"{a}\n" for a in attempts))

    def attempts(self, process: int) -> list[int]:
        """The process ids of its attempts."""
        path = self.fake / f"attempts-{process}"
        return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def environment(self, process: int) -> dict[str, str]:
        """What the fake recjax of a process saw of its last environment."""
        lines = (self.fake / f"env-{process}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def arguments(self, process: int) -> list[str]:
        """What it was called with last."""
        return (self.fake / f"arguments-{process}").read_text().splitlines()

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of all calls of a recorder."""
        path = self.fake / f"{name}.calls"
        parts = path.read_text().split("\n--\n")[:-1] if path.exists() else []
        return [part.split("\n") for part in parts]

    def start(self, script: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Starts a script of launch/."""
        words = ["bash", str(LAUNCH / script), *map(str, arguments)]
        env = self.env | {k: str(v) for k, v in options.pop("env", {}).items()}
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
        } | options
        return subprocess.Popen([*_HEED, *words], cwd=self.folder, env=env, text=True, **pipes)

    def run(self, script: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a script of launch/ to its end."""
        with self.start(script, *arguments, **options) as process:
            return finish(process)

    def dry(self, script: str, *arguments: object, **options: Any) -> str:
        """What a script says it would run, without this machine's paths; no fake may have been called."""
        done = self.run(script, "--dry-run", *arguments, **options)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert not list(self.fake.glob("*.calls")) and not list(self.fake.glob("attempts-*"))
        text = done.stdout
        for path, name in ((self._bin, "BIN"), (self.folder, "WORK"), (self.fake.parent, "HOME"), (TOP, "CHECKOUT")):
            text = text.replace(str(path), name)
        return text


def finish(process: subprocess.Popen[str], limit_s: float = 20) -> subprocess.CompletedProcess[str]:
    """Waits for a script, and reads what it wrote."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def until(condition: Callable[[], object], limit_s: float = 10) -> None:
    """Waits until it is true."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def alive(process_id: int) -> bool:
    """Whether it runs (one that has ended but was not waited for does not)."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def golden(name: str, text: str) -> None:
    """Compares with tests/golden/launch/NAME. Written anew with RECJAX_GOLDEN=write: read the difference first."""
    path = GOLDEN / name
    if os.environ.get("RECJAX_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{name} changed; if it should, run again with RECJAX_GOLDEN=write"


def scripts() -> Sequence[Path]:
    """Every shell script of launch/."""
    return sorted(p for p in LAUNCH.rglob("*") if p.suffix in (".sh", ".sbatch"))


# Also from an environment that is not activated.
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
