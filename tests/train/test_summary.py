"""The lines that end a run."""

from typing import Any

from recjax.train.run.summary import results

SUMMARY: dict[str, Any] = {
    "eval_split": "test",
    "eval_step": 4,
    "eval": {"auc": 0.75, "logloss": 0.5},
    "references": {"naive Bayes": 0.7},
    "samples_per_s": 53_562.4,
    "compilations": 1,
    "compile_s": 9.2,
    "compile_ahead_s": 0.0,
    "compiled_ahead": 0,
}


def test_a_run_ends_with_how_fast_it_trained_where_that_is_known():
    table, lines = results(SUMMARY).split("\n\n")
    assert "recjax, test, step 4  0.7500" in table and "naive Bayes" in table
    assert lines.splitlines() == [
        "training: 53,562 samples/s, without compiling, evaluating and saving",
        "compiling: 9 s, 1 training program",
    ]
    _, lines = results(SUMMARY | {"first_step_s": 6.4}).split("\n\n")
    assert lines.endswith("compiling: 9 s, 1 training program; the first step was done after 6 s")
    _, lines = results(SUMMARY | {"samples_per_s": None}).split("\n\n")  # of too few steps
    assert lines == "compiling: 9 s, 1 training program"
