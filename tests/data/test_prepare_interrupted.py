"""Preparing data that was broken off: what is kept beside the data, taken up again, read again or refused."""

import os

import pytest
from support.toy_rows import Toy, prepare, rows_of

from recjax.data.prepare import part_file
from recjax.data.prepare import prepare as engine
from recjax.data.prepare.ids import Frequency
from recjax.errors import DataError, TrainingError


class Stopped(BaseException):
    """A kill as it looks from inside: nothing may catch it."""


def test_an_interrupted_reading_goes_on_at_the_next_chunk(tmp_path):
    rows = rows_of(60)
    clean = prepare(Toy(rows), tmp_path / "clean")
    with pytest.raises(Stopped):
        prepare(Toy(rows, error=Stopped(), stop_at=13), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again = Toy(rows)
    made = prepare(again, tmp_path / "out")
    assert 8 <= again.asked[0] <= 13 and again.asked[-1] == 19
    assert made.fingerprint == clean.fingerprint and made.about == clean.about
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean", "out"]


@pytest.mark.parametrize("where", ["_vocabulary", "write_prepared"])
def test_an_interrupted_later_stage_reads_nothing_again(tmp_path, monkeypatch, where):
    rows = rows_of(60)
    clean = prepare(Toy(rows), tmp_path / "clean")

    def stop(*_, **__):
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(engine, where, stop)
        prepare(Toy(rows), tmp_path / "out")
    again = Toy(rows)
    assert prepare(again, tmp_path / "out").fingerprint == clean.fingerprint
    assert again.asked == []


def test_other_options_of_encoding_keep_what_is_read_and_other_files_do_not(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise Stopped

    cases = (
        ({"ids": Frequency(2)}, False),
        ({"dense": "log1p"}, False),
        ({"options": {"split": "other"}}, True),
        ({"rows": rows_of(60, seed=1)}, True),
    )
    for i, (change, reads) in enumerate(cases):
        out = tmp_path / str(i)
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(engine, "write_prepared", stop)
            prepare(Toy(rows_of(60)), out)
        reader = Toy(change.pop("rows", rows_of(60)))
        made = prepare(reader, out, **change)
        assert bool(reader.asked) == reads
        assert made.fingerprint == prepare(Toy(reader.rows), tmp_path / f"clean{i}", **change).fingerprint


def test_a_vocabulary_of_other_options_is_not_taken(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(engine, "write_prepared", stop)
        prepare(Toy(rows_of(60)), tmp_path / "out")
    made = prepare(Toy(rows_of(60)), tmp_path / "out", Frequency(1000))
    assert [feature.rows for feature in made.schema.features] == [2, 1]


def test_a_journal_cut_short_and_a_lost_part_are_read_again(tmp_path):
    rows = rows_of(60)
    clean = prepare(Toy(rows), tmp_path / "clean")

    damages = (
        lambda work: os.truncate(work / "journal.jsonl", (work / "journal.jsonl").stat().st_size - 5),
        lambda work: os.truncate(work / "part-000005.part", 100),
        lambda work: (work / "part-000005.part").unlink(),
        lambda work: (work / "key.json").write_text("{}"),
    )
    for i, damage in enumerate(damages):
        out = tmp_path / str(i)
        with pytest.raises(Stopped):
            prepare(Toy(rows, error=Stopped(), stop_at=15), out)
        damage(tmp_path / f".{i}.work")
        assert prepare(Toy(rows), out).fingerprint == clean.fingerprint


def test_a_part_whose_content_changed_is_refused(tmp_path):
    with pytest.raises(Stopped):
        prepare(Toy(rows_of(60), error=Stopped(), stop_at=15), tmp_path / "out")
    file = tmp_path / ".out.work" / "part-000003.part"
    content = bytearray(file.read_bytes())
    content[128] ^= 1  # the first of an array; the table stands at the end
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{file} is damaged.*Remove the folder"):
        prepare(Toy(rows_of(60)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_data_leave_nothing(tmp_path):
    with pytest.raises(DataError, match="line 3"):
        prepare(Toy(rows_of(60), error=DataError("line 3"), stop_at=15), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device", "part")

    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="No space left.*is kept beside it"):
        patch.setattr(part_file, "_write", refuse)
        prepare(Toy(rows_of(60)), tmp_path / "out")
    assert prepare(Toy(rows_of(60)), tmp_path / "out").name == "toy"
