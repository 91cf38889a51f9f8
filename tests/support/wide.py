"""The wide tests, which the gate leaves out: more cases of what a test of the gate shows too. Each says of which.

`pytest --full -m wide` runs them, by hand and before a release. Single cases are marked where they stand
(`pytest.param(..., marks=pytest.mark.wide)`); whole tests and modules are listed here.
"""

from __future__ import annotations

CONTRACT = "train/test_contract.py has every placement, exchange and optimizer against the oracle"
RESUME = "train/test_resume.py and test_golden_run.py resume; multiprocess/test_elastic.py after kills"
# Beginning of a test's id below tests/ -> which test of the gate shows it, or why it can wait.
WIDE = {
    "embedding/test_hot_rows.py::test_tables_stay_as_they_are": "train/test_hot_periods.py",
    "multiprocess/test_elastic.py::test_unequal_data_and_a_stalled_process": "its neighbour, and test_distributed.py",
    "multiprocess/test_python.py::test_fit_in_two_processes[initialize": "multiprocess/test_elastic.py kills, too",
    "models/test_din.py::test_two_processes": "its meshes, and multiprocess/test_equal.py",
    "multiprocess/test_two_sided.py::test_two_processes_train_and_rank_as_one[ccl": "[softmax]",
    "planning/test_balance_presets.py": "planning/test_balance.py has the same by hand-worked cases",
    "serving/test_damaged_exports.py::test_many_edits_of_a_sealed_manifest[records-0": "[records-1048576], [plain-0]",
    "serving/test_export.py::test_models_and_encodings[bfloat16": "[int4] and [none], and test_on_disk.py",
    "serving/test_export.py::test_tables_on_disk_give_the_same_bits[bfloat16": "[int8] and [none]",
    "serving/test_server.py::test_the_next_batch_starts_while_the_model_runs[False]": "[True]",
    "sweep/test_tune.py::test_a_killed_study": "sweep/test_run.py goes on after a kill, the other tests of tune search",
    "test_disks.py::test_no_permission": "the other tests there",
    "test_growth.py::test_time_and_memory_grow_with_the_input[export]": "[export manifest]; damaged ones in serving/",
    "test_growth.py::test_time_and_memory_grow_with_the_input[kept data]": "[prepared blocks]",
    "test_growth.py::test_time_and_memory_grow_with_the_input[packed rows]": "[prepared blocks]",
    "test_wheel.py": "package() of .ci/run installs the wheel, without what it needs",
    "train/test_compile_ahead.py::test_programs_compiled_ahead": "the other tests there",
    "train/test_dynamic_tables.py::test_losses_and_rows_are_those_of_a_static_table_on_any_mesh[3": "[8]",
    "train/test_dynamic_tables.py::test_a_killed_run": RESUME,
    "train/test_increments_run.py::test_a_run_goes_on_from_a_chain_without_tiers": "test_chain.py, and its neighbours",
    "train/test_increments_run.py::test_all_verbs_read_chains": "the other tests there",
    "train/test_loop.py::test_time_brings_checkpoints_and_changes_no_number[0-None]": "[100s-4]",
    "train/test_planted.py::test_without_a_signal": "the other tests there",
    "train/test_products.py::test_a_run": "the other tests there",
    "train/test_replicas.py::test_another_number": CONTRACT,
    "train/test_tasks_run.py::test_experts_beat": "quality, which takes a training; models/ has the layers by hand",
}


def reason(nodeid: str) -> str | None:
    """Why a test is wide; None if it belongs to the gate."""
    name = nodeid.removeprefix("tests/")
    return next((why for beginning, why in WIDE.items() if name.startswith(beginning)), None)
