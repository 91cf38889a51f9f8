"""The code gets no harder to hold in the head: counts of `support/house.py` and `support/entered.py` may only fall.

`tests/house.json` holds the highest value that each count may have. A test fails where a count is above it.

    python tests/test_house.py --json              # all counts as one JSON object, also those that are free to rise
    python tests/test_house.py --list weak_names   # where to find what a count counts
    python tests/test_house.py --lower             # writes the counts that have fallen to the table
"""

from __future__ import annotations

import argparse
import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support import entered
from support.house import WORDS, House, circles

PACKAGE = Path(__file__).parents[1] / "recjax"
TABLE = Path(__file__).with_name("house.json")
# Code that moves from core to lab makes lab grow, and a circle that is broken in the middle may leave two.
FREE = {"lab_lines", "lab_files", "import_circles"}
ENTERED = {f"files_of_{work}": work for work in entered.WORK}


@functools.cache
def house() -> House:
    return House(PACKAGE)


def all_counts() -> dict[str, int]:
    return house().counts() | {name: len(entered.measure(work)) for name, work in ENTERED.items()}


def read_table() -> dict[str, int]:
    table: dict[str, int] = json.loads(TABLE.read_text())
    return table


def above(counts: Mapping[str, int], table: Mapping[str, int]) -> list[str]:
    return [
        f"{name} is {count}, above the {table[name]} of {TABLE.name}: see `python tests/test_house.py --list {name}`"
        for name, count in counts.items()
        if name in table and count > table[name]
    ]


def below(counts: Mapping[str, int], table: Mapping[str, int]) -> list[str]:
    return [
        f"{name} is {count}, below the {table[name]} of {TABLE.name}: run `python tests/test_house.py --lower`"
        for name, count in counts.items()
        if name in table and count < table[name]
    ]


def lowered(counts: Mapping[str, int], table: Mapping[str, int]) -> dict[str, int]:
    """The table with the counts that have fallen; a count that is new, or no longer there, comes and goes."""
    return {name: min(count, table.get(name, count)) for name, count in counts.items() if name not in FREE}


@pytest.fixture
def judge(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[Mapping[str, int]], None]]:
    """Fails for counts above the table; of those below it one line each is shown, captured or not."""

    def compare(counts: Mapping[str, int]) -> None:
        table = read_table()
        with capsys.disabled():
            print("".join(f"\n{line}\n" for line in below(counts, table)), end="")
        if risen := above(counts, table):
            pytest.fail("\n".join(risen))

    yield compare


def test_no_count_of_the_source_rises(judge):
    judge(house().counts())


@pytest.mark.full
@pytest.mark.parametrize("name", ENTERED)
def test_no_further_file_is_entered(name, judge):
    judge({name: len(entered.measure(ENTERED[name]))})


def test_the_table_holds_all_counts_but_the_free_ones():
    assert read_table().keys() == house().counts().keys() - FREE | ENTERED.keys()
    assert house().counts().keys() >= FREE


def test_the_table_only_falls():
    table = {"a": 5, "b": 5, "c": 5, "gone": 1}
    counts = {"a": 4, "b": 6, "c": 5, "new": 7, "lab_lines": 9}
    assert lowered(counts, table) == {"a": 4, "b": 5, "c": 5, "new": 7}
    assert [line.split()[0] for line in above(counts, table)] == ["b"]
    assert [line.split()[0] for line in below(counts, table)] == ["a"]


@pytest.fixture
def built(tmp_path: Path) -> Callable[[Mapping[str, str]], House]:
    """Adds files, from their paths to their texts, to a package and reads it."""

    def build(files: Mapping[str, str]) -> House:
        for name, text in files.items():
            path = tmp_path / "recjax" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return House(tmp_path / "recjax")

    return build


def test_weak_names(built):
    text = """
class Tray(Base):
    kept: int = 0
    rest: int

    def __init__(self, given, *of, plain, **how):
        self.kept = given
        self.held, self.good = of, plain

    @functools.cached_property
    def one(self):
        found = 1
        return found

    def found(self):
        other.asked = 1

def long(word):
    found = 1
    found += 1
    plain = 1

    return found + plain

def short():
    found = 1
    plain = 1

    return found + plain

def around():
    made = 1

    def inside():
        mine = 1
        return made


    return [
        each
        for word in ()


        for each in word
    ] + [each for each in ()]

pick = lambda own: own
"""
    house = built({"a.py": text})
    places = {"3 kept", "4 rest", "6 given", "6 of", "6 how", "8 held", "11 one", "19 found", "32 made", "40 each"}
    assert set(house.weak_names()) == {f"recjax/a.py:{place}" for place in places | {"47 own"}}
    assert house.weak_names("found") == ["recjax/a.py:19 found"]
    assert {"found", "kept", "rest"} <= WORDS


