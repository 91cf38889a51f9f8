"""Avazu: a small file by hand, every fault that it can have, and any rows that hypothesis thinks of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import damage

from recjax.data.datasets.avazu import Avazu, open_raw, read_unlabelled
from recjax.data.prepare.chunk import check_chunk
from recjax.data.text.fields import Faults
from recjax.errors import DataError
from recjax.serving.faults import RowFaults

pytestmark = pytest.mark.light_compile

HEAD = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
)


def line(number=1, click=0, hour="14102100", site="1fbe01fe", c20="-1", c14="15706"):
    return (
        f"{number}000009418151094273,{click},{hour},1005,0,{site},f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,"
        f"a99f214a,ddd2926e,44956a24,1,2,{c14},320,50,1722,0,35,{c20},79\n"
    )


# Days 1 to 4 of a log; 21 October 2014 was a Tuesday.
ROWS = [
    line(1, 0, "14102100"),
    line(2, 1, "14102123", site="ffffffff"),
    line(3, 0, "14102206", c20="100084"),
    line(4, 1, "14102312"),
    line(5, 0, "14102418"),
    line(6, 0, "14102418", site="00000000"),
]


def write(folder, rows=ROWS, head=HEAD, name="train.csv"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(head + "".join(rows))
    return folder


def read(folder, skip=False, start=0, validation=1, test=1):
    reader = open_raw(Avazu("", validation, test, on_error="skip" if skip else "stop"), folder)
    chunks = list(reader.chunks(start))
    for chunk in chunks:
        check_chunk(chunk, reader)
    return chunks


def test_a_small_file_by_hand(tmp_path):
    [chunk] = read(write(tmp_path / "raw"))
    assert chunk.labels.tolist() == [0, 1, 0, 1, 0, 0]
    assert chunk.split.tolist() == [0, 0, 0, 1, 2, 2]
    keys = {name: column.keys.tolist() for name, column in chunk.columns.items()}
    assert keys["hour"] == [0, 23, 6, 12, 18, 18] and keys["weekday"] == [1, 1, 2, 3, 4, 4]
    assert keys["site_id"] == [0x1FBE01FE, 0xFFFFFFFF, 0x1FBE01FE, 0x1FBE01FE, 0x1FBE01FE, 0]
    assert keys["C20"] == [-1, -1, 100084, -1, -1, -1] and keys["C14"] == [15706] * 6
    assert "id" not in keys and len(keys) == 23
    np.testing.assert_allclose(chunk.dense[[0, 2, 3, 4]], [[0, 1], [1, 0], [0, -1], [-1, 0]], atol=1e-12)
    assert chunk.done == 1 and chunk.skipped == {}


def test_splits_by_day(tmp_path):
    raw = write(tmp_path / "raw")
    assert read(raw, validation=0, test=2)[0].split.tolist() == [0, 0, 0, 2, 2, 2]
    assert read(raw, validation=2, test=0)[0].split.tolist() == [0, 0, 0, 1, 1, 1]
    for days in ((2, 2), (4, 0), (1, 3)):
        with pytest.raises(DataError, match=r"train.csv has rows of 4 day\(s\), but"):
            read(raw, validation=days[0], test=days[1])
    with pytest.raises(DataError, match=r"has rows of 0 day\(s\)"):
        read(write(tmp_path / "none", []))


@pytest.mark.parametrize(
    ("bad", "message", "kind"),
    [
        (line(click=2), r"click \(field 2\) is '2', not a whole number from 0 to 1", "click"),
        (line(click=""), r"click \(field 2\) is ''", "click"),
        (line(hour="14102124"), r"hour \(field 3\) is '14102124', not a time like 14102123", "hour"),
        (line(hour="14130101"), r"hour \(field 3\) is '14130101', not a time", "hour"),
        (line(hour="2014102100"), r"hour \(field 3\) is '2014102100'", "hour"),
        (line(site="1fbe01f"), r"site_id \(field 6\) is '1fbe01f', not eight hexadecimal digits", "site_id"),
        (line(site="1fbe01fg"), r"site_id \(field 6\)", "site_id"),
        (line(c20=""), r"C20 \(field 23\) is ''", "C20"),
        (line(c20="-2"), r"C20 \(field 23\) is '-2', not a whole number from -1", "C20"),
        (line(c14="x"), r"C14 \(field 17\) is 'x'", "C14"),
        (line()[:-4] + "\n", r"the line has 23 field\(s\) instead of 24", "number of fields"),
        ("\n", r"hour \(field 3\) is ''", "click"),
    ],
)
def test_malformed_lines_are_named_or_counted(tmp_path, bad, message, kind):
    raw = write(tmp_path / "raw", [*ROWS[:3], bad, *ROWS[3:]])
    with pytest.raises(DataError, match=f"train.csv:5: .*{message}"):
        read(raw)
    [chunk] = read(raw, skip=True)
    assert chunk.labels.tolist() == [0, 1, 0, 1, 0, 0] and chunk.split.tolist() == [0, 0, 0, 1, 2, 2]
    assert chunk.skipped == {kind: 1}


@pytest.mark.parametrize("head", ["", HEAD.replace("click", "clicks"), HEAD.replace("C21", "C14")])
def test_another_header_is_refused(tmp_path, head):
    with pytest.raises(DataError, match="train.csv:1: the first line must name click, hour"):
        read(write(tmp_path / "raw", head=head))


HASHES = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 23), HASHES, st.integers(-1, 10**9)), min_size=1, max_size=20))
def test_any_rows_read_back(tmp_path_factory, rows):
    lines = [
        line(i, int(click), f"141021{hour:02}", site=f"{site:08x}", c20=c20)
        for i, (click, hour, site, c20) in enumerate(rows)
    ]
    [chunk] = read(write(tmp_path_factory.mktemp("any"), lines), validation=0, test=0)
    columns = {name: chunk.columns[name].keys.tolist() for name in ("hour", "site_id", "C20")}
    assert list(zip(chunk.labels.tolist(), *columns.values(), strict=True)) == [tuple(map(float, row)) for row in rows]


@pytest.mark.full
def test_the_verbs(tmp_path):
    rows = [line(i, i % 2, f"1410{21 + i // 8}{i % 24:02}", site=f"{i % 3:08x}", c14=i % 5) for i in range(80)]
    damage.assert_prepares_or_refuses("avazu", lambda folder: write(folder, rows), "train.csv", 80, tmp_path)


def test_rows_to_score_need_no_label(tmp_path):
    [whole] = read(write(tmp_path / "raw"))
    bare = [",".join([*row.split(",")[:1], *row.split(",")[2:]]) for row in (HEAD, *ROWS)]
    write(tmp_path / "raw", bare[1:], bare[0], "test.csv")
    for name in ("train.csv", "test.csv"):
        [part] = read_unlabelled(tmp_path / "raw" / name, Faults())
        chunk = part.chunk
        assert part.numbers.tolist() == [1, 2, 3, 4, 5, 6]
        assert chunk.labels.tolist() == [0] * 6
        np.testing.assert_array_equal(chunk.dense, whole.dense)
        for feature, column in whole.columns.items():
            np.testing.assert_array_equal(chunk.columns[feature].keys, column.keys, err_msg=feature)
    write(tmp_path / "raw", [*bare[1:3], bare[3].replace("1fbe01fe", "1fbe01f")], bare[0], "bad.csv")
    with pytest.raises(DataError, match=r"bad\.csv:4: site_id \(field 5\) is '1fbe01f', not eight hexadecimal"):
        list(read_unlabelled(tmp_path / "raw" / "bad.csv", Faults()))


def test_rows_to_score_may_lack_values_and_hand_columns_on(tmp_path):
    lines = [row.replace("1fbe01fe", "") if i == 0 else row for i, row in enumerate(ROWS)]
    lines[2] = lines[2].replace("1410", "14x0", 1)
    write(tmp_path / "raw", lines, HEAD, "test.csv")
    file = tmp_path / "raw" / "test.csv"
    faults = RowFaults(skip=True)
    [part] = read_unlabelled(file, faults, ["id", "hour", "site_id"])
    assert part.numbers.tolist() == [1, 2, 4, 5, 6] and faults.count == 1
    names = HEAD.strip().split(",")
    given = [dict(zip(names, row.strip().split(","), strict=True)) for i, row in enumerate(lines) if i != 2]
    assert part.carried == {name: [row[name] for row in given] for name in ("id", "hour", "site_id")}
    site = part.chunk.columns["site_id"]
    assert site.missing.tolist() == [row["site_id"] == "" for row in given] and site.missing.any()
    [whole] = read_unlabelled(file, RowFaults(skip=True), None)
    assert list(whole.carried) == names
    with pytest.raises(DataError, match=r"has no column 'user' to carry\. Its columns are id, click, hour"):
        list(read_unlabelled(file, faults, ["user"]))
