"""Roles of columns in the model: what `columns=` says of each, in the grammar of `recjax.settings.items`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from recjax.data.arrow import time_parts
from recjax.data.arrow.column_profile import IN_WORDS, ColumnProfile
from recjax.data.arrow.struct_lists import JOINT
from recjax.data.prepare.chunk import RawFeature
from recjax.data.prepare.dense_columns import DenseTransform
from recjax.errors import ConfigError, DataError
from recjax.settings import items
from recjax.utils.text import did_you_mean, near

Role = Literal["id", "jagged", "dense", "vector", "weight", "time", "cross", "skip"]
AUTO = "auto"
CROSS = "*"  # between the names of the features of a cross
SEPARATOR = "|"  # of the entries of a jagged column that is text
ROLES = get_args(Role)
_MOST_BUCKETS = 10_000
_TRANSFORMS = get_args(DenseTransform)
_EXAMPLE = "user:id,tags:jagged,price:dense, or auto"
_LIST = "list("  # of aligned columns: hist:list(item,action)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A role with its options, as `columns=` gives them.

    Attributes:
      role: the role.
      transform: of a dense or vector column; "": that of the data.
      separator: of a jagged column.
      min_count: of an id or jagged column: values that training holds fewer times share the row of unknown ones.
      hashed: likewise: rows that the values are hashed to; 0: a row for each value.
      like: likewise: the column whose vocabulary this one shares; "": it has its own.
      buckets: of numbers: how many, of equally many training rows (or entries of them); 0: it holds ids.
      group: of a jagged column: the group of aligned columns that it is of; "": it stands alone.
      parts: of a time: those that become features, see `time_parts.PARTS`.
      zone: likewise: where its clock stands, by the name of a time zone; "": UTC.
    """

    role: Role
    transform: DenseTransform | Literal[""] = ""
    separator: str = SEPARATOR
    min_count: int = 1
    hashed: int = 0
    like: str = ""
    buckets: int = 0
    group: str = ""
    parts: tuple[str, ...] = ()
    zone: str = ""


@dataclasses.dataclass(frozen=True)
class ColumnSpec:
    """A column as the data were prepared with it: all that reading it once more needs; JSON values.

    Attributes:
      name: of the column; of a part of a time or a cross, that of the feature.
      role: see `Role`, but never "skip", and "part" for each part of a time.
      kind: of the keys ("boolean", "integer", "unsigned", "text"), or how text is read as numbers ("float", "time").
      optional: of id and jagged: whether values are missing.
      width: of a vector.
      separator: of jagged.
      min_count: see `Asked`.
      transform: likewise.
      hashed: likewise.
      edges: of an id column in buckets: a value is in bucket i if it reaches i of them.
      column: of a part: the column that holds the time.
      part: which part.
      zone: see `Asked`.
      per_second: units in a second of times that are numbers.
      sources: of a cross: names of the features that it joins.
      like: see `Asked`.
      group: likewise.
    """

    name: str
    role: str
    kind: str
    optional: bool = False
    width: int = 0
    separator: str = SEPARATOR
    min_count: int = 1
    transform: str = ""
    hashed: int = 0
    edges: tuple[float, ...] | None = None
    column: str = ""
    part: str = ""
    zone: str = ""
    per_second: int = 1
    sources: tuple[str, ...] = ()
    like: str = ""
    group: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table that it is read from; none of a cross, which is made of other features."""
        return () if self.role == "cross" else (self.column or self.name,)

    @property
    def is_feature(self) -> bool:
        """True if it is categorical."""
        return self.role in ("id", "jagged", "part", "cross")

    @property
    def feature(self) -> RawFeature:
        """The feature of a categorical column."""
        text: Literal["integer", "text"] = "text" if self.kind == "text" and not self.hashed else "integer"
        return RawFeature(self.name, self.role == "jagged", self.optional, text, self.min_count, self.like, self.group)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The dense columns of a dense or vector column."""
        return (self.name,) if self.role == "dense" else tuple(f"{self.name}[{i}]" for i in range(self.width))


_ALSO = {
    **dict.fromkeys(("string", "str", "text", "category", "categorical", "token", "int", "integer", "bool"), ["id"]),
    **dict.fromkeys(("float", "double", "number", "numeric", "continuous"), ["dense"]),
    **dict.fromkeys(("list", "sequence", "token_seq", "multi"), ["jagged"]),
    **dict.fromkeys(("datetime", "date", "timestamp"), ["time"]),
    **dict.fromkeys(("embedding", "float_seq", "array"), ["vector"]),
    **dict.fromkeys(("drop", "ignore", "none"), ["skip"]),
}  # what others call a role -> its name here


