"""Damaged files: every reader takes them or says clearly what is wrong (benchmarks/fuzz_readers.py tries many more)."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import fuzzing

from recjax import settings as machinery
from recjax.config import presets
from recjax.data.prepare.work_folder import WorkFolder
from recjax.errors import ConfigError
from recjax.utils import strict_json

INPUTS = 12


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_damaged_files_are_read_or_refused(tmp_path, name):
    target = fuzzing.TARGETS[name]
    for number in range(INPUTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        fuzzing.damaged(target, folder, random.Random(f"{name} {number}"))
        try:
            target.read(folder)
        except target.refusals as error:
            assert str(error)


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_what_is_damaged_was_good(tmp_path, name):
    fuzzing.TARGETS[name].write(tmp_path)
    fuzzing.TARGETS[name].read(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_what_json_writes_is_read(value):
    if "\\ud" not in (text := json.dumps(value)):
        assert strict_json.parse(text) == value == strict_json.parse(text.encode())


@given(st.binary(max_size=200) | st.text('[]{}:,"0123456789.eE-+ \n\\uabd', max_size=200).map(str.encode))
@settings(max_examples=300)
def test_any_bytes_are_json_or_not(data):
    try:
        value = strict_json.parse(data)
    except strict_json.JsonError as error:
        assert str(error)
    else:
        json.dumps(value, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested"),
        ("[" * 65 + "]" * 65, "nested more than 64 deep"),
        ('{"a": ' * 65 + "1" + "}" * 65, "nested more than 64 deep"),
        ("9" * 10_000, "too many digits"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        (b'["\xff"]', "not UTF-8"),
        (b'\n["\xed\xa0\x80"]', "not UTF-8"),
        ('["\\ud800"]', "surrogate"),
        ("", "not valid JSON"),
    ],
)
def test_what_strict_json_refuses(text, message):
    with pytest.raises(strict_json.JsonError, match=message):
        strict_json.parse(text)
    assert strict_json.parse("[" * 64 + "]" * 64)


def test_values_are_counted_outside_of_strings_before_any_is_made():
    text = '[{"a": "[[[,,,{{{\\\\"}, "\\",{[", 1]'  # two lists or objects and two commas
    assert strict_json.parse(text, most=4) == [{"a": "[[[,,,{{{\\"}, '",{[', 1]
    with pytest.raises(strict_json.JsonError, match="its 4 lists, objects and commas are more than the 3"):
        strict_json.parse(text, most=3)
    assert strict_json.count_above('["' + '\\"' * 10**6, "[", 0) == 1  # a string without its end, in linear time


@given(st.text(max_size=40) | st.sampled_from(["data", "model", "train.steps", "x" * 5000]), st.text(max_size=40))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=5000, max_examples=50)
def test_any_override_is_taken_or_refused(key, value):
    try:
        machinery.to_json(presets.load("movietweetings", [f"{key}={value}"]))
    except ConfigError as error:
        assert str(error)


def test_a_journal_cannot_name_files_elsewhere(tmp_path):
    fuzzing.write_journal(tmp_path)
    assert len(WorkFolder(tmp_path)._journal()) == 1
    (tmp_path / "x").write_bytes(b"123")
    (tmp_path / "work").mkdir()
    line = json.loads((tmp_path / "journal.jsonl").read_text()) | {"file": "../x"}
    (tmp_path / "work" / "journal.jsonl").write_text(json.dumps(line) + "\n")
    assert WorkFolder(tmp_path / "work")._journal() == []
