"""Where tables live, whatever the mesh. `bound.py` binds a plan to a number of devices.

A plan is data: JSON, with a list of row segments for every table.

Plan file:

  {"format": "recjax-plan/1",
   "tables": {"user": [{"rows": "all", "columns": "all", "placement": "row_wise", "owners": "all",
                        "tier": "device", "exchange": "float32", "why": "..."}]}}
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any, Literal, get_args

from recjax.config import unique_keys
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError

FORMAT = "recjax-plan/1"
Placement = Literal["row_wise", "table_wise", "column_wise", "data_parallel", "table_row_wise", "grid"]
PLACEMENTS: tuple[str, ...] = get_args(Placement)
AUTO_REPLICATE_BYTES = 64 * 1024
OWNED = {"table_wise": "device", "table_row_wise": "host"}  # placements on one device or host, which a plan may name


@dataclasses.dataclass(frozen=True)
class Segment:
    """One part of a table and where it lives. Today a segment is a whole table in device memory."""

    # row_wise: rows spread over all devices; table_wise: all on one device; column_wise: columns spread over all
    # devices; data_parallel: a copy on each device; table_row_wise: rows spread over the devices of one host; grid:
    # columns spread over hosts, and rows over the devices of each. The names are TorchRec's.
    placement: str
    rows: str = "all"  # selector of rows; later also hot rows
    columns: str = "all"  # column range
    # what holds it: of a table_wise table the number of the device, of a table_row_wise one that of the host; "all"
    # leaves the choice among all to `bind`
    owners: str | int = "all"
    tier: str = "device"  # memory that holds it
    exchange: str = "float32"  # precision on the wire; the precision of the table in float64 runs
    why: str = ""  # the reason, for people


@dataclasses.dataclass(frozen=True)
class Plan:
    """Placement of every table, by table name; knows nothing of a mesh."""

    tables: dict[str, tuple[Segment, ...]]

    def to_json(self) -> str:
        """The plan file's text."""
        tables = {name: [dataclasses.asdict(s) for s in segments] for name, segments in self.tables.items()}
        return json.dumps({"format": FORMAT, "tables": tables}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str, source: str = "plan") -> Plan:
        """Reads a plan file strictly.

        Raises:
          ConfigError: not JSON, another format, an unknown or repeated key, an unknown placement, or
            something that this version cannot place (it says what it can).
        """
        try:
            raw = json.loads(text, object_pairs_hook=unique_keys)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{source}:{error.lineno}: not valid JSON ({error.msg}). Write a plan with "
                "`recjax plan PRESET --save FILE`."
            ) from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT or not isinstance(raw.get("tables"), dict):
            raise ConfigError(
                f'{source}: not a plan: it needs "format": "{FORMAT}" and "tables". '
                "Write one with `recjax plan PRESET --save FILE`."
            )
        if unknown := sorted(raw.keys() - {"format", "tables"}):
            raise ConfigError(f'{source}: unknown key {unknown[0]!r}; the keys are "format" and "tables".')
        return Plan({name: _segments(items, f"{source}, table {name!r}") for name, items in raw["tables"].items()})


def _segments(items: Any, place: str) -> tuple[Segment, ...]:
    if not isinstance(items, list) or len(items) != 1 or not isinstance(items[0], dict):
        raise ConfigError(
            f"{place}: needs a list of exactly one segment (an object); splitting a table is not built yet."
        )
    allowed = {f.name: f.default for f in dataclasses.fields(Segment)}
    for key, value in items[0].items():
        if key not in allowed:
            raise ConfigError(f"{place}: unknown key {key!r}; the keys are {', '.join(allowed)}.")
        if key == "why" and not isinstance(value, str):
            raise ConfigError(f"{place}: why={value!r} is not a text.")
        unit = OWNED.get(str(items[0].get("placement")))
        if key == "owners" and value != allowed[key] and unit:
            if type(value) is not int or value < 0:
                raise ConfigError(f'{place}: owners={value!r} is not the number of a {unit}, 0 or more, nor "all".')
            continue
        if key not in ("placement", "why") and value != allowed[key]:
            raise ConfigError(f"{place}: {key}={value!r} is not built yet; leave it at {allowed[key]!r}.")
    if items[0].get("placement") not in PLACEMENTS:
        raise ConfigError(
            f"{place}: placement is {items[0].get('placement')!r}; choose one of {', '.join(PLACEMENTS)}."
        )
    return (Segment(**items[0]),)


def is_file(choice: str) -> bool:
    """Whether the config's `plan` is the path of a plan file."""
    return choice not in ("auto", *PLACEMENTS)


def make_plan(choice: str, tables: tuple[TableSpec, ...]) -> Plan:
    """Resolves the config's `plan`: "auto", a placement for all tables, or the path of a plan file.

    `auto` replicates tables of at most 64 KiB, whose all-reduce costs no more than its latency, and
    spreads the rows of all others: only distinct rows travel, so spreading them evens out bytes and lookups
    best, and replicating more would not save bytes. Tables that are placed table-wise (table-row-wise) go to the
    device (host) that has the least bytes and lookups, the heaviest first (see `bound.bind`). A table that has a
    placement of its own gets that in any case.

    Raises:
      ConfigError: no such choice or file, or a file that does not name exactly these tables or contradicts the
        placement of one.
    """
    if choice in PLACEMENTS:
        return Plan({t.name: (_own(t) or Segment(choice, why=f"plan={choice}"),) for t in tables})
    if choice == "auto":
        return Plan({t.name: (_own(t) or _auto(t),) for t in tables})
    path = Path(choice)
    try:
        if not path.is_file():
            near = difflib.get_close_matches(choice, ("auto", *PLACEMENTS), n=1)
            raise ConfigError(
                f"plan={choice}: there is no plan file of that name, and it is not one of auto, "
                f"{', '.join(PLACEMENTS)}. " + (f"Did you mean {near[0]}?" if near else "Choose one of these.")
            )
        plan = Plan.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"plan={choice}: cannot be read ({error}). Check its permissions and its content.") from error
    names = {t.name for t in tables}
    if set(plan.tables) != names:
        raise ConfigError(
            f"{path}: places the tables {', '.join(sorted(plan.tables))}, but the model has "
            f"{', '.join(sorted(names))}. Write a new plan with `recjax plan PRESET --save FILE`."
        )
    for table in tables:
        placed = plan.tables[table.name][0].placement
        if table.placement not in (None, placed):
            raise ConfigError(
                f"{path} places table {table.name!r} {placed}, but its own setting says {table.placement}. Leave that "
                f"to the file (embedding.tables.{table.name}.placement=none), or change the file."
            )
    return plan


def _own(table: TableSpec) -> Segment | None:
    why = f"embedding.tables.{table.name}.placement={table.placement}"
    return Segment(table.placement, why=why) if table.placement else None


def _auto(table: TableSpec) -> Segment:
    size_bytes = table.rows * table.dim * 4
    if size_bytes <= AUTO_REPLICATE_BYTES:
        return Segment("data_parallel", why=f"{size_bytes:,} bytes: small enough to copy everywhere")
    return Segment("row_wise", why=f"{size_bytes:,} bytes: over {AUTO_REPLICATE_BYTES:,}, so its rows are spread")
