"""The config's `plan`, resolved: "auto", a placement for all tables, or a plan file."""

from __future__ import annotations

from recjax.embedding.plan import Plan, check_plan, with_exchange
from recjax.embedding.segment import COPIED, EXACT, HOT_PLACEMENTS, PLACEMENTS, Exchange, Segment
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError
from recjax.utils.paths import expanded
from recjax.utils.text import did_you_mean

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
