"""Taobao: a small log by hand, the join with ads and users, and every fault that the three files can have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import damage

from recjax.data.datasets.taobao import Taobao, open_raw
from recjax.data.prepare.chunk import check_chunk
from recjax.errors import DataError

pytestmark = pytest.mark.light_compile

NAMES = ("raw_sample.csv", "ad_feature.csv", "user_profile.csv")
SAMPLES = "user,time_stamp,adgroup_id,pid,nonclk,clk\n"
ADS = """\
adgroup_id,cate_id,campaign_id,customer,brand,price
1,6406,83237,1,95471,170.0
63,6406,83237,1,NULL,199.5
2,39,7,5,,0.01
"""
# The space at the end of the header stands in the original file.
USERS = """\
userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,occupation,new_user_class_level \

234,0,5,2,5,,3,0,3
523,5,2,2,2,1,3,1,2
19,0,3,2,3,2,1,0,
"""
DAY = 1494000000  # 2017-05-06 00:00 in China, a Saturday
ROWS = [
    f"234,{DAY + 3600},63,430548_1007,1,0\n",
    f"523,{DAY + 86399},1,430539_1007,0,1\n",
    f"19,{DAY + 86400},2,430548_1007,1,0\n",
    f"77,{DAY + 3 * 86400},1,430548_1007,1,0\n",  # no such user
    f"234,{DAY + 2 * 86400 - 1},99,430548_1007,0,1\n",  # no such ad; and not in the order of time
]


def write(folder, rows=ROWS, ads=ADS, users=USERS, head=SAMPLES):
    folder.mkdir(exist_ok=True)
    for name, text in zip(NAMES, (head + "".join(rows), ads, users), strict=True):
        (folder / name).write_text(text)
    return folder


def read(folder, skip=False, start=0, days=(1, 1)):
    reader = open_raw(Taobao("", *days, on_error="skip" if skip else "stop"), folder)
    chunks = list(reader.chunks(start))
    for chunk in chunks:
        check_chunk(chunk, reader)
    return chunks


def values(chunk, name):
    """The column with None where it is missing."""
    column = chunk.columns[name]
    missing = np.zeros(len(column.keys), bool) if column.missing is None else column.missing
    return [None if gone else key for key, gone in zip(column.keys.tolist(), missing.tolist(), strict=True)]


def test_a_small_log_by_hand(tmp_path):
    [chunk] = read(write(tmp_path / "raw"))
    assert chunk.labels.tolist() == [0, 1, 0, 0, 1]
    assert chunk.split.tolist() == [0, 0, 1, 2, 1]  # days 0, 0, 1, 3, 1
    np.testing.assert_array_equal(chunk.dense, [[199.5], [170], [0.01], [170], [np.nan]])
    assert values(chunk, "user") == [234, 523, 19, 77, 234] and values(chunk, "adgroup_id") == [63, 1, 2, 1, 99]
    assert values(chunk, "pid") == [b"430548_1007", b"430539_1007", *[b"430548_1007"] * 3]
    assert values(chunk, "hour") == [1, 23, 0, 0, 23] and values(chunk, "weekday") == [5, 5, 6, 1, 6]
    assert values(chunk, "cate_id") == [6406, 6406, 39, 6406, None]
    assert values(chunk, "brand") == [None, 95471, None, 95471, None]
    assert values(chunk, "cms_segid") == [0, 5, 0, None, 0]
    assert values(chunk, "pvalue_level") == [None, 1, 2, None, None]
    assert values(chunk, "new_user_class_level") == [3, 2, None, None, 3]
    assert chunk.done == 1 and len(chunk.columns) == 17


def test_few_columns(tmp_path):
    reader = open_raw(Taobao(columns="few"), write(tmp_path / "raw"))
    [chunk] = reader.chunks(0)
    check_chunk(chunk, reader)
    nan = np.nan
    levels = [[5, nan, 3], [2, 1, 3], [3, 2, 1], [nan, nan, nan], [5, nan, 3]]  # age, value, shopping
    prices = [199.5, 170, 0.01, 170, nan]
    np.testing.assert_array_equal(chunk.dense, [[price, *of] for price, of in zip(prices, levels, strict=True)])
    assert reader.dense == ("price", "age_level", "pvalue_level", "shopping_level")
    assert list(chunk.columns) == ["user", "adgroup_id", "cate_id", "brand"]
    assert values(chunk, "brand") == [None, 95471, None, 95471, None]


def test_too_few_days(tmp_path):
    with pytest.raises(DataError, match=r"raw_sample.csv has rows of 3 day\(s\), but 2 validate and 1 are test"):
        read(write(tmp_path / "raw"), days=(2, 1))


@pytest.mark.parametrize(
    ("files", "message", "kind"),
    [
        ({"rows": ["x,1494000000,1,p,1,0\n", *ROWS]}, r"raw_sample.csv:2: user \(field 1\) is 'x'", "user"),
        ({"rows": ["1,1494000000,1,p,1,2\n", *ROWS]}, r"raw_sample.csv:2: clk \(field 6\) is '2', not a", "clk"),
        ({"rows": ["1,,1,p,1,0\n", *ROWS]}, r"raw_sample.csv:2: time_stamp \(field 2\) is ''", "time_stamp"),
        ({"rows": ["1,1494000000,-1,p,1,0\n", *ROWS]}, r"raw_sample.csv:2: adgroup_id \(field 3\)", "adgroup_id"),
        ({"ads": ADS + "9,x,1,1,1,1\n"}, r"ad_feature.csv:5: cate_id \(field 2\) is 'x'", "cate_id"),
        ({"ads": ADS + "9,1,1,1,1,NULL\n"}, r"ad_feature.csv:5: price \(field 6\) is 'NULL', not a number", "price"),
        ({"ads": ADS + "63,1,1,1,1,1\n"}, "ad_feature.csv:5: adgroup_id .* an earlier line has", "adgroup_id"),
        ({"users": USERS + "5,1,1,1,1,1,1,1.0,1\n"}, r"user_profile.csv:5: occupation \(field 8\)", "occupation"),
        ({"users": USERS + "5,1,1,1,1,1,1,1\n"}, r"user_profile.csv:5: .* 8 field\(s\) instead", "number of fields"),
    ],
)
def test_malformed_lines_are_named_or_counted(tmp_path, files, message, kind):
    raw = write(tmp_path / "raw", **files)
    with pytest.raises(DataError, match=message):
        read(raw)
    [chunk] = read(raw, skip=True)
    [plain] = read(write(tmp_path / "plain"))
    assert chunk.skipped == {kind: 1}
    assert all(values(chunk, name) == values(plain, name) for name in plain.columns)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"head": SAMPLES.replace("clk", "click")}, "raw_sample.csv:1: the first line must name user, time_stamp"),
        ({"ads": ADS.replace("brand", "make")}, "ad_feature.csv:1: the first line must name adgroup_id"),
        ({"ads": ADS.partition("\n")[0] + "\n"}, "ad_feature.csv has no row"),
        ({"users": USERS.partition("\n")[0] + "\n"}, "user_profile.csv has no row"),
        ({"rows": []}, r"has rows of 0 day\(s\)"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, files, message):
    for skip in (False, True):
        with pytest.raises(DataError, match=message):
            read(write(tmp_path / "raw", **files), skip=skip)


IDS = st.integers(0, 30)
MAYBE = st.none() | st.integers(0, 10**9)


@given(
    st.dictionaries(IDS, MAYBE, min_size=1),
    st.dictionaries(IDS, MAYBE, min_size=1),
    st.lists(st.tuples(IDS, IDS), min_size=1),
)
def test_the_join_is_that_of_a_dictionary(tmp_path_factory, brands, levels, rows):
    def text(value):
        return "" if value is None else value

    ads = ADS.partition("\n")[0] + "\n" + "".join(f"{ad},1,1,1,{text(b)},1\n" for ad, b in brands.items())
    users = USERS.partition("\n")[0] + "\n" + "".join(f"{u},1,1,1,{text(a)},1,1,1,1\n" for u, a in levels.items())
    samples = [f"{user},{DAY},{ad},p,1,0\n" for user, ad in rows]
    [chunk] = read(write(tmp_path_factory.mktemp("any"), samples, ads, users), days=(0, 0))
    assert values(chunk, "brand") == [brands.get(ad) for _, ad in rows]
    assert values(chunk, "age_level") == [levels.get(user) for user, _ in rows]
    assert np.isnan(chunk.dense[:, 0]).tolist() == [ad not in brands for _, ad in rows]


@pytest.mark.full
def test_the_verbs(tmp_path):
    rows = [f"{(234, 523, 7)[i % 3]},{DAY + 9000 * i},{(1, 63, 99)[i % 3]},p,1,{i % 2}\n" for i in range(80)]
    damage.assert_prepares_or_refuses("taobao", lambda folder: write(folder, rows), "user_profile.csv", 80, tmp_path)
