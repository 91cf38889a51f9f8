"""Plans: where tables live, whatever the mesh; from a config's `plan`. `bind.py` binds one to a number of devices.

A plan is data: JSON, with a list of segments for every table. Most tables are one segment. Several partition a table's
rows x columns: see `segment.py` for what they must be.

Plan file:

  {"format": "recjax-plan/1",
   "tables": {"user": [{"rows": "all", "columns": "all", "placement": "row_wise", "owners": "all", "tier": "device",
                        "exchange": {"forward": "float32", "backward": "float32", "kind": "rows"}, "why": "..."}],
              "item": [{"rows": {"ids": [3, 17]}, "placement": "data_parallel"},
                       {"rows": "rest", "columns": [0, 32], "placement": "table_wise", "owners": 0},
                       {"rows": "rest", "columns": [32, 64], "placement": "row_wise", "owners": [1, 2]}]}}

Keys but "placement" may be left out. An exchange may also be one precision, for both directions. Ids may stand in a
file of the plan file's folder or below, by its path from there: {"ids": "hot.txt", "sha256": "..."}. Where the kind is
"pooled", "rows_of": ["FEATURE", ...] names features of the table whose rows travel all the same.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from recjax.embedding.row_ids import read_ids
from recjax.embedding.segment import (
    COPIED,
    EXACT,
    HOT_PLACEMENTS,
    KINDS,
    LISTED,
    OWNED,
    PLACEMENTS,
    PRECISIONS,
    Exchange,
    RowIds,
    Segment,
    check_segments,
)
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError
from recjax.utils import html, strict_json
from recjax.utils.paths import expanded
from recjax.utils.text import did_you_mean

FORMAT = "recjax-plan/1"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Placement of every table, by table name; knows nothing of a mesh."""

    tables: dict[str, tuple[Segment, ...]]

    def to_json(self) -> str:
        """The plan file's text."""
        tables = {name: [_to_json(s) for s in segments] for name, segments in self.tables.items()}
        text = json.dumps({"format": FORMAT, "tables": tables}, indent=2) + "\n"
        # The numbers of a list on one line: line breaks within strings are escaped, so that only lists can match.
        numbers = r"\[\n\s+\d+(,\n\s+\d+)*\n\s+\]"
        return re.sub(numbers, lambda match: "".join(match[0].split()).replace(",", ", "), text)

    def _repr_html_(self) -> str:
        """A table with a row for each segment, in a notebook."""
        rows = [
            (
                name,
                segment.placement,
                f"{len(segment.rows.ids):,} ids" if isinstance(segment.rows, RowIds) else segment.rows,
                segment.columns,
                segment.owners,
                segment.tier,
                f"{segment.exchange.forward} / {segment.exchange.backward}, {kind_in_words(segment)}",
                segment.why,
            )
            for name, segments in self.tables.items()
            for segment in segments
        ]
        head = ("table", "placement", "rows", "columns", "owners", "tier", "exchange forward / backward", "why")
        return html.table("plan", head, rows)

    def without_files(self) -> Plan:
        """The same plan with all ids in itself, so that it can be kept elsewhere."""
        inline = {
            name: tuple(
                dataclasses.replace(s, rows=RowIds(s.rows.ids)) if isinstance(s.rows, RowIds) else s for s in segments
            )
            for name, segments in self.tables.items()
        }
        return Plan(inline)

    @staticmethod
    def from_json(text: str, source: str = "plan", folder: Path | None = None) -> Plan:
        """Reads a plan file strictly, and the files of ids that it names. `check_plan` has the rest to check.

        Args:
          text: of the file.
          source: its name, for messages.
          folder: that of the plan file, where files of ids are; None: the working folder.

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
        places = {name: f"{source}, table {name!r}" for name in raw["tables"]}
        return Plan({name: _segments(items, places[name], folder or Path()) for name, items in raw["tables"].items()})


def _to_json(segment: Segment) -> dict[str, Any]:
    values: dict[str, Any] = {f.name: getattr(segment, f.name) for f in dataclasses.fields(segment)}
    values["exchange"] = segment.exchange.to_json()
    if not values["rows_of"]:
        del values["rows_of"]
    if isinstance(segment.rows, RowIds):
        kept = {"ids": segment.rows.file, "sha256": segment.rows.sha256}
        values["rows"] = kept if segment.rows.file else {"ids": segment.rows.ids}
    return values


def _segments(items: Any, place: str, folder: Path) -> tuple[Segment, ...]:
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"{place}: needs a list of one segment (an object) or several.")
    places = [place if len(items) == 1 else f"{place}, segment {n}" for n in range(1, len(items) + 1)]
    return tuple(_segment(item, at, folder) for item, at in zip(items, places, strict=True))


def _segment(item: dict[str, Any], place: str, folder: Path) -> Segment:
    allowed = [f.name for f in dataclasses.fields(Segment)]
    if unknown := [key for key in item if key not in allowed]:
        raise ConfigError(f"{place}: unknown key {unknown[0]!r}; the keys are {', '.join(allowed)}.")
    placement = item.get("placement")
    if placement not in (known := (*PLACEMENTS, *HOT_PLACEMENTS)):
        raise ConfigError(f"{place}: placement is {placement!r}; choose one of {', '.join(known)}.")
    if not isinstance(item.get("why", ""), str):
        raise ConfigError(f"{place}: why={item['why']!r} is not a text.")
    if item.get("tier", Segment.tier) != Segment.tier:
        raise ConfigError(f"{place}: tier={item['tier']!r} is not built yet; leave it at {Segment.tier!r}.")
    exchange = _exchange(item.get("exchange", {}), placement, place)
    return Segment(
        placement,
        _rows(item.get("rows", "all"), place, folder),
        _columns(item.get("columns", "all"), place),
        _owners(item.get("owners", "all"), placement, place),
        exchange=exchange,
        rows_of=_rows_of(item.get("rows_of", []), exchange, place),
        why=item.get("why", ""),
    )


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _rows(value: Any, place: str, folder: Path) -> Any:
    """A selector of rows, as a plan file has it."""
    if value in ("all", "rest"):
        return value
    ids = value.get("ids") if isinstance(value, dict) and value.keys() <= {"ids", "sha256"} else None
    file = ids if isinstance(ids, str) else ""
    if not isinstance(ids, (list, str)) or not ids or ("sha256" in value and not file):
        raise ConfigError(
            f'{place}: rows={_short(value)} is neither "all" nor "rest" nor a set: {{"ids": [3, 17]}}, or {{"ids": '
            '"FILE"}, with "sha256" if you like. A set has at least one id.'
        )
    sha256 = ""
    if file:
        ids, sha256 = read_ids(file, folder, place)
        if not ids:
            raise ConfigError(f"{place}: {file} holds no id; a set of rows has at least one.")
        if value.get("sha256", sha256) != sha256:
            raise ConfigError(
                f"{place}: {file} is not what it was when the plan was written: its SHA-256 is {sha256}, the plan says "
                f'{_short(value["sha256"])}. Restore the file, or leave "sha256" out to take it as it is.'
            )
    if wrong := [id for id in ids if not _is_number(id)]:
        which = f"a number in {file}" if file else f"{_short(wrong[0])} in a set of rows"
        raise ConfigError(f"{place}: {which} is no id, which is an integer, 0 or more.")
    ordered = sorted(ids)
    if twice := [a for a, b in zip(ordered, ordered[1:], strict=False) if a == b]:
        which = f"{file} names an id" if file else f"a set of rows names id {twice[0]}"
        raise ConfigError(f"{place}: {which} twice. Leave one of them out.")
    return RowIds(tuple(ordered), file, sha256)


def _columns(value: Any, place: str) -> Any:
    """A range of columns, as a plan file has it."""
    if value == "all":
        return value
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_number, value)):
        raise ConfigError(
            f'{place}: columns={_short(value)} is neither "all" nor two numbers, the first column and the one after '
            "the last, as in [0, 16]."
        )
    return tuple(value)


def _owners(value: Any, placement: str, place: str) -> Any:
    """Reads the owners of a segment, as a plan file has them."""
    if value == "all":
        return value
    if placement in OWNED:
        if not _is_number(value):
            raise ConfigError(
                f'{place}: owners={_short(value)} is not the number of a {OWNED[placement]}, 0 or more, nor "all".'
            )
        return value
    if placement not in LISTED:
        raise ConfigError(
            f'{place}: owners={_short(value)}, but a {placement} segment is on all devices; leave it at "all".'
        )
    if not isinstance(value, list) or not value or not all(map(_is_number, value)):
        raise ConfigError(f'{place}: owners={_short(value)} is not a list of devices, as in [0, 2], nor "all".')
    return tuple(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _exchange(value: Any, placement: str, place: str) -> Exchange:
    """Reads an exchange, as a plan file has it: one precision, or one for each direction, and the kind."""
    both = {"forward": value, "backward": value} if isinstance(value, str) else value
    known = {"forward": PRECISIONS, "backward": PRECISIONS, "kind": KINDS}
    if not isinstance(both, dict) or any(type(v) is not str or v not in known.get(k, ()) for k, v in both.items()):
        raise ConfigError(
            f"{place}: exchange={_short(value)} is neither one of {', '.join(PRECISIONS)} nor an object that gives one "
            'of them for "forward", "backward" or both, and as "kind" one of '
            f"{', '.join(KINDS)}."
        )
    exchange = Exchange(**both)
    if exchange != EXACT and placement in COPIED:
        raise ConfigError(
            f"{place}: a {placement} segment exchanges no rows, and its gradients are reduced in the precision of the "
            'table. Leave out "exchange", or place it otherwise.'
        )
    return exchange


def _rows_of(value: Any, exchange: Exchange, place: str) -> tuple[str, ...]:
    """Reads the names of features whose rows travel, as a plan file has them."""
    if not isinstance(value, list) or any(type(name) is not str for name in value) or len(set(value)) < len(value):
        raise ConfigError(f'{place}: rows_of={_short(value)} is not a list of names of features, as in ["history"].')
    if value and exchange.kind != "pooled":
        raise ConfigError(
            f'{place}: "rows_of" names features whose rows travel while others have pooled vectors, but here all rows '
            'travel. Leave it out, or give the exchange "kind": "pooled".'
        )
    return tuple(value)


def kind_in_words(segment: Segment) -> str:
    """Names what travels: "rows", "pooled", or "pooled but for rows of FEATURE"."""
    return segment.exchange.kind + (f" but for rows of {', '.join(segment.rows_of)}" if segment.rows_of else "")


def self_contained(file: Path) -> bytes:
    """The content of a plan file that may be kept elsewhere: with the ids in place of the files that it names.

    Raises:
      ConfigError: as for `Plan.from_json`.
      OSError: it cannot be read.
    """
    content = file.read_bytes()
    plan = Plan.from_json(content.decode(), str(file), file.parent)
    inline = plan.without_files()
    return content if inline == plan else inline.to_json().encode()


def check_plan(plan: Plan, tables: tuple[TableSpec, ...], source: str = "the plan") -> None:
    """Checks that a plan places exactly these tables, each row and column of each once.

    Raises:
      ConfigError: other tables, or a table whose segments are no partition: see `segment.py`.
    """
    names = {t.name for t in tables}
    if set(plan.tables) != names:
        raise ConfigError(
            f"{source}: places the tables {', '.join(sorted(plan.tables))}, but the model has "
            f"{', '.join(sorted(names))}. Write a new plan with `recjax plan PRESET --save FILE`."
        )
    for table in tables:
        check_segments(plan.tables[table.name], table, f"{source}, table {table.name!r}")


def with_exchange(segment: Segment, exchange: Exchange) -> Segment:
    """The segment with this exchange, unless it is replicated; rows where the kind is left open."""
    return segment if segment.placement in COPIED else dataclasses.replace(segment, exchange=exchange.of_segment)


CHOICES = ("auto", "balanced", *PLACEMENTS)  # of the config's `plan`, but for a file's path
AUTO_REPLICATE_BYTES = 64 * 1024


def is_file(choice: str) -> bool:
    """Returns whether the config's `plan` is the path of a plan file."""
    return choice not in CHOICES


