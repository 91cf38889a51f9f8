"""Compiled programs that commands keep: the next process takes them, unless somebody said otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

PROGRAM = """
import json, sys
import jax
from jax import monitoring
from recjax.cli.program_cache import keep_programs

hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
keep_programs()
value = jax.jit(lambda x: x * 2 + 1)(3.0)
print(json.dumps({"hits": len(hits), "value": float(value), "folder": jax.config.jax_compilation_cache_dir}))
"""


def started(choice, program=PROGRAM, **more):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_") or k == "JAX_PLATFORMS"}
    # Without the tests' own cache and sitecustomize.py.
    checkout = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": checkout, **more}
    environment["RECJAX_PROGRAMS"] = str(choice)
    environment = {name: value for name, value in environment.items() if value is not None}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout), done.stderr


def files(path):
    return [p for p in path.rglob("*") if p.is_file()]


def test_the_second_process_takes_what_the_first_one_compiled(tmp_path):
    first, _ = started(tmp_path)
    assert (first["hits"], first["value"]) == (0, 7.0) and Path(first["folder"]).parent == tmp_path
    (kept,) = files(tmp_path)
    os.utime(kept, (0, 0))  # as if nobody had used it for years
    stale, _ = started(tmp_path)
    assert stale["hits"] == 0
    second, _ = started(tmp_path)
    assert second["hits"] == 1 and second["value"] == 7.0


def test_nothing_is_kept_where_somebody_said_so(tmp_path):
    assert started("off")[0]["folder"] is None
    own, _ = started(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert own["folder"] == str(tmp_path / "own")
    assert started(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")[0]["folder"] is None
    assert [p.parent for p in files(tmp_path)] in ([], [tmp_path / "own"])


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path):
    (tmp_path / "file").write_text("")
    found, said = started(tmp_path / "file")
    assert (found["value"], found["folder"]) == (7.0, None)
    assert "note: compiled programs are not kept" in said


def test_programs_of_a_small_model_are_kept(tmp_path):
    """They take some 0.3 s each to compile, where JAX by itself keeps those of a second."""
    sorts = "lambda x: sum(jax.numpy.sort(x * jax.numpy.arange(99.0 + k))[-1] for k in range(40))"
    program = PROGRAM.replace("lambda x: x * 2 + 1", sorts)
    none = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": None}
    first, _ = started(tmp_path, program, **none)
    assert first["hits"] == 0
    second, _ = started(tmp_path, program, **none)
    assert second["hits"] == 1 and second["value"] == first["value"]
