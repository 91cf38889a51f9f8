"""The verbs of the command line, with their options and what each calls."""

from __future__ import annotations

import argparse
from typing import Any

from recjax.cli import common, lab, planning, scoring, usage, verbs
from recjax.utils.paths import expanded, out_folder
from recjax.utils.version import __version__

STATUS = (
    "exit status: 0 done, 2 bad usage or config, 3 bad data, 4 lost a peer or the device, 130 Ctrl-C, 143 SIGTERM "
    "(train: both after a checkpoint), 1 anything else"
)


def make_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the command line: what it gives has the function to call as `run`.

    Args:
      verb: the one on the command line, whose options it must know; of the lab's verbs the others have none then. None
        makes the parser whole.

    Raises:
      ConfigError: a verb of the lab, which is not installed.
    """
    parser = usage.Parser(
        prog="recjax",
        description="Trains deep learning recommendation models with embedding tables spread over devices.",
        epilog=f"{lab.describe_verbs()}\n\nexample: recjax train movietweetings seed=1 --out runs/first\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"recjax {__version__}")
    names = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    train = common.verb(
        names,
        "train",
        verbs.train,
        "train a preset, or resume the run in --out",
        "train movietweetings train.batch_size=512 --out runs/first",
    )
    train.add_argument("preset", help=f"{common.PRESET}; with --more a run folder")
    common.overrides(train)
    common.trusting(train)
    train.add_argument(
        "--more",
        metavar="DATA",
        help="go on with a run on further rows, which are measured first: a file as it was trained on, a folder or a "
        "pattern of such files, or a folder of prepared data",
    )
    train.add_argument(
        "--out",
        type=expanded,
        help="run folder (default: a folder in runs/ named after the settings that a resumed run keeps, and the code "
        "of your own model)",
    )
    train.set_defaults(tunables=True, together=True, saves=True)  # several processes may run it together

    evaluate = common.verb(
        names,
        "eval",
        verbs.evaluate,
        "evaluate a checkpoint of a run",
        "eval runs/first mesh.devices=1 --split validation --split test --by genres",
    )
    evaluate.add_argument("run_folder", type=expanded, metavar="DIR", help="run folder")
    evaluate.set_defaults(tunables=True, together=True)
    common.overrides(evaluate)
    common.trusting(evaluate)

    def detail(name: str, help: str, **more: Any) -> None:  # without a value it is the default of evaluation.Details
        evaluate.add_argument(name, help=help, default=argparse.SUPPRESS, **more)

    evaluate.add_argument(
        "--split",
        action="append",
        choices=("train", "validation", "test"),
        help="split to evaluate; may be given several times (default: test)",
    )
    common.checkpoint(evaluate)
    evaluate.add_argument(
        "--input",
        type=expanded,
        metavar="FILE",
        help="file of rows with labels, of a table of one's own, to evaluate in place of the test split",
    )
    evaluate.add_argument(
        "--by",
        action="append",
        default=[],
        metavar="FEATURE",
        help="also print the measures of each value of this feature; may be given several times",
    )
    detail(
        "--top",
        "number of most frequent values of a feature of --by that are measured one by one; the others share a "
        "slice (default: 20)",
        type=int,
        metavar="K",
    )
    detail(
        "--topk",
        "of a model of two sides: rank all items for each user, and measure the lists of these lengths (default: "
        "10,20,50)",
        type=common.numbers(int),
        metavar="K,L",
    )
    common.excluding(evaluate, "those before the split that is measured")
    detail(
        "--group", "also compute the AUC within each value of this feature, such as the user (gAUC)", metavar="FEATURE"
    )
    detail(
        "--ablate",
        "also measure what each column is worth: the AUC (the measure of train.choose_by) with its values mixed among "
        "the rows, and a picture, ablation.png in the run folder",
        action="store_true",
    )
    detail("--permutations", "seeds by which --ablate mixes each column (default: 3)", type=int, metavar="N")
    detail("--calibration-bins", "number of points of the calibration curve (default: 20)", type=int, metavar="N")
    detail(
        "--calibration-by",
        "kind of calibration bins: of equal weight (quantile, the default) or of equal width",
        choices=("quantile", "width"),
    )
    detail(
        "--exact-rows",
        "largest number of samples for which the AUC is exact; with more it comes from a histogram, with bounds "
        "(default: 10,000,000)",
        type=int,
        metavar="N",
    )

    scoring.add(names)
    show = common.verb(names, "show", verbs.show, "print the resolved config", "show movietweetings model.top=128-64-1")
    show.add_argument("preset", help=common.PRESET)
    common.overrides(show)

    planning.add(names)
    check = common.verb(
        names,
        "preflight",
        verbs.preflight,
        "check devices, mesh, versions, config and data of all processes",
        "preflight movietweetings mesh.devices=8 --out runs/first",
    )
    check.add_argument("preset", help=common.PRESET)
    common.overrides(check)
    check.add_argument("--out", type=expanded, help="run folder that training will write; all processes must see it")
    check.set_defaults(together=True, tunables=True)

    sweep = common.verb(
        names,
        "sweep",
        verbs.sweep,
        "train every run of a sweep file, skipping those that are done",
        "sweep size --dry-run",
    )
    sweep.add_argument("file", metavar="FILE", help="path of a TOML file, or the name of one in configs/sweeps/")
    common.trusting(sweep, "the preset that FILE names")
    sweep.add_argument(
        "--out", type=out_folder, help="folder of all its runs (default: runs/sweep-NAME, after the file)"
    )
    sweep.set_defaults(
        interrupted="stopped by Ctrl-C. Give the same command to go on: it skips the runs that are done."
    )
    which = sweep.add_mutually_exclusive_group()
    which.add_argument("--dry-run", action="store_true", help="print the command line of every run, and start none")
    which.add_argument("--index", type=int, metavar="K", help="do only run K, counted from 0 (in a job array, say)")
    which.add_argument(
        "--results", action="store_true", help="only gather the results of finished runs: table, results.jsonl, picture"
    )
    sweep.add_argument(
        "--runs-at-most",
        type=int,
        metavar="N",
        help="refuse a file that stands for more runs than N (default: 10,000); they are counted first",
    )

    tune = common.verb(
        names,
        "tune",
        verbs.tune,
        "search for good settings with Optuna; the same command goes on with a search, also elsewhere",
        "tune search --trials 30",
    )
    tune.add_argument(
        "file", metavar="FILE", help="path of a TOML file with a [search], or the name of one in configs/sweeps/"
    )
    common.trusting(tune, "the preset that FILE names")
    tune.add_argument(
        "--out",
        type=out_folder,
        help="folder of the study (default: runs/tune-NAME, after the file); several processes may share it",
    )
    tune.add_argument("--trials", type=int, metavar="N", help="number of trials in all, in place of what the file says")
    tune.add_argument(
        "--results", action="store_true", help="only gather the results of finished trials: table, results.jsonl"
    )
    tune.set_defaults(interrupted="stopped by Ctrl-C. Give the same command to go on.")

    data = names.add_parser(
        "data", help="prepare raw files, or describe data", epilog="example: recjax data info movietweetings"
    )
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)
    prepare = common.verb(
        actions,
        "prepare",
        verbs.prepare,
        "turn raw files into prepared blocks",
        "data prepare movietweetings --from raw/ --out prepared/ min_user_count=5",
    )
    prepare.add_argument("dataset", help="name of a dataset, or a preset whose rows are drawn, to write them to disk")
    prepare.add_argument(
        "--from",
        dest="source",
        help="folder of the raw files (default: shipped ones); for `table` a Parquet, ORC, CSV or Arrow file, a "
        "folder of them or a pattern",
    )
    prepare.add_argument("--out", required=True, help="folder to write, for data.path")
    prepare.add_argument("--overwrite", action="store_true", help="replace other prepared data in --out")
    prepare.add_argument(
        "--beam",
        metavar="FLAGS",
        help="prepare on many machines by Apache Beam (extra `beam`), with "
        'its pipeline options, such as --beam="--runner=DirectRunner"',
    )
    common.overrides(prepare)
    prepare.set_defaults(
        interrupted="stopped by Ctrl-C. Give the same command to go on from where it was.",
        tunables=True,
        compiles=False,
    )
    info = common.verb(
        actions, "info", verbs.info, "print sizes, skew and checksums of data", "data info movietweetings"
    )
    info.add_argument("dataset", help="name of a dataset, or the folder of prepared data")
    info.add_argument(
        "--presence",
        action="store_true",
        help="count in how many of a run's first batches each id is, and what share of the look-ups the most present "
        "ids take",
    )
    info.add_argument(
        "--batches", type=int, default=100, metavar="N", help="number of batches that --presence counts (default: 100)"
    )
    info.add_argument(
        "--batch-size", type=int, default=4096, metavar="B", help="samples in each of these batches (default: 4096)"
    )
    info.add_argument("--seed", type=int, default=0, help="seed of the order of the samples (default: 0)")
    info.add_argument("--in-order", action="store_true", help="take the samples in the order of the data, not shuffled")
    common.overrides(info)

    weights = names.add_parser(
        "weights",
        help="take weights from, or give them to, other libraries",
        epilog="example: recjax weights export runs/first --format facebook --out dlrm.npz",
    )
    ways = weights.add_subparsers(title="actions", metavar="ACTION", required=True)
    take = common.verb(
        ways,
        "import",
        verbs.import_weights,
        "make a run from the weights of facebookresearch/dlrm or TorchRec",
        "weights import dlrm.npz synthetic model.bottom=64-16 --out runs/imported",
    )
    take.add_argument("file", type=expanded, metavar="FILE", help="state dict of the other library, as an .npz file")
    take.add_argument("preset", help=common.PRESET)
    common.overrides(take)
    take.add_argument("--out", type=expanded, required=True, help="run folder to make, from which eval and train go on")
    give = common.verb(
        ways,
        "export",
        verbs.export_weights,
        "write the weights of a run as another library's state dict",
        "weights export runs/first --format facebook --out dlrm.npz",
    )
    give.add_argument("run_folder", type=expanded, metavar="DIR", help="run folder")
    common.overrides(give)
    common.trusting(give)
    give.add_argument(
        "--format", required=True, choices=("facebook", "torchrec"), help="library whose state dict is written"
    )
    give.add_argument("--out", type=expanded, required=True, metavar="FILE", help=".npz file to write")
    common.checkpoint(give)

    lab.add(names, verb)
    return parser