def make_plan(choice: str, tables: tuple[TableSpec, ...], exchange: Exchange = EXACT) -> Plan:
    """Resolves the config's `plan`: "auto", a placement for all tables, or the path of a plan file.

    "balanced" is for `recjax.planning.resolve`, since it depends on the mesh.

    `exchange` is that of all tables that are not replicated. A plan file has its own, table by table: where `exchange`
    is reduced it must be the same there.

    `auto` replicates tables of at most 64 KiB, whose all-reduce costs no more than its latency, and
    spreads the rows of all others: only distinct rows travel, so spreading them evens out bytes and lookups
    best, and replicating more would not save bytes. Tables that are placed table-wise (table-row-wise) go to the
    device (host) that has the least bytes and lookups, the heaviest first (see `bound.bind`). A table that has a
    placement of its own gets that in any case.

    Raises:
      ConfigError: no such choice or file, or a file that does not name exactly these tables, whose segments do not
        partition one, or that contradicts the placement of one, or `exchange`.
    """
    if choice == "auto" or choice in PLACEMENTS:
        placed = {
            t.name: _own(t) or (_auto(t) if choice == "auto" else Segment(choice, why=f"plan={choice}")) for t in tables
        }
        return Plan({name: (with_exchange(segment, exchange),) for name, segment in placed.items()})
    path = expanded(choice)
    try:
        if not path.is_file():
            other = " Choose one of these, or write a plan file with `recjax plan PRESET --save FILE`."
            raise ConfigError(
                f"plan={choice}: there is no plan file of that name, and it is not one of {', '.join(CHOICES)}."
                + (did_you_mean(choice, CHOICES) or other)
            )
        plan = Plan.from_json(path.read_text(encoding="utf-8"), str(path), path.parent)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"plan={choice}: cannot be read ({error}). Check its permissions and its content.") from error
    check_plan(plan, tables, str(path))
    for table, segment in ((t, s) for t in tables for s in plan.tables[t.name]):
        ways = (exchange.forward, exchange.backward)
        spread = segment.placement not in COPIED
        reduced = spread and ways != (EXACT.forward, EXACT.backward)
        if reduced and (segment.exchange.forward, segment.exchange.backward) != ways:
            raise ConfigError(
                f"{path} exchanges rows of table {table.name!r} in {segment.exchange.forward} and gradients in "
                f"{segment.exchange.backward}, but embedding.exchange says {exchange.forward} and {exchange.backward}. "
                "Leave that to the file (embedding.exchange.forward=float32 embedding.exchange.backward=float32), or "
                "change the file."
            )
        if spread and exchange.kind == "pooled" != segment.exchange.kind:
            raise ConfigError(
                f"{path} exchanges {segment.exchange.kind} of table {table.name!r}, but embedding.exchange.kind is "
                "pooled. Leave that to the file (embedding.exchange.kind=auto), or change the file."
            )
        if table.placement not in (None, segment.placement) and segment.placement not in HOT_PLACEMENTS:
            raise ConfigError(
                f"{path} places table {table.name!r} {segment.placement}, but its own setting says {table.placement}. "
                f"Leave that to the file (embedding.tables.{table.name}.placement=none), or change the file."
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