def parse(columns: Sequence[str]) -> tuple[bool, dict[str, Asked]]:
    """Returns whether roles are proposed for all columns that are not named; and column -> what is asked of it.

    Raises:
      ConfigError: a text that is neither "auto" nor "column:role" with options of that role, or a column twice.
    """
    asked: dict[str, Asked] = {}
    for text in columns:
        if text == AUTO:
            continue
        if (aligned := _aligned(text)) is not None:
            asked |= aligned
            continue
        name, role, options = split_role(text, ROLES)
        if not name or name in asked:
            parts = items.split(text, ":")
            close = near(parts[-1], ROLES, 1, 0.6) or _ALSO.get(parts[-1].lower(), [])
            hint = f" Did you mean {shlex.quote(f'{parts[0]}:{close[0]}')}?" if close and len(parts) > 1 else ""
            hint = " It is there twice." if name in asked else hint
            raise ConfigError(
                f"columns: {text!r} is not COLUMN:ROLE with a role of {', '.join(ROLES)}, each column once.{hint} "
                f"Write for example {_EXAMPLE}. A name with a comma or colon stands in double quotes."
            )
        asked[name] = _options(text, role, options)
    if sum(each.role == "weight" for each in asked.values()) > 1:
        raise ConfigError("columns: there are several of role weight. Name one.")
    return AUTO in columns, asked


def _aligned(text: str) -> dict[str, Asked] | None:
    """Returns the requests of `GROUP:list(FIELD,FIELD:OPTION)`, by GROUP.FIELD; None if the text has another form.

    Raises:
      ConfigError: it names no field, or one twice, or has an option that jagged columns have not.
    """
    name, _, role = text.partition(f":{_LIST}")
    if not name or not role.endswith(")") or len(items.split(text, ":")) != 2:
        return None
    group, requests = items.unquote(name), dict[str, Asked]()
    for field in items.split(role[:-1], ","):
        first, *options = items.split(field, ":")
        key = f"{group}{JOINT}{items.unquote(first)}"
        if not first or key in requests:
            raise ConfigError(
                f"columns: {text!r} needs columns of lists, or the fields of structures in lists, each once: "
                "hist:list(item,age:bucket=10)."
            )
        requests[key] = dataclasses.replace(_options(f"{group}:{_LIST}{field})", "jagged", options), group=group)
    return requests


def by_names(requests: Mapping[str, Asked], names: Collection[str]) -> dict[str, Asked]:
    """The same requests by the names of a table's columns: fields of a group may be columns that stand apart.

    Raises:
      ConfigError: a field of a group is also given a role of its own.
    """
    renamed: dict[str, Asked] = {}
    for name, request in requests.items():
        alone = name.removeprefix(f"{request.group}{JOINT}") if request.group and name not in names else name
        alone = alone if alone in names else name
        if alone in renamed or (alone != name and alone in requests):
            raise ConfigError(f"columns: {alone!r} is there twice: in {request.group}:list(...), and by itself.")
        renamed[alone] = request
    return renamed


def split_role(text: str, roles: Collection[str]) -> tuple[str, str, list[str]]:
    """The name of the column, its role and the options of an item of `columns=`; all empty if it has none of the roles.

    What stands before the last role is the name, so that one with colons needs no quotes. A cross is called as it is
    written, quotes included, for its name says which features it joins.
    """
    parts = items.split(text, ":")
    at = max((i for i, part in enumerate(parts) if i and part in roles), default=0)
    name = ":".join(parts[:at])
    return (name if parts[at] == "cross" else items.unquote(name), parts[at], parts[at + 1 :]) if at else ("", "", [])


def column_text(name: str, role: str) -> str:
    """The item of `columns=` that gives a column a role, its options included: what `parse` reads back."""
    return f"{items.quote(name)}:{role}"


def texts_of(specs: Sequence[ColumnSpec]) -> dict[str, str]:
    """The items of `columns=` by which columns were prepared: name of each column, or cross -> its item."""
    texts: dict[str, str] = {}
    for spec in specs:
        options = [spec.transform] if spec.transform else []
        options += [f"min_count={spec.min_count}"] if spec.min_count > 1 else []
        options += [f"hash={spec.hashed}"] if spec.hashed else []
        options += [f"bucket={len(spec.edges) + 1}"] if spec.edges else []
        options += [f"like={items.quote(spec.like)}"] if spec.like else []
        options += [f"group={items.quote(spec.group)}"] if spec.group else []
        if spec.role == "jagged" and spec.separator != SEPARATOR:
            options.append(f"split={items.quote(spec.separator)}")
        if spec.role == "part":
            parts = [other.part for other in specs if other.column == spec.column]
            options = [*parts, *([f"zone={spec.zone}"] if spec.zone else [])]
        name = spec.column or spec.name
        first = name if spec.role == "cross" else items.quote(name)
        texts[name] = ":".join([first, "time" if spec.role == "part" else spec.role, *options])
    return texts


