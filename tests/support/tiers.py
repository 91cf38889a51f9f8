"""Two tiers of tests: `pytest` alone runs the fast ones, `pytest --full` all of them.

A fast test takes a second of CPU at most, starts no Python, and needs no large program compiled. Whatever else is
marked `full`. With --enforce, as in CI, a fast test that takes over twelve seconds fails, which no fast one comes near:
the same test may take five times as long on a busy machine, or with the examples that hypothesis happens to draw. CPU
time is counted, not time on the wall, and as the machine is slower at the moment than the one where the limit was set.
"""

from __future__ import annotations

import re
import resource
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import pytest

from recjax.utils import program_cache
from support import garbage, light_compile, wide

LIMIT_S = 12.0
LOOP_S = 0.042  # CPU time of `loop` on a quiet core of an AMD EPYC of 2023, with Python 3.11

_started = pytest.StashKey[tuple[float, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all tests, not only the fast ones")
    parser.addoption("--enforce", action="store_true", help="fail fast tests that are not")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the tier, unless the command line names files or markers: then it means just those."""
    named = config.args_source == pytest.Config.ArgsSource.ARGS  # so it is in workers, which are given the marker too
    if not (config.option.full or config.option.markexpr or named):
        config.option.markexpr = "not full"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out modules without a marker that is asked for: to import and collect all takes ten seconds of CPU."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    source = collection_path.read_text()
    if any(f"tests/{listed}".partition("::")[0] in str(collection_path) for listed in wide.WIDE):
        source += "\n# mark.wide"
    return True if lacks(source, config.option.markexpr) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the wide tests that are listed, before markers choose."""
    if why := wide.reason(item.nodeid):
        item.add_marker(pytest.mark.wide(why))


def lacks(source: str, expression: str) -> bool:
    """Returns whether no test of a module can be meant by a marker expression, of which `and` and `not` are understood.

    A module without the marker has none, and one whose `pytestmark`, in one line, has a marker that is not asked for.
    """
    words = expression.split()
    if "or" in words or "(" in expression:
        return False
    for term in " ".join(words).split(" and "):
        name = term.removeprefix("not ")
        if not name.isidentifier():
            continue
        where = r"\b" if name == term else r"(?m)^pytestmark = .*\b"
        if (re.search(rf"{where}mark\.{name}\b", source) is None) == (name == term):
            return True
    return False


def slow_first(items: list[pytest.Item]) -> None:
    """Puts modules without slow tests last, so that workers which share the tests out end together.

    Of the others those that compile alike come one after the other, and go on with programs that are there.
    """
    slow = {item.path for item in items if item.get_closest_marker("full")}
    items.sort(key=lambda item: (item.path not in slow, light_compile.wanted(item.get_closest_marker("light_compile"))))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Does beforehand what the first test would have to pay for. A command with fewer devices must not be the first."""
    if session.items:
        jax.devices()
        import matplotlib.pyplot  # noqa: F401
        import tensorflow_datasets  # noqa: F401

        garbage.collect_seldom()


def _spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[_started] = _spent(), program_cache.Entries.written
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fails a fast test that was too slow, but for one that compiled: the next run finds its programs in the cache."""
    result = yield
    before, written = item.stash[_started]
    compiled = program_cache.Entries.written > written
    if item.config.option.enforce and not compiled and item.get_closest_marker("full") is None:
        check(_spent() - before)
    return result


def loop() -> float:
    """CPU seconds of a fixed piece of work."""
    start = time.process_time()
    total, last = 0, {}
    for n in range(600_000):
        total += n & 7
        last[n & 1023] = total
    return time.process_time() - start


def slowness() -> float:
    """How many times as long as there work takes here and now, at least 1: caches and cores are shared."""
    return max(1.0, statistics.median(loop() for _ in range(5)) / LOOP_S)


def check(spent_s: float, measure: Callable[[], float] = slowness) -> None:
    """Fails if a fast test took so much CPU; `measure` is asked only then."""
    if spent_s > LIMIT_S and spent_s > LIMIT_S * (slower := measure()):
        pytest.fail(
            f"this fast test took {spent_s:.1f} s of CPU; the limit is {LIMIT_S * slower:.1f}. Make it quicker, or "
            "mark it: @pytest.mark.full",
            pytrace=False,
        )
