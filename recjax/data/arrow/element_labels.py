"""Labels of the elements of a group: columns of lists beside those of its features, one label for each element.

    label=clicked columns=candidates:list(item,author,clicked)

A field of `list(...)` that is a label, or the weight of one, is no feature; all labels are then those of that group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from recjax.data.arrow import convert
from recjax.data.arrow.chunk_columns import Fault
from recjax.data.arrow.labels import Labels
from recjax.data.arrow.roles import SEPARATOR, Asked
from recjax.data.arrow.splitter import Choices
from recjax.data.arrow.struct_lists import JOINT
from recjax.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class ElementLabels:
    """The columns of such labels and of their weights.

    Attributes:
      group: the group whose elements have them.
      columns: name of each column, and the separator of its entries where it is text.
    """

    group: str
    columns: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, group: str, labels: Labels) -> ElementLabels | None:
        """Makes those of prepared data, from the name of their group and their labels; None if rows have the labels."""
        return cls(group, tuple((name, SEPARATOR) for name in labels.columns)) if group else None

    def flat(self, arrays: Mapping[str, Any], where: Callable[[int], str]) -> tuple[dict[str, Any], np.ndarray]:
        """The same columns with those of labels end to end, and how many labels each row has: int32 [n].

        Raises:
          DataError: one holds no lists, or two hold lists of unequal lengths; where(row) says in words where that is.
        """
        flat, first = dict(arrays), ("", np.zeros(0, np.int32))
        for name, separator in self.columns:
            array = convert.plain(arrays[name])
            if not convert.is_list(array) and convert.kind_of(array) not in ("text", "none"):
                raise DataError(
                    f"column {name!r} holds no lists, but {self.group}:list(...) has it as the label of each element. "
                    "Give a list for each row, or leave it out there for one label a row."
                )
            flat[name], lengths = convert.bags(array, separator)
            first = first if first[0] else (name, lengths)
            if (apart := lengths != first[1]).any():
                row = int(np.argmax(apart))
                raise DataError(
                    f"{where(row)}: column {name!r} has {lengths[row]} entries and {first[0]!r} {first[1][row]}, but "
                    f"those of {self.group}:list(...) belong together, one of each to an element. Correct the row."
                )
        return flat, first[1]

    def unequal(self, lengths_n: np.ndarray, beside: tuple[str, np.ndarray]) -> Fault:
        """Finds rows that have other numbers of labels than of elements, as a feature of the group has them."""
        name, expected_n = beside
        what = f"a list of another length than that of {name!r}, which {self.group}:list(...) has beside it"
        return Fault(self.columns[0][0], lengths_n != expected_n, what)


def element_of(lengths_n: np.ndarray, where: Callable[[int], str]) -> Callable[[int], str]:
    """Returns what says in words where an entry of rows of so many entries is."""
    ends_n = np.cumsum(lengths_n)

    def of_entry(entry: int) -> str:
        row = int(np.searchsorted(ends_n, entry, side="right"))
        return f"{where(row)}, element {entry - int(ends_n[row] - lengths_n[row]) + 1}"

    return of_entry


def take_labels(
    choices: Choices, requests: Mapping[str, Asked], columns: Collection[str]
) -> tuple[Choices, dict[str, Asked], ElementLabels | None]:
    """Takes the labels out of the requests of features, where they are fields of a group.

    Args:
      choices: whose labels may be called as the field alone, unless that is a column, or GROUP.FIELD.
      requests: column -> what is asked of it.
      columns: of the table.

    Returns:
      the choices, with labels by the names of their columns; the other requests; the labels, None if rows have them.

    Raises:
      ConfigError: some labels are of a group and others not, or of another, or nothing else is left of it.
    """
    grouped = {name: each for name, each in requests.items() if each.group}
    fields = {name.removeprefix(f"{each.group}{JOINT}"): name for name, each in grouped.items()}
    by_field = {field: name for field, name in fields.items() if field not in columns}
    wanted = (choices.label.column,) if choices.labels is None else choices.labels.columns
    names = {name: name if name in grouped else by_field.get(name, "") for name in wanted}
    if choices.label.everywhere or not any(names.values()):
        return choices, dict(requests), None
    places = {name: f"{grouped[column].group}:list(...)" if column else "no list" for name, column in names.items()}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} is in {place}" for name, place in places.items())
        raise ConfigError(f"label: {listed}. All labels and their weights are of rows, or all fields of one list(...).")
    group = grouped[next(iter(names.values()))].group
    left = {name: each for name, each in requests.items() if name not in names.values()}
    if not any(each.group == group for each in left.values()):
        raise ConfigError(
            f"columns: {group}:list(...) has nothing but labels. Add what they are of: {group}:list(item,clicked)."
        )
    labels = choices.labels
    if labels is not None:
        each_label = (
            dataclasses.replace(
                label,
                meaning=dataclasses.replace(label.meaning, column=names[label.name]),
                weight=names.get(label.weight, ""),
            )
            for label in labels.each
        )
        labels = Labels(tuple(each_label))
    renamed = dataclasses.replace(choices.label, column=names[choices.label.column])
    elements = ElementLabels(group, tuple((name, grouped[name].separator) for name in names.values()))
    return dataclasses.replace(choices, label=renamed, labels=labels), left, elements