def in_shell(name: str, role: str) -> str:
    """The same as an error message shows it: as a shell takes it, also in the midst of other items."""
    return shlex.quote(column_text(name, role))


def _options(text: str, role: Any, options: Sequence[str]) -> Asked:
    found = Asked(role)
    for option in options:
        key, _, value = option.partition("=")
        if role in ("dense", "vector") and option in _TRANSFORMS:
            found = dataclasses.replace(found, transform=cast(DenseTransform, option))
        elif role in ("id", "jagged", "cross") and key in ("min_count", "hash") and _is_count(value):
            field = {"hash": "hashed"}.get(key, key)
            found = dataclasses.replace(found, **{field: int(value)})  # type: ignore[arg-type]
        elif role in ("id", "jagged") and key == "bucket" and _is_count(value) and 1 < int(value) <= _MOST_BUCKETS:
            found = dataclasses.replace(found, buckets=int(value))
        elif role == "jagged" and key == "split" and items.unquote(value):
            found = dataclasses.replace(found, separator=items.unquote(value))
        elif role in ("id", "jagged") and key == "like" and items.unquote(value):
            found = dataclasses.replace(found, like=items.unquote(value))
        elif role == "jagged" and key == "group" and items.unquote(value):
            found = dataclasses.replace(found, group=items.unquote(value))
        elif role == "time" and option in time_parts.PARTS and option not in found.parts:
            found = dataclasses.replace(found, parts=(*found.parts, option))
        elif role == "time" and key == "zone" and value:
            time_parts.check_zone(value)
            found = dataclasses.replace(found, zone=value)
        else:
            known = {
                "id": "min_count=N, hash=N, bucket=N, like=COLUMN",
                "jagged": "min_count=N, hash=N, bucket=N, split=TEXT, like=COLUMN, group=NAME",
                "cross": "min_count=N, hash=N",
                "time": f"{', '.join(time_parts.PARTS)} (each once) and zone=NAME",
            }
            raise ConfigError(
                f"columns: {text!r} has no option {option!r}. Those of {role} are "
                f"{known.get(role, ', '.join(_TRANSFORMS) if role in ('dense', 'vector') else 'none')}."
            )
    if found.like and (found.hashed or found.buckets or found.min_count > 1):
        raise ConfigError(
            f"columns: {text!r}: with like the vocabulary is that of {found.like!r}, so hash, bucket and min_count "
            "make no sense. Leave them out; min_count may stand there."
        )
    if found.hashed and found.buckets:
        raise ConfigError(f"columns: {text!r}: buckets are few, so hashing them makes no sense. Leave hash out.")
    return dataclasses.replace(found, parts=found.parts or time_parts.USUAL) if role == "time" else found


def sources_of(name: str) -> tuple[str, ...]:
    """Names of the features that a cross of this name joins.

    Raises:
      ConfigError: fewer than two, or one twice.
    """
    sources = tuple(map(items.unquote, items.split(name, CROSS)))
    if len(sources) < 2 or not all(sources) or len(set(sources)) < len(sources):
        raise ConfigError(
            f"columns: {name!r} is no cross of several features. Write them with {CROSS} between them: "
            "user:id,kind:id,user*kind:cross."
        )
    return sources


def cross_of(name: str, asked: Asked, specs: Mapping[str, ColumnSpec]) -> ColumnSpec:
    """A cross of features as it will be prepared; `specs` are all others, by name.

    Raises:
      ConfigError: it joins what is no feature with one value in each row.
    """
    sources = sources_of(name)
    single = {key: spec for key, spec in specs.items() if spec.role in ("id", "part")}
    for source in sources:
        if source not in single:
            hint = did_you_mean(source, single, quoted=True)
            raise ConfigError(
                f"columns: {name!r} crosses {source!r}, which is no id and no part of a time, with one value in each "
                f"row.{hint} Those are {', '.join(single) or 'none'}. Add {in_shell(source, 'id')}, or of "
                f"numbers {in_shell(source, 'id:bucket=10')}, to columns."
            )
    optional = any(single[source].optional for source in sources)
    return ColumnSpec(name, "cross", "text", optional, min_count=asked.min_count, hashed=asked.hashed, sources=sources)


