"""Lists of structures as aligned lists: a column `hist` of {item, age} reads as the columns hist.item and hist.age."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

JOINT = "."  # between the column and the field


def flat_schema(schema: Any) -> Any:
    """The Arrow schema of a table whose lists of structures are a column of lists for each field."""
    import pyarrow as pa

    return pa.schema([field for column in schema for field in _flat(column)])


def columns_with(schema: Any, names: Sequence[str]) -> list[str]:
    """Names of the columns of a file of this schema that hold columns of its `flat_schema`, each once."""
    holders = {field.name: column.name for column in schema for field in _flat(column)}
    return list(dict.fromkeys(holders[name] for name in names))


def with_lists(batch: Any, names: Sequence[str]) -> Any:
    """The same rows with these columns of the `flat_schema`, as a record batch."""
    import pyarrow as pa

    arrays: dict[str, Any] = {}
    for column, array in zip(batch.schema, batch.columns, strict=True):
        if not _has_structures(column.type):
            arrays[column.name] = array
        elif any(name.startswith(column.name + JOINT) for name in names):
            arrays |= _fields(column.name, array)
    return pa.record_batch([arrays[name] for name in names], names=list(names))


def _flat(column: Any) -> Iterator[Any]:
    import pyarrow as pa

    if not _has_structures(column.type):
        yield column
        return
    for field in column.type.value_type:
        yield pa.field(f"{column.name}{JOINT}{field.name}", pa.list_(field.type))


def _has_structures(kind: Any) -> bool:
    import pyarrow.types as t

    lists = (t.is_list, t.is_large_list, t.is_fixed_size_list, t.is_list_view, t.is_large_list_view)
    return any(is_kind(kind) for is_kind in lists) and t.is_struct(kind.value_type) and kind.value_type.num_fields > 0


def _fields(name: str, array: Any) -> Iterator[tuple[str, Any]]:
    """Yields each field's name and lists; where a structure is null its fields are."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    entries, absent = array.flatten(), array.is_null() if array.null_count else None
    for number, field in enumerate(array.type.value_type):
        values = pc.struct_field(entries, [number])
        yield f"{name}{JOINT}{field.name}", pa.ListArray.from_arrays(offsets, values, mask=absent)
