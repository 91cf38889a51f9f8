"""Aligned columns and phrases by hand."""

import pytest

from recjax.utils.text import aligned, did_you_mean, masked


def test_columns_by_hand():
    rows = [("name", "n", ""), ("a", "1,000", "remark")]
    assert aligned(rows) == ["name      n", "a     1,000  remark"]
    assert aligned(rows, left=(0, 2)) == aligned(rows)
    assert aligned(rows, left=(1, 2)) == ["name  n", "   a  1,000  remark"]


def test_the_nearest_name_is_a_question():
    names = {"user": 1, "movie": 2, "movies": 3}
    assert did_you_mean("moviess", names) == " Did you mean movies?"
    assert did_you_mean("usr", names, quoted=True) == " Did you mean 'user'?"
    assert did_you_mean("price", names) == did_you_mean("price", []) == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://b/x?token=abc&n=3", "s3://b/x?token=***&n=3"),
        ("s3://b/x?n=3&X-Auth-Sig=a?b;c=d", "s3://b/x?n=3&X-Auth-Sig=***;c=d"),
        ("s3://b/x?a=b?token=c", "s3://b/x?a=b?token=***"),
        ("s3://b/x?a?token?b=c", "s3://b/x?a?token?b=***"),
        ("s3://b/x?token&key= d?Password=e, f", "s3://b/x?token&key= d?Password=***, f"),
        ("gs:/u:p@host/x?monkey", "gs:/***@host/x?monkey"),
    ],
)
def test_what_grants_access_is_masked(text, shown):
    assert masked(text) == shown