def parts_of(name: str, asked: Asked, profile: ColumnProfile) -> list[ColumnSpec]:
    """The parts of a time as they will be prepared, called COLUMN.PART.

    Raises:
      DataError: the column holds no times.
    """
    kind = profile.kind
    number = kind in ("integer", "unsigned", "float")
    if kind == "none" or profile.lists or not (number or kind in ("time", "text")):
        what = "no value" if kind == "none" else "lists" if profile.lists else IN_WORDS[kind]
        raise DataError(
            f"column {name!r} holds {what}, which has no hour or weekday. Leave it out: {in_shell(name, 'skip')}."
        )
    per_second = time_parts.units_of(profile.most) if number else 1
    read_as = "float" if number else "time"
    optional = profile.optional
    if kind == "text":  # of Parquet and its kin, where nothing was looked for in it
        optional = True
    return [
        ColumnSpec(
            f"{name}.{part}", "part", read_as, optional, column=name, part=part, zone=asked.zone, per_second=per_second
        )
        for part in asked.parts
    ]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 2**31


def spec_of(name: str, asked: Asked, profile: ColumnProfile) -> ColumnSpec:
    """The column as it will be prepared.

    Raises:
      DataError: it cannot have the role; the message says what it holds.
    """
    role, kind = asked.role, profile.kind
    if kind == "none" and not (role == "jagged" and profile.lists):
        raise DataError(
            f"column {name!r} has no value in any of {profile.rows:,} rows, so it can be no {role}. Leave it out "
            f"({in_shell(name, 'skip')}), or look at how the file was written."
        )
    if profile.lists and role not in ("jagged", "vector"):
        raise DataError(
            f"column {name!r} holds lists, so it cannot be {role}. Give it as {in_shell(name, 'jagged')} or "
            f"{in_shell(name, 'vector')}."
        )
    if not profile.lists and role in ("jagged", "vector"):
        other = "id" if role == "jagged" else "dense"
        raise DataError(
            f"column {name!r} holds {IN_WORDS[kind]}, not lists, so it cannot be {role}. Give it as "
            f"{in_shell(name, other)}."
        )
    if kind == "other" or role in ("id", "jagged") and kind == "time" and not asked.buckets:
        instead = f" Its hour and weekday can: {in_shell(name, 'time')}." if kind == "time" and role == "id" else ""
        raise DataError(
            f"column {name!r} holds {IN_WORDS[kind]}, which cannot be {role}.{instead} Or leave it out: "
            f"{in_shell(name, 'skip')}."
        )
    if asked.buckets:
        if kind == "text":
            raise DataError(f"column {name!r} holds text, which has no buckets. Give it as {in_shell(name, 'id')}.")
        read_as = "time" if kind == "time" else "float"
        plain = ColumnSpec(name, role, read_as, profile.optional, 0, asked.separator, asked.min_count)
        return dataclasses.replace(plain, group=asked.group)
    if role in ("id", "jagged"):
        if kind == "float" and not profile.whole:
            raise DataError(
                f"column {name!r} holds numbers with fractions or beyond 2^53, which are no ids: two that print alike "
                f"may differ. Give it as {in_shell(name, 'dense')}, in buckets as {in_shell(name, 'id:bucket=10')}, or "
                "store integers or text."
            )
        kept = "integer" if kind in ("float", "none") else kind
        plain = ColumnSpec(name, role, kept, profile.optional, 0, asked.separator, asked.min_count, "", asked.hashed)
        return dataclasses.replace(plain, like=asked.like, group=asked.group)
    width = 0
    if role == "vector":
        width = profile.most_width
        if profile.least_width != width or not width:
            raise DataError(
                f"column {name!r} holds lists of {profile.least_width} to {profile.most_width} numbers; those of a "
                f"vector are equally long. Give it as {in_shell(name, 'jagged')} if they are ids."
            )
        if kind == "text":
            raise DataError(
                f"column {name!r} holds lists of text, so it cannot be vector. Give it as {in_shell(name, 'jagged')}."
            )
    return ColumnSpec(name, role, "time" if kind == "time" else "float", False, width, "", 1, asked.transform)


def from_json(described: Mapping[str, Any]) -> list[ColumnSpec]:
    """The columns as prepared data describe them."""
    fields: list[dict[str, Any]] = [dict(each) for each in described["columns"]]
    lists = ("edges", "sources")
    for each in fields:
        each |= {key: tuple(each[key]) for key in lists if each.get(key) is not None}
    return [ColumnSpec(**each) for each in fields]


_ALWAYS = ("name", "role", "kind", "optional", "width", "separator", "min_count", "transform", "hashed", "edges")


def to_json(specs: Sequence[ColumnSpec]) -> list[dict[str, Any]]:
    """The inverse: the "columns" of a description; facts of parts and crosses only where they say something."""
    plain = ColumnSpec("", "", "")
    return [
        {key: v for key, v in dataclasses.asdict(spec).items() if key in _ALWAYS or v != getattr(plain, key)}
        for spec in specs
    ]
