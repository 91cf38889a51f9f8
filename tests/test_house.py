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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support import entered
from support.house import WORDS, House

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
