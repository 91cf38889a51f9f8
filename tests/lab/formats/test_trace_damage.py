"""Damaged files of communication traces: an error that says what and where, whatever is in them."""

import dataclasses
import gzip
import json
import os
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.traces import by_hand, chakra_graph, longer, pytorch, save

from recjax.errors import ConfigError, DataError
from recjax.lab.formats import FORMATS, fields, read_trace

QUICK = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])

GOOD = {"format": "recjax-trace", "version": 1, "rank": 0, "world": 1, "about": {}, "events": []}
EVENT = {"id": 0, "kind": "all_reduce", "group": [0]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("0.json", b"", "not valid JSON"),
        ("0.json", b"[" * 200_000, "nested more than"),
        ("0.json", b"\xff\xfe\x00", "not UTF-8 text"),
        ("0.json", b"[" + b"9" * 5000 + b"]", "too many digits"),
        ("0.json", b"17", "no trace that recjax knows"),
        ("0.json", b"[17]", "should be an object"),
        ("0.json", b'[{"comms": "fly"}]', "no collective that recjax knows"),
        ("0.json", b'[{"comms": "all_reduce", "req": {}, "pg_id": 0}]', "req is"),
        ("0.json", b'[{"comms": "all_reduce", "in_msg_size": -1, "out_msg_size": 1, "dtype": "Int"}]', "in_msg_size"),
        ("0.json", b'[{"comms": "all_reduce", "in_msg_size": 1, "out_msg_size": 1, "dtype": "Word"}]', "'Word'"),
        (
            "0.json",
            b'[{"comms": "all_reduce", "in_msg_size": 1, "out_msg_size": 1, "dtype": "Int", "world_size": 3,'
            b'"pg_id": {}}]',
            "pg_id",
        ),
        ("0.json", b'{"schema": "9.9", "nodes": []}', "schema '9.9' is not known"),
        ("0.json", b'{"schema": "1.0.1", "nodes": [{}]}', "there is no 'id'"),
        (
            "0.json",
            b'{"schema": "1.0.1", "nodes": [{"id": 1, "name": "record_param_comms", "inputs": [1]}]}',
            "no collective's name",
        ),
        ("0.json", json.dumps(GOOD | {"version": 2}).encode(), "version 2 of the format.*reads version 1"),
        ("0.json", json.dumps(GOOD | {"format": "x"}).encode(), "the format is 'x'"),
        ("0.json", json.dumps(GOOD | {"world": 10**9}).encode(), "1 to 65,536 ranks"),
        ("0.json", json.dumps(GOOD | {"rank": 5}).encode(), "only 1 ranks"),
        ("0.json", json.dumps(GOOD | {"events": {}}).encode(), "events is a dict"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"danger": 1}]}).encode(), "unknown field 'danger'"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"kind": "fly"}]}).encode(), "the kind is none of"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"deps": [3]}]}).encode(), "waits for 3"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"group": [1]}]}).encode(), "not in its group"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"group": [0, 0]}]}).encode(), "twice"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"sends": [1, 2]}]}).encode(), "splits for 2 ranks"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT | {"in_bytes": 1e30}]}).encode(), "in_bytes is 1e"),
        ("0.json", json.dumps(GOOD | {"events": [EVENT, EVENT]}).encode(), "not above 0"),
        ("0.et", b"", "no metadata at its beginning"),
        ("0.et", b"\x04\x08\x01\x18\x04", "no metadata at its beginning"),
        ("0.et", b"\x07\x0a\x059.9.9", "version '9.9.9'"),
        ("0.et", b"\xff" * 30, "no protobuf trace"),
        ("0.et", b"\x07\x0a\x050.0.4\x05\x08", "cut off"),
        ("0.et", b"\x07\x0a\x050.0.4\x02\x0b\x01", "node 0: .*no protobuf trace"),
        ("0.et", b"\x07\x0a\x050.0.4\x06\x08\x01\x18\x07\x28\x01", "cut off|waits for itself"),
        ("0.et", b"\x07\x0a\x050.0.4\x06\x08\x01\x18\x04\x20\x01\x06\x08\x01\x18\x04\x20\x01", "same id"),
        ("0.et", b"\x07\x0a\x050.0.4\x06\x08\x01\x18\x04\x28\x02\x06\x08\x02\x18\x04\x28\x01", "waits for itself"),
        ("0.et", b"\x07\x0a\x050.0.4\x04\x08\x01\x18\x07", "there is no 'comm_type'"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_trace(tmp_path)


def test_a_node_that_waits_for_itself(tmp_path):
    (tmp_path / "0.et").write_bytes(b"\x07\x0a\x050.0.4\x06\x08\x01\x18\x04\x28\x01")
    with pytest.raises(DataError, match="waits for itself"):
        read_trace(tmp_path)


def test_folders_that_hold_no_trace(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        read_trace(tmp_path / "absent")
    with pytest.raises(DataError, match="there is no trace in it"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="--format kineto is not known"):
        read_trace(tmp_path, "kineto")
    save(by_hand(), tmp_path)
    (tmp_path / "other.0.json").write_text("[]")
    with pytest.raises(DataError, match="both of rank 0"):
        read_trace(tmp_path)


def test_only_plain_files_of_the_folder_are_opened(tmp_path):
    (tmp_path / "secret.json").write_text(json.dumps(GOOD))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "0.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(DataError, match="not a plain file"):
        read_trace(inside)
    (inside / "0.json").unlink()
    (inside / "0.json").symlink_to("0.json")
    with pytest.raises(DataError, match="not a plain file"):
        read_trace(inside)
    (inside / "0.json").unlink()
    os.mkfifo(inside / "0.json")  # reading this would wait for ever
    with pytest.raises(DataError, match="not a plain file"):
        read_trace(inside)


def test_two_traces_in_one_folder(tmp_path):
    save(by_hand(), tmp_path)
    other = dataclasses.replace(by_hand(), world=5)
    (tmp_path / "trace.1.json").write_bytes(FORMATS["recjax"].write(other)["trace.1.json"])
    with pytest.raises(DataError, match="two traces are mixed"):
        read_trace(tmp_path)


REDUCE = b'{"comms":"all_reduce","in_msg_size":1,"out_msg_size":1,"dtype":"Int","req":%d,"pg_id":0,"world_size":%d}'


def peak_of(read):
    """(Most bytes that Python holds meanwhile, what it raised)."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1], None
    except DataError as error:
        return tracemalloc.get_traced_memory()[1], error
    finally:
        tracemalloc.stop()


def test_a_packed_file_is_not_unpacked_out_of_proportion(tmp_path):
    """30 MB of empty lists in 29 kB: refused after 100 times and 1 MiB, which is 4 MB."""
    (tmp_path / "0.json.gz").write_bytes(gzip.compress(b"[" + b"[]," * 10_000_000 + b"[]]", 9))
    peak, error = peak_of(lambda: read_trace(tmp_path))
    assert "29,203 bytes unpack to more than 3,968,876, the most that are read" in str(error)
    assert "gunzip 0.json.gz" in str(error)
    assert peak < 12e6


def test_steps_that_are_all_alike_stay_within_the_ratio(tmp_path):
    """Nothing packs better than the same step again and again, in the format of the longest words."""
    trace = longer(by_hand(), 400)
    save(trace, tmp_path, "chakra-json")
    for path in list(tmp_path.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 9))
        path.unlink()
    assert len(read_trace(tmp_path).ranks[0]) == 5 * 400  # without the times of computing


def test_a_file_of_more_values_than_a_trace_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr(fields, "MAX_MARKS", 1000)
    (tmp_path / "0.json").write_bytes(b"[" + b"{}," * 1000 + b"{}]")
    with pytest.raises(DataError, match="its 2,002 lists, objects and commas are more than the 1,000 that are read"):
        read_trace(tmp_path)
    (tmp_path / "0.json").write_text(json.dumps([{"compute": "[{," * 1000}]))  # marks in a text stand for nothing
    assert len(read_trace(tmp_path).ranks[0]) == 1


def test_lines_that_stand_for_many_ranks_share_one_group(tmp_path):
    lines = [REDUCE % (number, 65_536) for number in range(2000)]
    (tmp_path / "0.json").write_bytes(b"[" + b",".join(lines) + b"]")
    peak, error = peak_of(lambda: read_trace(tmp_path))
    assert error is None and peak < 2**25
    for lines in ([REDUCE % (0, 2**62)], [REDUCE % (0, 1000 + number) for number in range(100)]):
        (tmp_path / "0.json").write_bytes(b"[" + b",".join(lines) + b"]")
        with pytest.raises(DataError, match="ranks that it does not list"):
            read_trace(tmp_path)


def test_operations_after_many_waits_share_what_they_wait_for(tmp_path):
    waits = [b'{"comms":"wait","req":%d,"pg_id":0}' % number for number in range(1000)]
    lines = [*(REDUCE % (number, 1) for number in range(1000)), *waits, *(REDUCE % (n, 1) for n in range(1000, 3000))]
    (tmp_path / "0.json").write_bytes(b"[" + b",".join(lines) + b"]")
    peak, error = peak_of(lambda: read_trace(tmp_path))
    assert error is None and peak < 2**23  # 2,000 lists of their own would take 16 MB


def test_waits_and_operations_in_turn_are_refused_before_they_take_much(tmp_path):
    first = 4096
    wait = b'{"comms":"wait","req":%d,"pg_id":0}'
    turns = [line for i in range(2 * first) for line in (wait % i, REDUCE % (first + i, 1))]
    content = b"[" + b",".join([*(REDUCE % (number, 1) for number in range(first)), *turns]) + b"]"
    (tmp_path / "0.json").write_bytes(content)
    peak, error = peak_of(lambda: read_trace(tmp_path))
    assert isinstance(error, DataError) and "wait for more than" in str(error)
    assert peak < 40 * len(content)


def test_nodes_of_next_to_nothing_are_refused_before_they_take_much(tmp_path):
    file = tmp_path / "trace.0.et"
    for content, words in (
        (bytes(300_000), "two nodes have the same id"),
        (b"\0" + b"".join(b"\4\10%c\x81\1" % (128 + n % 128) for n in range(128)), "fewer than 8 bytes each"),
    ):
        file.write_bytes(content)
        peak, error = peak_of(lambda: read_trace(tmp_path))
        assert words in str(error) and peak < 2**22


def test_an_operation_waited_for_again_is_no_news(tmp_path):
    again = [b'{"comms":"wait","req":0,"pg_id":0}', REDUCE % (2, 1)]
    (tmp_path / "0.json").write_bytes(b"[" + b",".join([REDUCE % (0, 1), *again, *again[:1], REDUCE % (3, 1)]) + b"]")
    assert [event.deps for event in read_trace(tmp_path).ranks[0]] == [(), (0,), (0,)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.full
@pytest.mark.parametrize("format", ["recjax", "param", "chakra-json", "chakra-graph", "pytorch"])
@settings(QUICK, max_examples=100)
@given(st.data())
def test_a_changed_value_is_an_error_or_a_trace(tmp_path_factory, format, data):
    """One value anywhere in a good file becomes another: never anything but a DataError."""
    if format in FORMATS:
        whole = json.loads(FORMATS[format].write(by_hand()).popitem()[1])
    else:  # are read alone
        whole = pytorch(0) if format == "pytorch" else chakra_graph(0)
    at, key = [whole], 0
    while True:
        inner = at[key]
        if not isinstance(inner, (list, dict)) or not inner or data.draw(st.integers(0, 5)) == 0:
            break
        at, key = inner, data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
    at[key] = data.draw(JSON)
    folder = tmp_path_factory.mktemp("t")
    (folder / "0.json").write_text(json.dumps(whole))
    try:
        read_trace(folder)
    except DataError:
        pass


@QUICK
@given(st.data())
def test_changed_bytes_of_protobuf_are_an_error_or_a_trace(tmp_path_factory, data):
    content = bytearray(FORMATS["chakra-et"].write(by_hand())["trace.0.et"])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("t")
    (folder / "0.et").write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        read_trace(folder)
    except DataError:
        pass
