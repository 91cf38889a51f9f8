"""Facts about columns from the footers of Parquet files, so that a pass over the rows need not read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recjax.data.arrow import convert, scan
from recjax.data.arrow.column_profile import ColumnProfile
from recjax.data.arrow.roles import Asked
from recjax.data.arrow.scan import TableFile


def profiles(files: Sequence[TableFile], asked: Mapping[str, Asked]) -> dict[str, ColumnProfile]:
    """Profiles of those columns whose role needs no more than types, missing values and rows.

    These are numbers as dense columns, of which only the type matters, and text or integers as ids, of which it must
    be known whether a value is missing: null, or empty text. Any other is left out, and so are all columns if a file is
    no Parquet.

    Args:
      files: all files.
      asked: column -> what is asked of it.
    """
    if any(file.form != "parquet" for file in files):
        return {}
    found: dict[str, ColumnProfile] = {}
    footers = [scan.footer(file) for file in files]
    for name, each in asked.items():
        if each.role not in ("dense", "id") or each.buckets:
            continue
        parts = [_of_file(metadata, schema, name, each.role) for metadata, schema in footers]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts) and len({kind for kind, _ in known}) == 1:
            rows = sum(metadata.num_rows for metadata, _ in footers)
            found[name] = ColumnProfile.known(known[0][0], rows, any(missing for _, missing in known))
    return found


def _of_file(metadata: Any, schema: Any, name: str, role: str) -> tuple[convert.Kind, bool] | None:
    """The kind of the values of a column, and whether one is missing; None if the footer does not tell."""
    at = next((i for i in range(metadata.num_columns) if metadata.schema.column(i).path == name), None)
    if at is None:
        return None
    kind = convert.kind_of_type(_plain(schema.field(name).type))
    if role == "dense":
        return (kind, False) if kind in ("boolean", "integer", "float") else None
    if kind not in ("text", "integer", "boolean"):
        return None
    missing = False
    for group in range(metadata.num_row_groups):
        column = metadata.row_group(group).column(at)
        facts = column.statistics
        if facts is None or not facts.has_null_count:
            return None
        missing |= facts.null_count > 0
        if kind == "text" and facts.null_count < column.num_values:
            if not facts.has_min_max:
                return None
            missing |= len(facts.min_raw) == 0  # of text that is not UTF-8, too
    return kind, missing


def _plain(kind: Any) -> Any:
    """The type that `convert.plain` gives of text in another form; others as they are."""
    import pyarrow as pa

    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_string_view(kind)
    return pa.string() if large else kind
