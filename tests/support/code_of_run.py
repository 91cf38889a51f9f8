"""Run folders that claim the code of a config, without a training, and refusals of other code."""

import recjax
from recjax.train.run.folder import RunFolder
from support.commands import assert_refused

FACTOR, BIAS = ("FACTOR = 1.0", "FACTOR = 0.0"), ("+ bias", "- bias")  # edits of the preset, and of its helper


def refused(done, *patterns, status=2):
    """Checks a refusal whose paragraph a difference may follow; gives the lines of that."""
    paragraph = next(line for line in done.err.splitlines() if line.startswith("recjax: error: "))
    before, _, shown = done.err.partition(paragraph)
    done.err = before + paragraph + "\n"
    assert_refused(done, status, *patterns)
    return shown.strip().splitlines()


def claimed(config, out, *, trained=True, **how):
    """A run folder of this config as training makes it, with something in the place of a checkpoint."""
    with RunFolder(out, config) as folder:
        folder.claim(how.pop("report", print), **how)
    if trained:
        (out / "checkpoints" / "00000001").mkdir(parents=True, exist_ok=True)
    return out


def load(file):
    return recjax.load(str(file))
