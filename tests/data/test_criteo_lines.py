"""The block parser against plain Python: same rows, and the same lines refused."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import criteo as criteo_support

from recjax.data.text.criteo_lines import fault, parse

GOOD = (1, list(range(13)), list(range(26)))


def integers_of(rows):
    return [[math.nan if v is None else float(np.float32(v)) for v in integers] for _, integers, _ in rows]


@given(criteo_support.rows(20), st.sampled_from(["08x", "08X", "x"]))
def test_rows_are_read_as_python_reads_them(rows, hexadecimal):
    found = parse(criteo_support.text(rows, hexadecimal))
    assert found.labels.tolist() == [row[0] for row in rows]
    np.testing.assert_array_equal(found.dense, np.array(integers_of(rows), np.float32))
    assert found.missing.T.tolist() == [[v is None for v in row[2]] for row in rows]
    assert found.keys.T.tolist() == [[v or 0 for v in row[2]] for row in rows]
    assert (found.dense.dtype, found.keys.dtype, found.labels.dtype) == (np.float32, np.uint32, np.float32)
    assert all(fault(line) is None for line in criteo_support.text(rows, hexadecimal).splitlines())


@given(
    rows=criteo_support.rows(3),
    field=st.integers(0, 39),
    value=st.binary(max_size=10)
    | st.from_regex(r"\A-?[0-9]{0,20}\Z").map(str.encode)
    | st.from_regex(r"\A[0-9a-gA-G@`:/-]{0,9}\Z").map(str.encode),
)
def test_the_parser_refuses_what_the_check_of_a_line_refuses(rows, field, value):
    lines = criteo_support.text(rows).split(b"\n")[:-1]
    fields = lines[-1].split(b"\t")
    fields[field] = value.replace(b"\n", b"")
    lines[-1] = b"\t".join(fields)
    assert (parse(b"\n".join(lines) + b"\n") is None) == any(fault(line) for line in lines)


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("digits", [b"12345678", b"abcdefAB"])
def test_every_byte_at_every_place_of_a_category(place, digits):
    """All 256 bytes: only hexadecimal digits pass."""
    head = criteo_support.line(GOOD).encode().rsplit(b"\t", 1)[0]
    for byte in range(256):
        category = digits[:place] + bytes([byte]) + digits[place + 1 :]
        rows = parse(head + b"\t" + category + b"\n")
        if chr(byte) in "0123456789abcdefABCDEF":
            assert rows.keys[25, 0] == int(category, 16)
        else:
            assert rows is None


@pytest.mark.parametrize("length", range(1, 9))
def test_every_byte_at_every_place_of_an_integer(length):
    head, tail = (b"\t".join(part) for part in np.split(criteo_support.line(GOOD).encode().split(b"\t"), [1]))
    for place in range(length):
        for byte in range(256):
            number = b"7" * place + bytes([byte]) + b"7" * (length - place - 1)
            rows = parse(head + b"\t" + number + tail[1:] + b"\n")
            good = chr(byte) in "0123456789" or (byte == ord("-") and place == 0 and length > 1)
            assert (rows is not None) == good, number
            if rows is not None:
                assert rows.dense[0, 0] == int(number)


def test_no_lines():
    rows = parse(b"")
    assert rows.labels.shape == (0,) and rows.keys.shape == (26, 0) and rows.dense.shape == (0, 13)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda f: f[:-1], "field count", r"the line has 39 field\(s\) instead of 40"),
        (lambda f: [*f, b""], "field count", r"the line has 41 field\(s\) instead of 40"),
        (lambda f: [], "field count", r"the line has 1 field\(s\) instead of 40: ''"),
        (lambda f: [b"2", *f[1:]], "label", r"the label \(column 1\) is '2', not 0 or 1"),
        (lambda f: [b"", *f[1:]], "label", r"the label \(column 1\) is ''"),
        (lambda f: [b"01", *f[1:]], "label", r"the label \(column 1\) is '01'"),
        (lambda f: [*f[:2], b"1.5", *f[3:]], "integer", r"I2 \(column 3\) is '1.5', not an integer"),
        (lambda f: [*f[:2], b"-", *f[3:]], "integer", r"I2 \(column 3\) is '-'"),
        (lambda f: [*f[:2], b"+5", *f[3:]], "integer", r"I2 \(column 3\) is '\+5'"),
        (lambda f: [*f[:2], b"1" * 19, *f[3:]], "integer", r"I2 \(column 3\) is '1111111111111111111'.*18 digits"),
        (lambda f: [*f[:13], "٣".encode(), *f[14:]], "integer", r"I13 \(column 14\) is '٣'"),
        (lambda f: [*f[:14], b"0000000g", *f[15:]], "category", r"C1 \(column 15\) is '0000000g', not up to 8 hexadec"),
        (lambda f: [*f[:39], b"0" * 9], "category", r"C26 \(column 40\) is '000000000'"),
        (lambda f: [*f[:39], b"abc\0"], "category", r"C26 \(column 40\) is 'abc\\x00'"),
        (lambda f: [*f[:39], b"\xff"], "category", r"C26 \(column 40\) is '\\xff'"),
    ],
)
def test_faults_in_words(change, kind, message):
    line = b"\t".join(change(criteo_support.line(GOOD).encode().split(b"\t")))
    found = fault(line)
    assert found.kind == kind
    assert re.search(message, found.text), found.text
    assert parse(line + b"\n") is None
