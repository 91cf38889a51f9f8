"""Columns of a table that share one vocabulary: `columns=item:id,history:jagged:like=item`.

Their values are counted together, and equal values have equal rows in both, which a shared table needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from recjax.data.arrow.column_profile import IN_WORDS
from recjax.data.arrow.roles import AUTO, ROLES, Asked, ColumnSpec, column_text, in_shell, split_role
from recjax.errors import ConfigError, DataError
from recjax.settings import items
from recjax.utils.text import did_you_mean

_HAVE_ONE = ("id", "jagged")


def add_like(columns: Sequence[str], name: str, role: str, other: str) -> tuple[str, ...]:
    """The texts of `columns=` with which a column, of this role if they name none, has the vocabulary of another."""
    option = f":like={items.quote(other)}"
    names = ["" if text == AUTO else split_role(text, ROLES)[0] for text in columns]
    if name not in names:
        return (*columns, column_text(name, role) + option)
    return tuple(text + option if name == each else text for text, each in zip(columns, names, strict=True))


def check_like(requests: Mapping[str, Asked], names: Sequence[str]) -> None:
    """Checks, as far as roles are given and not proposed, that columns with `like` name one that has a vocabulary.

    Args:
      requests: column -> what `columns=` asks of it.
      names: all columns of the table.

    Raises:
      ConfigError: there is no such column, it is the same one, has another's vocabulary itself, or has none.
    """
    for name, each in requests.items():
        other = each.like
        if not other:
            continue
        key = f"columns: {_text(name, each.role, other)!r}"
        if other not in names:
            raise ConfigError(f"{key}: there is no column {other!r}.{did_you_mean(other, names, quoted=True)}")
        if other == name:
            raise ConfigError(f"{key}: the column is the same one, which has its vocabulary anyway. Leave like out.")
        target = requests.get(other)
        if target is None:
            continue
        if target.like:
            raise ConfigError(f"{key}: {other!r} itself has the vocabulary of {target.like!r}. Name that column.")
        if target.role not in _HAVE_ONE or target.hashed or target.buckets:
            options = f":hash={target.hashed}" if target.hashed else f":bucket={target.buckets}" * (target.buckets > 0)
            raise ConfigError(
                f"{key}: {other!r} is {target.role}{options}, which has no vocabulary of its values. Columns that are "
                "id or jagged, without hash and bucket, have one."
            )


def share_vocabularies(specs: Sequence[ColumnSpec], empty: Collection[str]) -> list[ColumnSpec]:
    """The columns, where those of one vocabulary agree on the kind of its values and on a row for missing ones.

    Args:
      specs: all columns, for which `check_like` found nothing.
      empty: those that hold no value, whose kind says nothing.

    Raises:
      ConfigError: the column that is named has a proposed role without a vocabulary.
      DataError: the values of two columns are of different kinds.
    """
    by_name = {spec.name: spec for spec in specs}
    groups: dict[str, list[ColumnSpec]] = {}
    for spec in specs:
        if spec.like:
            other = by_name.get(spec.like)
            if other is None or other.role not in _HAVE_ONE:
                raise ConfigError(
                    f"columns: {_text(spec.name, spec.role, spec.like)!r}: {spec.like!r} is "
                    f"{'left out' if other is None else other.role}, so it has no vocabulary. Add "
                    f"{in_shell(spec.like, 'id')}, or of lists {in_shell(spec.like, 'jagged')}, to columns."
                )
            groups.setdefault(spec.like, [other]).append(spec)
    changed: dict[str, ColumnSpec] = {}
    for group in groups.values():
        full = [spec for spec in group if spec.name not in empty] or group
        kinds = {spec.kind: spec for spec in reversed(full)}
        if len(kinds) > 1 and kinds.keys() != {"integer", "unsigned"}:
            first, second, *_ = reversed(kinds.values())
            raise DataError(
                f"column {first.name!r} holds {IN_WORDS[first.kind]} and {second.name!r} {IN_WORDS[second.kind]}, so "
                "they cannot share a vocabulary. Store their values alike, or leave like out."
            )
        kind = "unsigned" if len(kinds) > 1 else full[0].kind
        optional = any(spec.optional for spec in group)
        changed |= {spec.name: dataclasses.replace(spec, kind=kind, optional=optional) for spec in group}
    return [changed.get(spec.name, spec) for spec in specs]


def _text(name: str, role: str, other: str) -> str:
    return column_text(name, f"{role}:like={items.quote(other)}")
