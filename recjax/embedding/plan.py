"""Where tables live, whatever the mesh. `bind.py` binds a plan to a number of devices.

A plan is data: JSON, with a list of row segments for every table.

Plan file:

  {"format": "recjax-plan/1",
   "tables": {"user": [{"rows": "all", "columns": "all", "placement": "row_wise", "owners": "all",
                        "tier": "device", "exchange": {"forward": "float32", "backward": "float32"}, "why": "..."}]}}

An exchange may also be one precision, for both directions.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any, Literal, get_args

from recjax.embedding.quantize import Precision
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError
from recjax.utils import strict_json
from recjax.utils.paths import expanded

FORMAT = "recjax-plan/1"
Placement = Literal["row_wise", "table_wise", "column_wise", "data_parallel", "table_row_wise", "grid"]
PLACEMENTS: tuple[str, ...] = get_args(Placement)
PRECISIONS: tuple[str, ...] = get_args(Precision)
AUTO_REPLICATE_BYTES = 64 * 1024
OWNED = {"table_wise": "device", "table_row_wise": "host"}  # placements on one device or host, which a plan may name


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Precision in which rows and their gradients travel between devices: see `recjax/embedding/quantize.py`.

    float32 is exact: values travel as they are held. On one device, and with replicated (data_parallel) tables, no
    rows travel, and everything is exact. Otherwise a reduced precision changes numbers: forward the rows, alike on any
    number of devices (int8 up to the last bit; columns in float16 or int8 are encoded piece by piece, with their
    padding); backward the sums of gradients, which then depend on how the samples lie on the devices.
    """

    forward: Precision = "float32"  # of rows: float32, bfloat16, float16 or int8
    backward: Precision = "float32"  # of their gradients, summed over a device's samples before they travel


EXACT = Exchange()


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
    exchange: Exchange = EXACT  # precision on the wire; exact for data_parallel, which exchanges no rows
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
            raw = strict_json.parse(text)
        except strict_json.JsonError as error:
            raise ConfigError(
                f"{error.at(source)}: {error}. Write a plan with `recjax plan PRESET --save FILE`."
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
        if key not in ("placement", "why", "exchange") and value != allowed[key]:
            raise ConfigError(f"{place}: {key}={value!r} is not built yet; leave it at {allowed[key]!r}.")
    if items[0].get("placement") not in PLACEMENTS:
        raise ConfigError(
            f"{place}: placement is {items[0].get('placement')!r}; choose one of {', '.join(PLACEMENTS)}."
        )
    exchange = _exchange(items[0].get("exchange", {}), place)
    if exchange != EXACT and items[0]["placement"] == "data_parallel":
        raise ConfigError(
            f"{place}: a data_parallel table exchanges no rows, and its gradients are reduced in the precision of the "
            'table. Leave out "exchange", or place it otherwise.'
        )
    return (Segment(**{**items[0], "exchange": exchange}),)


def _exchange(value: Any, place: str) -> Exchange:
    """What a plan file says, one precision or one for each direction."""
    both = {"forward": value, "backward": value} if isinstance(value, str) else value
    allowed = {f.name: f.default for f in dataclasses.fields(Exchange)}
    known = isinstance(both, dict) and both.keys() <= allowed.keys()
    if not known or any(type(v) is not str or v not in PRECISIONS for v in both.values()):
        raise ConfigError(
            f"{place}: exchange={value!r} is neither one of {', '.join(PRECISIONS)} nor an object that gives one of "
            'them for "forward", "backward" or both.'
        )
    return Exchange(**both)


def is_file(choice: str) -> bool:
    """Whether the config's `plan` is the path of a plan file."""
    return choice not in ("auto", *PLACEMENTS)


def make_plan(choice: str, tables: tuple[TableSpec, ...], exchange: Exchange = EXACT) -> Plan:
    """Resolves the config's `plan`: "auto", a placement for all tables, or the path of a plan file.

    `exchange` is that of all tables that are not replicated. A plan file has its own, table by table: where `exchange`
    is reduced it must be the same there.

    `auto` replicates tables of at most 64 KiB, whose all-reduce costs no more than its latency, and
    spreads the rows of all others: only distinct rows travel, so spreading them evens out bytes and lookups
    best, and replicating more would not save bytes. Tables that are placed table-wise (table-row-wise) go to the
    device (host) that has the least bytes and lookups, the heaviest first (see `bound.bind`). A table that has a
    placement of its own gets that in any case.

    Raises:
      ConfigError: no such choice or file, or a file that does not name exactly these tables or contradicts the
        placement of one, or `exchange`.
    """
    if choice == "auto" or choice in PLACEMENTS:
        placed = {
            t.name: _own(t) or (_auto(t) if choice == "auto" else Segment(choice, why=f"plan={choice}")) for t in tables
        }
        return Plan({name: (_with_exchange(segment, exchange),) for name, segment in placed.items()})
    path = expanded(choice)
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
        segment = plan.tables[table.name][0]
        if exchange != EXACT and segment != _with_exchange(segment, exchange):
            raise ConfigError(
                f"{path} exchanges rows of table {table.name!r} in {segment.exchange.forward} and gradients in "
                f"{segment.exchange.backward}, but embedding.exchange says {exchange.forward} and {exchange.backward}. "
                "Leave that to the file (embedding.exchange.forward=float32 embedding.exchange.backward=float32), or "
                "change the file."
            )
        if table.placement not in (None, segment.placement):
            raise ConfigError(
                f"{path} places table {table.name!r} {segment.placement}, but its own setting says {table.placement}. "
                f"Leave that to the file (embedding.tables.{table.name}.placement=none), or change the file."
            )
    return plan


def _with_exchange(segment: Segment, exchange: Exchange) -> Segment:
    return segment if segment.placement == "data_parallel" else dataclasses.replace(segment, exchange=exchange)


def _own(table: TableSpec) -> Segment | None:
    why = f"embedding.tables.{table.name}.placement={table.placement}"
    return Segment(table.placement, why=why) if table.placement else None


def _auto(table: TableSpec) -> Segment:
    size_bytes = table.rows * table.dim * 4
    if size_bytes <= AUTO_REPLICATE_BYTES:
        return Segment("data_parallel", why=f"{size_bytes:,} bytes: small enough to copy everywhere")
    return Segment("row_wise", why=f"{size_bytes:,} bytes: over {AUTO_REPLICATE_BYTES:,}, so its rows are spread")
