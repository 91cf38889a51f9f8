"""Mistakes on the command line of studies, sweeps and calibrations: refused before anything is measured or written."""

import pytest
from support.commands import assert_refused, inside


@pytest.mark.parametrize(
    "verb",
    [("study", name) for name in ("replicas", "hoti2020", "foresight", "communication", "sdm", "tiers")]
    + [("study", "hot_rows", "bench_kaggle16"), ("sweep", "size"), ("tune", "search")],
)
@pytest.mark.parametrize("below", ["", "/inner"])
def test_a_file_in_place_of_the_folder(tmp_path, verb, below):
    file = tmp_path / "clicks.csv"
    file.write_text("user,clicked\n")
    done = inside(*verb, "--out", f"{file}{below}")
    assert_refused(done, 2, rf"--out {file}{below}: {file} is a file\. Name a folder, existing or new\.")
    assert file.read_text() == "user,clicked\n"


def test_a_machine_that_does_not_exist_leaves_the_folder_to_the_next_try(tmp_path):
    out = tmp_path / "out"
    done = inside("study", "foresight", "--out", out, "--machine", "h1000")
    assert_refused(done, 2, r"machine h1000: there is no such file\. Did you mean h100\? Measure this machine")
    assert not out.exists()


def test_calibrate_names_its_options_and_no_settings(tmp_path):
    done = inside("calibrate", "--platform", "tpu", "--out", tmp_path / "machine.json")
    said = assert_refused(done, 4, r"--platform tpu: JAX finds no such device", r"or set --platform cpu\.")
    assert "mesh." not in said
