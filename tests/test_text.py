"""Aligned columns by hand."""

from recjax.utils.text import aligned


def test_columns_by_hand():
    rows = [("name", "n", ""), ("a", "1,000", "remark")]
    assert aligned(rows) == ["name      n", "a     1,000  remark"]
    assert aligned(rows, left=(0, 2)) == aligned(rows)
    assert aligned(rows, left=(1, 2)) == ["name  n", "   a  1,000  remark"]
