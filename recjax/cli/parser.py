"""The verbs of the command line, with their options and what each calls."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from recjax import __version__
from recjax.cli import planning, usage, verbs
from recjax.simulate import command as simulation
from recjax.studies import command as studies
from recjax.tracing import verbs as tracing
from recjax.tracing.workload import read_workload
from recjax.utils.paths import expanded, out_folder

STATUS = (
    "exit status: 0 done, 2 bad usage or config, 3 bad data, 4 lost a peer or the device, 130 Ctrl-C, 143 SIGTERM "
    "(train: both after a checkpoint), 1 anything else"
)
_INTERRUPTED = "stopped by Ctrl-C, without a result."  # unless a verb says otherwise


def _step(text: str) -> int | str:
    """The value of --step."""
    if text != "newest" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor `newest`")
    return text if text == "newest" else int(text)


def _numbers(kind: type) -> Callable[[str], list[Any]]:
    """The values of an option with commas between them."""

    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers with commas between them") from None

    return parse


def _caches(verb: argparse.ArgumentParser) -> None:
    """Adds the options of what serves tables on disk."""
    verb.add_argument(
        "--cache-mib",
        type=float,
        default=64,
        metavar="MIB",
        help="of memory for the rows of each table that stays on disk (default: 64)",
    )
    verb.add_argument(
        "--pooled-mib",
        type=float,
        default=0,
        metavar="MIB",
        help="of memory for the pooled bags of each such table, which then are neither read nor summed again; scores "
        "change by rounding (default: 0, none)",
    )


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line: what it gives has the function to call as `run`."""
    parser = usage.Parser(
        prog="recjax",
        description="Trains deep learning recommendation models with embedding tables spread over devices.",
        epilog=f"example: recjax train movietweetings seed=1 --out runs/first\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"recjax {__version__}")
    names = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(of: Any, name: str, run: Callable[..., None], what: str, example: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = of.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=f"example: recjax {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--json", action="store_true", help="print the result as one JSON object")
        added.set_defaults(run=run, parser=added, interrupted=_INTERRUPTED)
        return added

    def overrides(to: argparse.ArgumentParser) -> None:
        # With a default argparse does not call them required.
        to.add_argument(
            "overrides", nargs="*", default=[], metavar="a.b=value", help="settings to change; see `recjax show`"
        )

    def trusting(to: argparse.ArgumentParser) -> None:
        to.add_argument(
            "--trust-code",
            action="store_true",
            help="if the file of a model of your own is gone or has changed, run the copy in DIR; only if you trust "
            "whoever made DIR",
        )

    def checkpoint(to: argparse.ArgumentParser) -> None:
        to.add_argument(
            "--step",
            type=_step,
            metavar="STEP",
            help="step of the checkpoint, or newest (default: the one that validation chose, or else the newest)",
        )

    preset = "name of a preset in configs/, or the path of one"
    train = verb(
        names,
        "train",
        verbs.train,
        "train a preset, or resume the run in --out",
        "train movietweetings train.batch_size=512 --out runs/first",
    )
    train.add_argument("preset", help=preset)
    overrides(train)
    train.add_argument(
        "--out",
        type=expanded,
        help="run folder (default: a folder in runs/ named after the config and the code of a model of your own)",
    )
    train.set_defaults(tunables=True, together=True, saves=True)  # several processes may run it together

    evaluate = verb(
        names,
        "eval",
        verbs.evaluate,
        "evaluate a checkpoint of a run",
        "eval runs/first mesh.devices=1 --split validation --split test --by genres",
    )
    evaluate.add_argument("run_folder", type=expanded, metavar="DIR", help="run folder")
    evaluate.set_defaults(tunables=True, together=True)
    overrides(evaluate)
    trusting(evaluate)

    def detail(name: str, help: str, **more: Any) -> None:  # without a value it is the default of evaluation.Details
        evaluate.add_argument(name, help=help, default=argparse.SUPPRESS, **more)

    evaluate.add_argument(
        "--split",
        action="append",
        choices=("train", "validation", "test"),
        help="may be given several times (default: test)",
    )
    checkpoint(evaluate)
    evaluate.add_argument(
        "--input",
        type=expanded,
        metavar="FILE",
        help="rows with labels, of a table of one's own, in place of the test split",
    )
    evaluate.add_argument(
        "--by",
        action="append",
        default=[],
        metavar="FEATURE",
        help="also the measures of each value of a feature; may be given several times",
    )
    detail("--top", "values of --by that stand alone, the most frequent ones (default: 20)", type=int, metavar="K")
    detail("--group", "also the AUC within each value of a feature, such as the user (gAUC)", metavar="FEATURE")
    detail("--calibration-bins", "points of the calibration curve (default: 20)", type=int, metavar="N")
    detail("--calibration-by", "bins of equal weight (default) or of equal width", choices=("quantile", "width"))
    detail(
        "--exact-rows",
        "samples up to which the AUC is exact; with more it comes from a histogram, with bounds (default: 10,000,000)",
        type=int,
        metavar="N",
    )

    predict = verb(
        names,
        "predict",
        verbs.predict,
        "write the scores of a file of rows",
        "predict runs/first --input rows.jsonl --out scores.csv --columns user,movie",
    )
    predict.add_argument("run_folder", type=expanded, metavar="DIR", help="run folder; needs nothing else")
    predict.set_defaults(tunables=True)
    predict.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="a.b=value",
        help="settings to change; on_error=skip leaves malformed rows out of the scores, counts them and names the "
        "first",
    )
    trusting(predict)
    predict.add_argument(
        "--input",
        type=expanded,
        required=True,
        metavar="FILE",
        help="raw rows: .jsonl (each raw column by name), the text of Criteo or Avazu, with or without labels, also "
        ".gz; of a table of one's own also Parquet, ORC, CSV or Arrow; or a folder of prepared data",
    )
    predict.add_argument(
        "--out",
        type=expanded,
        required=True,
        metavar="FILE",
        help=".csv or .jsonl: row (from 1), logit, probability, in the input's order; replaces a file of scores",
    )
    predict.add_argument(
        "--columns",
        default="",
        metavar="A,B",
        help="columns of the input that the scores carry, as they are there, or `all`",
    )
    predict.add_argument("--overwrite", action="store_true", help="replace --out also if it is no file of scores")
    predict.add_argument(
        "--split", default="test", choices=("train", "validation", "test"), help="of a folder (default: test)"
    )
    checkpoint(predict)

    export = verb(
        names,
        "export",
        verbs.export,
        "write a trained model as a folder that runs without recjax",
        "export runs/first --out exported --quantize int8",
    )
    export.add_argument("run_folder", type=expanded, metavar="DIR", help="run folder; needs nothing else")
    overrides(export)
    trusting(export)
    export.add_argument(
        "--out", type=expanded, required=True, metavar="DIR", help="folder to write; must not exist, or be empty"
    )
    export.add_argument(
        "--format",
        choices=("stablehlo", "onnx"),
        default="stablehlo",
        help="stablehlo is run by JAX (the default), onnx by onnxruntime",
    )
    export.add_argument(
        "--quantize",
        choices=("none", "bfloat16", "int8", "int4"),
        default="none",
        help="how rows of tables are written (default: none, as they are)",
    )
    export.add_argument(
        "--user",
        default="",
        metavar="A,B",
        help="features that all candidates of a request have in common: they are looked up once for all of them",
    )
    export.add_argument(
        "--disk",
        default="",
        metavar="A,B",
        help="tables that stay on disk (or `all`): a few rows of them are kept in memory, and each has a checksum",
    )
    export.add_argument(
        "--platforms", default="cpu,cuda,tpu", metavar="A,B", help="where StableHLO is to run (default: cpu,cuda,tpu)"
    )
    checkpoint(export)

    serve = verb(
        names,
        "serve",
        verbs.serve,
        "answer requests for scores over HTTP, by an export or a run",
        "serve exported --port 8000",
    )
    serve.add_argument("folder", type=expanded, metavar="DIR", help="what `recjax export` wrote, or a run folder")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="to listen on; 0.0.0.0 lets other machines in, and nothing asks who they are (default: 127.0.0.1)",
    )
    serve.add_argument("--port", type=int, default=8000, metavar="N", help="0: any that is free (default: 8000)")
    serve.add_argument(
        "--most-candidates",
        type=int,
        default=512,
        metavar="N",
        help="of a request, and that are scored at once (default: 512)",
    )
    serve.add_argument(
        "--queue",
        type=int,
        default=128,
        metavar="N",
        help="requests that may be under way; further ones are refused with status 503 (default: 128)",
    )
    serve.add_argument(
        "--window-ms",
        type=float,
        default=1.0,
        metavar="MS",
        help="time that a request waits for others that are under way, to be scored together (default: 1)",
    )
    _caches(serve)
    serve.add_argument(
        "--quantize", choices=("none", "bfloat16", "int8", "int4"), help="of a run folder: as for export"
    )
    serve.add_argument("--user", default="", metavar="A,B", help="of a run folder: as for export")
    serve.add_argument("--step", type=_step, metavar="STEP", help="of a run folder: as for export")
    serve.set_defaults(tunables=True)

    show = verb(names, "show", verbs.show, "print the resolved config", "show movietweetings model.top=128-64-1")
    show.add_argument("preset", help=preset)
    overrides(show)

    plan = verb(
        names,
        "plan",
        planning.plan,
        "print where every table goes, bytes per device, and why",
        "plan movietweetings mesh.devices=4 --save plan.json",
    )
    plan.add_argument("preset", help=preset)
    overrides(plan)
    plan.add_argument("--save", metavar="FILE", help="also write the plan as a file for plan=FILE")
    plan.add_argument(
        "--compile",
        action="store_true",
        help="also compile the step for mesh.devices, owned or not, and print the memory of a device and the bytes of "
        "every collective",
    )
    plan.add_argument("--memory-gib", type=float, metavar="GIB", help="with --compile: what a device has")
    plan.add_argument("--predict", action="store_true", help="also compile the step and predict how long it takes")
    plan.add_argument(
        "--devices",
        metavar="N,...",
        help="instead: samples/s, memory, exposed communication and cost on each of these numbers of devices of "
        "--machine, with its best plan",
    )
    plan.add_argument(
        "--tiers",
        action="store_true",
        help="also, with tier.device_bytes: rows on devices, in memory and on disk, hits, bytes a step, what is "
        "hidden, nodes",
    )
    plan.add_argument(
        "--step-ms",
        type=float,
        metavar="MS",
        help="with --tiers: of a step with all rows on the devices (default: predicted, with --machine)",
    )
    plan.add_argument("--samples-per-s", type=float, metavar="R", help="with --tiers: rate that nodes have to reach")
    plan.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="with --tiers: that train it, each with tier.dram_bytes of its own (default: 1)",
    )
    plan.add_argument("--price", type=float, metavar="P", help="with --devices: what a device costs in an hour")
    plan.add_argument(
        "--machine",
        metavar="FILE",
        help="with --predict, --devices or --tiers: what `recjax calibrate` wrote, or a machine that is shipped, such "
        "as h100 (default: planner.machine, or, but for --tiers, machine.json)",
    )
    plan.add_argument(
        "--target",
        choices=("", "h200", "v5e", "v6e"),
        default="",
        help="with --predict: compile for this, which need not be here (extra aot), instead of the device that is",
    )
    plan.add_argument("--measure", action="store_true", help="with --predict: also measure it here, as bench does")
    plan.add_argument(
        "--out",
        type=expanded,
        metavar="DIR",
        help="with --predict: also write prediction.json, prediction.png and trace.json (for ui.perfetto.dev) there; "
        "with --devices offers.json and offers.png; with planner.machine=FILE choice.json and choice.png",
    )
    plan.set_defaults(tunables=True)

    calibrate = verb(
        names,
        "calibrate",
        planning.calibrate,
        "measure what this machine can do, for plan --predict",
        "calibrate --out machine.json",
    )
    calibrate.add_argument("--out", type=expanded, required=True, metavar="FILE", help="machine file to write")
    calibrate.add_argument("--quick", action="store_true", help="few and small sizes, in a minute: to try it")
    calibrate.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="the most that collectives are measured over, beside 2 (default: all accelerators, or 8 host devices, 2 "
        "with --quick)",
    )
    calibrate.add_argument(
        "--platform", choices=("auto", "cpu", "gpu", "tpu"), default="auto", help="of the devices (default: auto)"
    )
    calibrate.add_argument(
        "--disk", default="", metavar="DIR", help="also measure the disk of this folder, for tier.disk"
    )
    calibrate.add_argument("--name", default="", metavar="NAME", help="of the machine (default: its processor's)")
    calibrate.set_defaults(tunables=True)

    bench = verb(
        names,
        "bench",
        verbs.bench,
        "measure the training step and its parts, or against another library",
        "bench bench_kaggle16 --against torchrec",
    )
    bench.add_argument("preset", help=f"{preset}; with --serve an export or a run folder")
    bench.set_defaults(tunables=True)
    overrides(bench)
    bench.add_argument(
        "--against",
        choices=("torchrec", "torch"),
        help="by turns the same model in PyTorch, with TorchRec's FBGEMM kernels or plain",
    )
    bench.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="rounds, of which the median counts (default: 10)"
    )
    bench.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps in a round (default: 20)")
    bench.add_argument("--peer-python", metavar="PATH", help="Python that has the peer (default: this one)")
    bench.add_argument("--profile", type=expanded, metavar="DIR", help="also keep the profiler's traces there")

    bench.add_argument(
        "--products",
        type=expanded,
        metavar="FILE",
        help="measure instead who is fastest at each dense layer, the kernels, XLA or oneDNN, into a table for "
        "train.products (CPU)",
    )
    bench.add_argument(
        "--serve",
        action="store_true",
        help="measure the answers of a service instead, under load that comes at random times: --qps, --candidates, "
        "--seconds, --http",
    )
    bench.add_argument("--qps", type=_numbers(float), default=[20, 50, 100], metavar="A,B", help="requests a second")
    bench.add_argument("--candidates", type=_numbers(int), default=[1, 64, 512], metavar="A,B", help="of a request")
    bench.add_argument("--seconds", type=float, default=10, metavar="S", help="of each measurement (default: 10)")
    bench.add_argument("--http", action="store_true", help="also over HTTP, to a server in a process of its own")
    _caches(bench)

    check = verb(
        names,
        "preflight",
        verbs.preflight,
        "check devices, mesh, versions, config and data of all processes",
        "preflight movietweetings mesh.devices=8 --out runs/first",
    )
    check.add_argument("preset", help=preset)
    overrides(check)
    check.add_argument("--out", type=expanded, help="run folder to be; all processes must see it")
    check.set_defaults(together=True, tunables=True)

    sweep = verb(
        names,
        "sweep",
        verbs.sweep,
        "train every run of a sweep file, skipping those that are done",
        "sweep size --dry-run",
    )
    sweep.add_argument("file", metavar="FILE", help="path of a TOML file, or the name of one in configs/sweeps/")
    sweep.add_argument(
        "--out", type=out_folder, help="folder of all its runs (default: runs/sweep-NAME, after the file)"
    )
    sweep.set_defaults(
        interrupted="stopped by Ctrl-C. Give the same command to go on: it skips the runs that are done."
    )
    which = sweep.add_mutually_exclusive_group()
    which.add_argument("--dry-run", action="store_true", help="print the line of every run, and do none")
    which.add_argument("--index", type=int, metavar="K", help="do run K alone, from 0 (in a job array, say)")
    which.add_argument("--results", action="store_true", help="only gather what is done: table, results.jsonl, picture")

    tune = verb(
        names,
        "tune",
        verbs.tune,
        "search for good settings, with Optuna; repeat to go on, also elsewhere",
        "tune search --trials 30",
    )
    tune.add_argument(
        "file", metavar="FILE", help="path of a TOML file with a [search], or the name of one in configs/sweeps/"
    )
    tune.add_argument(
        "--out",
        type=out_folder,
        help="folder of the study (default: runs/tune-NAME, after the file); several processes may share it",
    )
    tune.add_argument("--trials", type=int, metavar="N", help="in all, instead of what the file says")
    tune.add_argument("--results", action="store_true", help="only gather what is done: table, results.jsonl")
    tune.set_defaults(interrupted="stopped by Ctrl-C. Give the same command to go on.")

    studies.add(names, verb, overrides, verbs.write_result)
    data = names.add_parser(
        "data", help="prepare raw files, or describe data", epilog="example: recjax data info movietweetings"
    )
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)
    prepare = verb(
        actions,
        "prepare",
        verbs.prepare,
        "turn raw files into prepared blocks",
        "data prepare movietweetings --from raw/ --out prepared/ min_user_count=5",
    )
    prepare.add_argument("dataset", help="name of a dataset")
    prepare.add_argument(
        "--from",
        dest="source",
        help="folder of the raw files (default: shipped ones); of "
        "`table` a Parquet, ORC, CSV or Arrow file, a folder of them or a pattern",
    )
    prepare.add_argument("--out", required=True, help="folder to write; becomes data.path")
    prepare.add_argument("--overwrite", action="store_true", help="replace other prepared data in --out")
    prepare.add_argument(
        "--beam",
        metavar="FLAGS",
        help="prepare on many machines by Apache Beam (extra `beam`), with "
        'its pipeline options, such as --beam="--runner=DirectRunner"',
    )
    overrides(prepare)
    prepare.set_defaults(
        interrupted="stopped by Ctrl-C. Give the same command to go on from where it was.",
        tunables=True,
        compiles=False,
    )
    info = verb(actions, "info", verbs.info, "print sizes, skew and checksums of data", "data info movietweetings")
    info.add_argument("dataset", help="name of a dataset, or the folder of prepared data")
    info.add_argument(
        "--presence",
        action="store_true",
        help="in how many of a run's first batches each id is, and what share of the look-ups the most present ones "
        "take",
    )
    info.add_argument("--batches", type=int, default=100, metavar="N", help="that --presence counts (default: 100)")
    info.add_argument("--batch-size", type=int, default=4096, metavar="B", help="of each (default: 4096)")
    info.add_argument("--seed", type=int, default=0, help="of the order of the samples (default: 0)")
    info.add_argument("--in-order", action="store_true", help="take the samples in the order of the data instead")
    overrides(info)

    weights = names.add_parser(
        "weights",
        help="take weights from, or give them to, other libraries",
        epilog="example: recjax weights export runs/first --format facebook --out dlrm.npz",
    )
    ways = weights.add_subparsers(title="actions", metavar="ACTION", required=True)
    take = verb(
        ways,
        "import",
        verbs.import_weights,
        "make a run of weights of facebookresearch/dlrm or TorchRec",
        "weights import dlrm.npz synthetic model.bottom=64-16 --out runs/imported",
    )
    take.add_argument("file", type=expanded, metavar="FILE", help="its state dict as an .npz file")
    take.add_argument("preset", help=preset)
    overrides(take)
    take.add_argument("--out", type=expanded, required=True, help="run folder to make; eval and train go on from there")
    give = verb(
        ways,
        "export",
        verbs.export_weights,
        "write the weights of a run as another library's state dict",
        "weights export runs/first --format facebook --out dlrm.npz",
    )
    give.add_argument("run_folder", type=expanded, metavar="DIR", help="run folder")
    overrides(give)
    trusting(give)
    give.add_argument("--format", required=True, choices=("facebook", "torchrec"), help="whose state dict")
    give.add_argument("--out", type=expanded, required=True, metavar="FILE", help=".npz file to write")
    checkpoint(give)

    def shown(name: str, work: Callable[..., Any], *about: str) -> argparse.ArgumentParser:
        return verb(names, name, lambda o: verbs.write_result(o, *work(o)), *about)

    tracing.add(shown, overrides, preset)
    simulated = simulation.add(names, verb, verbs.write_result, read_workload)
    studies.add_hoti2020(simulated, verb, verbs.write_result, "simulate")  # by its older name
    return parser
