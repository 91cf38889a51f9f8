"""Roles that `columns=auto` proposes for columns, and why."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from recjax.data.arrow.column_profile import IN_WORDS, ColumnProfile
from recjax.data.arrow.convert import EXACT
from recjax.data.arrow.roles import AUTO, SEPARATOR, Asked, Role, column_text
from recjax.data.arrow.wording import Wording
from recjax.settings import items

_NAMED_ID = re.compile(r"(^|[_\W])(id|ids|uid|key|code|zip|zipcode|postcode|sku|isbn|hash)($|[_\W])|[a-z]I[dD]$", re.I)
_LEVELS, _LEAST_RANGE = 20, 200  # distinct integers: up to so many are levels; from so many on, without gaps, ids
_TIMES = ((631_152_000, 4_102_444_800), (631_152_000_000, 4_102_444_800_000))  # 1990 to 2100 in s and ms since 1970
_SHOWN = 5  # columns that an error explains
_FEW = 5  # values whose rows one may name to leave them out
_UNIQUE, _UNIQUE_ROWS = 0.95, 100  # share of rows with a value of their own, from so many rows on


@dataclasses.dataclass(frozen=True)
class Proposal:
    """The role that a column most likely has.

    Attributes:
      role: the role.
      why: for people.
      date: of text ids that look like dates, one of them; else "".
      numbers: of text nearly all of whose values look like numbers, a sentence on the first that is not read; else "".
      exceptions: of such text, whether but a few of its values are none, so that their rows may be left out.
      separator: of text that is cut into lists, the mark between their entries; else "".
    """

    role: Role
    why: str
    date: str = ""
    numbers: str = ""
    exceptions: bool = False
    separator: str = ""

    @property
    def request(self) -> Asked:
        """The role with its options."""
        return Asked(self.role, separator=self.separator) if self.separator else Asked(self.role)

    @property
    def role_text(self) -> str:
        """The same as `columns=` writes it after the name of the column."""
        split = f":split={items.quote(self.separator)}" if self.separator not in ("", SEPARATOR) else ""
        return f"{self.role}{split}"


def propose(name: str, profile: ColumnProfile) -> Proposal:
    """The role that a column most likely has, why, and whether it may have been meant as numbers."""
    if name and profile.kind == "text" and (lists := profile.as_lists) is not None:
        why = (
            f"text cut at {lists.separator!r}, {_count_values(lists)}, {lists.least_width} to {lists.most_width} a row"
        )
        return Proposal("jagged", why, separator=lists.separator)
    proposal = _propose(name, profile)
    like = 0 if _NAMED_ID.search(name) else profile.mostly_numbers
    if not like or profile.unread is None:
        return proposal
    value, row = profile.unread
    so = "the column is left out" if proposal.role == "skip" else "each value is an id"
    said = (
        f"{name} is text, although {like:,} of its {profile.distinct:,} values look like numbers; the first that "
        f"cannot be read as one is {value[:80]!r} ({row}). So {so}"
    )
    return dataclasses.replace(proposal, numbers=said, exceptions=len(profile.unread_values) <= _FEW)


def _propose(name: str, profile: ColumnProfile) -> Proposal:
    """The role that a column most likely has, and why.

    Text, booleans, and integers that look like names of things are ids; other numbers are dense; lists of numbers with
    fractions are vectors and other lists bags. Left out is what no model can learn from as it stands: times, nested
    values, a single value, and values that nearly every row has for itself.
    """
    kind, distinct, rows = profile.kind, profile.distinct, profile.counted_rows
    number = kind in ("integer", "unsigned") or kind == "float" and profile.whole
    what = _count_values(profile)
    if name == "":
        return Proposal("skip", "has no name, like the index that pandas writes")
    if kind == "none" or not profile.lists and profile.missing == profile.rows:
        return Proposal("skip", "has no value")
    if kind == "other":
        return Proposal("skip", IN_WORDS[kind])
    if profile.lists:
        if kind == "float" and not profile.whole:
            if profile.least_width < profile.most_width:
                return Proposal("skip", "lists of unequal length")
            return Proposal("vector", f"{profile.most_width} numbers each")
        return Proposal("skip", "lists of times") if kind == "time" else Proposal("jagged", f"lists, {what}")
    if kind == "time":
        return Proposal("skip", "times; split=time can order the rows by them")
    if distinct < 2 and not profile.optional:
        return Proposal("skip", "one value")
    if (kind == "text" or number) and rows >= _UNIQUE_ROWS and distinct > _UNIQUE * rows:
        if kind == "text" or _NAMED_ID.search(name) or profile.most - profile.least < 1.05 * rows:
            return Proposal("skip", f"{what}: nearly every row has one of its own")
    if kind in ("text", "boolean"):
        dates = f" that looks like dates ({profile.date})" if profile.date else ""
        return Proposal("id", f"{IN_WORDS[kind]}{dates}, {what}", profile.date)
    if not number:
        return Proposal("dense", "numbers")
    if _NAMED_ID.search(name):
        return Proposal("id", f"named like one, {what}")
    if distinct > _LEVELS and any(least <= profile.least and profile.most <= most for least, most in _TIMES):
        return Proposal("skip", "times, as seconds or milliseconds since 1970; split=time can order the rows by them")
    if max(-profile.least, profile.most) >= EXACT:
        return Proposal("id", f"large integers, {what}")
    if distinct <= _LEVELS:
        return Proposal("id", f"integers, {what}")
    if distinct > _LEAST_RANGE and profile.most - profile.least + 1 < 2 * distinct:
        return Proposal("id", f"integers nearly without gaps, {what}")
    return Proposal("dense", f"integers from {profile.least:,.0f} to {profile.most:,.0f}")


def _count_values(profile: ColumnProfile) -> str:
    rows = profile.counted_rows
    return f"{profile.distinct:,} values" + (f" in the first {rows:,} rows" if rows < profile.rows else "")


def to_text(proposals: Mapping[str, Proposal], given: Sequence[str] = (), wording: Wording = Wording.COMMAND) -> str:
    """Returns proposals as lines to print, and as the setting that gives the same.

    Args:
      proposals: by column.
      given: the texts of `columns=`, whose own roles that setting keeps.
      wording: of that setting.
    """
    width = max(map(len, proposals), default=0)
    lines = [
        f"  {name:{width}}  {'left out' if one.role == 'skip' else one.role:8}  {one.why}"
        for name, one in proposals.items()
    ]
    own = [text for text in given if text != AUTO and not text.endswith(":skip")]
    taken = ",".join([column_text(name, one.role_text) for name, one in proposals.items() if one.role != "skip"] + own)
    times = [name for name, one in proposals.items() if one.role == "skip" and one.why.startswith("times")]
    option = functools.partial(wording.option, "columns")

    def with_role(name: str, role: str) -> str:
        return option(f"{AUTO},{column_text(name, role)}")

    more = [f"hour and weekday become features with {with_role(times[0], 'time')}"] if times else []
    for name, proposal in proposals.items():
        if proposal.date:
            more.append(
                f"warning: {name} is text that looks like dates ({proposal.date}), so that each is an id. Written as "
                f"2026-01-31 (ISO 8601), {with_role(name, 'time:weekday')} makes their weekday, and "
                f"{with_role(name, 'dense')} a number; {with_role(name, 'skip')} leaves them out"
            )
        if proposal.separator:
            more.append(f"each text of {name} as one id, not a list: {with_role(name, 'id')}")
        if proposal.numbers:
            more.append(f"warning: {advise_on_numbers(name, proposal, wording)}")
    asked = f"to have it otherwise, start from {option(taken)}"
    return "\n".join([f"{option(AUTO)} takes the columns so:", *lines, asked, *more])


def explain_no_features(proposals: Mapping[str, Proposal], wording: Wording) -> str:
    """Returns why all of the columns are left out, as sentences to follow an error; "" of no columns."""
    shown = [f"{name or 'a column'} ({one.why})" for name, one in proposals.items()][:_SHOWN]
    more = f" and {len(proposals) - _SHOWN:,} more" if len(proposals) > _SHOWN else ""
    why = [f"{wording.option('columns', AUTO)} leaves out {', '.join(shown)}{more}"] if shown else []
    why += [advise_on_numbers(name, one, wording) for name, one in proposals.items() if one.numbers][:_SHOWN]
    return "".join(f" {each}." for each in why)


def advise_on_numbers(name: str, proposal: Proposal, wording: Wording) -> str:
    """Returns what is wrong with a column of text that was meant as numbers, and what to do, without a full stop."""

    def with_role(role: str) -> str:
        return wording.option("columns", f"{AUTO},{column_text(name, role)}")

    leave = (
        f", or leave their rows out ({wording.option('where', f'{items.quote(name)}!=VALUE')})"
        if proposal.exceptions
        else ""
    )
    return (
        f"{proposal.numbers}. Correct such values, written as 3.50 without marks between thousands{leave}: then "
        f"{with_role('dense')} makes it a number. If ids are right, say {with_role('id')}"
    )