def test_tuple_splats(built):
    text = """
def many(first, *values): ...
def few(first, second): ...

def outer(*values):
    few(*values)
    (lambda: few(*values))()

pair = (1, "a")
few(*pair)
few(1, *pair[1:])
Class(*make())
thing.method(*pair)
few(*[f(x) for x in y])
few(*(f(x) for x in y))
few(*map(f, y))
few(*sizes.values())
zip(*pair)
array.reshape(*array.shape)
Path(*pair)
many(*pair)
anywhere.many(*pair)
few(**settings)
(*pair, 1)
"""
    places = ["10 few", "11 few", "12 Class", "13 method"]
    house = built({"a.py": text})
    assert house.tuple_splats() == [f"recjax/a.py:{place}" for place in places]
    assert built({"b.py": "def many(self): ..."}).tuple_splats()[4:] == ["recjax/a.py:21 many", "recjax/a.py:22 many"]


def test_names_that_several_modules_share(built):
    house = built(
        {
            "a/state.py": "def make(): ...\nclass _Own: ...\ndef f():\n    def inside(): ...\n",
            "b/state.py": "class make: ...\nclass _Own: ...\n",
            "b/c/other.py": "def inside(): ...\ndef f(): ...\n",
            "b/__init__.py": "",
            "a/__init__.py": "",
        }
    )
    assert house.shared_file_names() == ["state.py: recjax/a, recjax/b"]
    assert house.shared_public_names() == [
        "f: recjax/a/state.py, recjax/b/c/other.py",
        "make: recjax/a/state.py, recjax/b/state.py",
    ]


def test_parameters_called_group(built):
    text = "def f(group): ...\nclass C:\n    def g(self, *, group=1): ...\nh = lambda group: 0\ndef i(groups): ..."
    house = built({"a.py": text})
    assert house.group_parameters() == ["recjax/a.py:1", "recjax/a.py:3", "recjax/a.py:4"]


def test_circles_of_imports(built):
    house = built(
        {
            "__init__.py": "def f():\n    from recjax import lonely\n",
            "a.py": "from recjax.p.b import name",
            "p/__init__.py": "",
            "p/b.py": "def f():\n    from recjax import c",
            "c.py": "import recjax.a\nimport numpy",
            "typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from recjax import user\n",
            "user.py": "from recjax import typed",
            "lonely.py": "from recjax.p import b, d",
            "p/d.py": "",
        }
    )
    assert house.circles == [{"recjax/a.py", "recjax/p/b.py", "recjax/c.py"}]
    counts = house.counts()
    assert (counts["import_circles"], counts["files_in_circles"]) == (1, 3)


def test_circles_that_touch_are_one():
    edges = {"a": {"b"}, "b": {"a", "c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"f"}, "f": {"e"}, "g": {"g"}}
    assert circles(edges) == [{"a", "b", "c"}, {"e", "f"}]


def test_lines_and_files_of_core_and_lab(built):
    house = built({"a.py": "1\n2\n", "lab/x.py": "1\n", "lab/deep/y.py": "1\n2\n3\n", "labels/z.py": "1\n2\n3\n4\n5\n"})
    counts = house.counts()
    assert [counts[f"{part}_lines"] for part in ("core", "lab", "core_and_lab")] == [7, 4, 11]
    assert [counts[f"{part}_files"] for part in ("core", "lab", "core_and_lab")] == [2, 2, 4]
    assert house.lines_by_package(lab=False) == {"recjax/a.py": 2, "recjax/labels": 5}


def test_files_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "toy_rooms"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "called.py").write_text("def f():\n    from toy_rooms import imported\n")
    (package / "imported.py").write_text("from toy_rooms.decorator import mark\n@mark\ndef f(): ...\n")
    (package / "decorator.py").write_text("def mark(function):\n    return function\n")
    (package / "thread.py").write_text("def f(): ...\n")
    (package / "earlier.py").write_text("def f(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from toy_rooms import called, earlier, thread  # type: ignore[import-not-found]

    earlier.f()
    with entered.Entered(package) as tracer:
        called.f()
        worker = threading.Thread(target=thread.f)
        worker.start()
        worker.join()
    earlier.f()
    assert tracer.files == {"toy_rooms/called.py", "toy_rooms/thread.py"}


def places(name: str) -> list[str]:
    """What `--list` prints."""
    if name in ENTERED:
        return entered.measure(ENTERED[name])
    part, _, kind = name.rpartition("_")
    if kind in ("lines", "files") and part in (labs := {"core": False, "lab": True, "core_and_lab": None}):
        if kind == "files":
            return house().files(lab=labs[part])
        return [f"{package}: {lines}" for package, lines in house().lines_by_package(lab=labs[part]).items()]
    if name == "import_circles":
        return [", ".join(sorted(circle)) for circle in house().circles]
    return house().places()[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_mutually_exclusive_group(required=True)
    actions.add_argument("--json", action="store_true", help="print all counts as one JSON object")
    actions.add_argument("--list", metavar="COUNT", choices=[*house().counts(), *ENTERED], help="print its places")
    actions.add_argument("--lower", action="store_true", help=f"write counts that have fallen to {TABLE.name}")
    options = parser.parse_args()
    if options.list:
        print("\n".join(places(options.list)))
        return
    counts = all_counts()
    if options.json:
        print(json.dumps(counts))
        return
    before, after = read_table(), lowered(counts, read_table())
    TABLE.write_text(json.dumps(after, indent=1) + "\n")
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            print(f"{name}: {before.get(name)} -> {after.get(name)}")
    for line in above(counts, before):
        print(line)


if __name__ == "__main__":
    main()
