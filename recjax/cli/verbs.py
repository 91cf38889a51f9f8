"""The verbs of the command line: each calls, and prints the result. Nothing heavy is imported before one runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recjax.errors import ConfigError, RecjaxError
from recjax.parallel import distributed
from recjax.settings import items
from recjax.utils import log


def train(options: argparse.Namespace) -> None:
    """Trains a preset, or resumes."""
    from recjax import main as runs
    from recjax.config import presets
    from recjax.train.run.summary import results

    if options.more is not None:
        _go_on(options)
        return
    if options.trust_code:
        raise ConfigError("--trust-code is for a run folder, which --more goes on with. A preset that you name is run.")
    preset = presets.load(options.preset)
    config = presets.override(preset, options.overrides)
    if replaced := presets.consequences(preset, config, options.overrides):
        distributed.note(f"what you set changes other settings too: {', '.join(replaced)}")
    out = options.out or presets.default_out(config)
    summary = runs.train(config, out)
    write_result(options, {"out": str(out), **summary}, lambda: f"{results(summary)}\n\ncurves: {out}/curves.png")


def _go_on(options: argparse.Namespace) -> None:
    """Goes on with a run on further data."""
    from recjax import main as runs
    from recjax.train.run import more
    from recjax.utils.paths import expanded

    if options.out is not None:
        raise ConfigError(
            f"--more goes on in the run folder itself, {options.preset}, so --out has no place. Leave it out; "
            "train.init_from=RUN starts another run from this one."
        )
    run = expanded(options.preset)
    summary = runs.train_further(run, options.more, options.overrides, trust_code=options.trust_code)
    write_result(options, {"out": str(run), **summary}, lambda: more.to_text(summary))


# Options that are settings of Details.
_DETAILS = (
    "top",
    "group",
    "ablate",
    "permutations",
    "calibration_bins",
    "calibration_by",
    "exact_rows",
    "topk",
    "exclude",
)


def evaluate(options: argparse.Namespace) -> None:
    """Evaluates a checkpoint."""
    from recjax import main as runs
    from recjax.train import evaluation

    chosen = {name: getattr(options, name) for name in _DETAILS if hasattr(options, name)}
    if "top" in chosen and not options.by:
        raise ConfigError(
            f"--top {chosen['top']} is the number of values that --by measures one by one, and there is no --by. Items "
            f"are ranked, and the best {chosen['top']} of each user measured, with --topk {chosen['top']}."
        )
    details = evaluation.Details(by=tuple(options.by), **chosen)
    splits = tuple(dict.fromkeys(options.split or ["test"]))
    folder, trust = options.run_folder, options.trust_code
    result = runs.evaluate(
        folder, options.overrides, splits, options.step, details, rows=options.input, trust_code=trust
    )
    write_result(options, result, lambda: evaluation.to_text(result))


def predict(options: argparse.Namespace) -> None:
    """Scores rows, or ranks items for users."""
    from recjax.serving.predict import predict

    if options.topk is not None:
        _rank(options)
        return
    if options.input is None or hasattr(options, "exclude"):
        raise ConfigError(
            "predict scores the rows of a file: give --input FILE, without --exclude. To rank all items for each user "
            "instead give --topk K."
        )
    how = (options.overrides, options.split, options.step, options.columns, options.overwrite)
    result = predict(options.run_folder, options.input, options.out, *how, trust_code=options.trust_code)
    skipped = f", {result['skipped']:,} left out" if result["skipped"] else ""
    write_result(
        options,
        result,
        lambda: f"{result['rows']:,} rows scored by the checkpoint of step {result['step']}{skipped}: {result['out']}",
    )


def _rank(options: argparse.Namespace) -> None:
    """Writes the best items of users."""
    from recjax.serving.candidates import predict_top_k

    if options.columns or options.split != "test":
        raise ConfigError("--topk writes users and items, so --columns and --split have no place. Leave them out.")
    result = predict_top_k(
        options.run_folder,
        options.out,
        options.topk,
        options.overrides,
        input=options.input,
        exclude=getattr(options, "exclude", None),
        step=options.step,
        overwrite=options.overwrite,
        trust_code=options.trust_code,
    )
    write_result(
        options,
        result,
        lambda: (
            f"the best {options.topk} of {result['items']:,} items for {result['users']:,} users, by the checkpoint of "
            f"step {result['step']}: {result['out']}"
        ),
    )


def export(options: argparse.Namespace) -> None:
    """Writes a model that runs without recjax."""
    from recjax.serving.export import export

    user, disk = items.names(options.user), items.names(options.disk)
    platforms = options.platforms.split(",")
    how = (options.overrides, options.step, options.quantize, platforms, options.format, user, disk)
    made = export(options.run_folder, options.out, *how, trust_code=options.trust_code)
    write_result(
        options,
        made,
        lambda: (
            f"step {made['step']} in {made['out']}: {made['tables']} tables of {made['table_bytes']:,} bytes; "
            f"python {made['out']}/loader.py {made['out']} checks it and says what it takes"
        ),
    )


def serve(options: argparse.Namespace) -> None:
    """Answers requests until it is asked to end."""
    import tempfile

    from recjax.serving import server
    from recjax.serving.service import ServiceConfig

    server.require()
    if options.pooled_mib and not (options.folder / "manifest.json").exists():
        raise ConfigError(
            "--pooled-mib: a run folder is served with its tables in memory. Export it with --disk, and serve that."
        )
    config = ServiceConfig(
        options.most_candidates, options.queue, options.connections, options.window_ms, **cache_settings(options)
    )
    listener = server.listening(options.host, options.port)

    def ready(url: str) -> None:
        asked = f"curl {url}/score --json {shlex.quote(json.dumps(example))}"
        text = f"serving {options.folder} at {url}; for example\n\n{asked}\n"
        write_result(options, {"url": url, "example": example, **service.about}, lambda: text)
        sys.stdout.flush()

    with listener, tempfile.TemporaryDirectory(prefix="recjax-serve-") as folder:
        how = (options.step, options.quantize, options.user)
        export = served(options.folder, Path(folder) / "exported", *how, trust_code=options.trust_code)
        service, example = server.opened(export, config)
        server.serve(service, listener, ready)


def cache_settings(options: argparse.Namespace) -> dict[str, int]:
    """Settings of a service for tables on disk."""
    for name, least in (("cache_mib", 2**-20), ("pooled_mib", 0)):
        if not least <= getattr(options, name) < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name):g}; give a number of MiB.")
    return {"cache_bytes": int(options.cache_mib * 2**20), "pooled_bytes": int(options.pooled_mib * 2**20)}


def served(
    folder: Path, out: Path, step: Any = None, quantize: Any = None, user: str = "", *, trust_code: bool = False
) -> Path:
    """The export that is meant: the folder itself, or one that is made of a run folder in `out`."""
    from recjax.serving.export import export

    users = items.names(user)
    if (folder / "manifest.json").exists():
        if quantize or users or step is not None:
            raise ConfigError(
                f"{folder} is an export already: --quantize, --user and --step are for run folders. Leave them out, or "
                "export the run once more."
            )
        return folder
    if (folder / "config.json").exists():  # else the next line says what it is
        log.info(f"{folder} is a run folder: exporting its model first")
    made = export(folder, out, (), step, quantize or "none", ("cpu", "cuda", "tpu"), user=users, trust_code=trust_code)
    return Path(made["out"])


def show(options: argparse.Namespace) -> None:
    """Prints a config."""
    from recjax import settings
    from recjax.config import presets
    from recjax.data.synthetic.clicks import Synthetic
    from recjax.settings.values import written
    from recjax.train.table_specs import specs

    default = presets.load(options.preset)
    config = presets.override(default, options.overrides)
    changed = {key: then for key, then, _ in settings.diff(default, config)}

    named = sorted({*config.embedding.tables, *config.embedding.features})
    if isinstance(config.data, Synthetic):  # whose tables are known without reading anything
        specs(config, config.data.open().schema)
        named = []

    def text() -> str:
        lines = []
        if named:
            log.info(f"whether the data have {', '.join(named)} is known once they are read")
        for key, value in settings.flatten(config).items():
            note = f"   (preset: {written(changed[key])})" if key in changed else ""
            lines.append(f"{key}={written(value)}{note}")
        lines += ["", f"for single names: {', '.join(settings.named_keys(config))}"]
        return "\n".join([*lines, f"run folder, unless --out names one: {presets.default_out(config)}"])

    write_result(options, json.loads(settings.to_json(config)), text)


def preflight(options: argparse.Namespace) -> None:
    """Compares the processes."""
    from recjax.config import presets
    from recjax.train.preflight import preflight, to_text

    result = preflight(presets.load(options.preset, options.overrides), options.out)
    write_result(options, result, lambda: to_text(result))


def sweep(options: argparse.Namespace) -> None:
    """Trains the runs of a sweep."""
    from recjax.config import preset_files
    from recjax.sweep import report, run
    from recjax.sweep.file import RUNS, read_sweep
    from recjax.utils.files import write_whole

    most = RUNS if options.runs_at_most is None else options.runs_at_most
    sweep = read_sweep(preset_files.find_sweep(options.file), options.out, most, trust_code=options.trust_code)
    if options.dry_run:
        lines = [{"index": r.index, "swept": r.swept, "command": r.command, "out": str(r.out)} for r in sweep.runs]
        write_result(options, {"out": str(sweep.out), "runs": lines}, lambda: "\n".join(r.command for r in sweep.runs))
        return
    runs, results_file = sweep.runs, sweep.out / "results.jsonl"
    if options.index is not None:
        if not 0 <= options.index < len(runs):
            raise ConfigError(f"--index {options.index}: {sweep.file} has the runs 0 to {len(runs) - 1}.")
        results = run.train_all(runs[options.index : options.index + 1])
    elif options.results:
        results = [run.result(r) for r in runs]
    else:
        results = run.train_all(runs, results_file)
    result: dict[str, Any] = {"out": str(sweep.out), "runs": report.ordered(sweep, results)}
    text = report.table(sweep, results)
    if seeds := report.over_seeds(sweep, results):
        result["over_seeds"] = seeds
        text += f"\n\n{report.seeds_table(sweep, seeds)}"
    if options.index is None and sweep.out.is_dir():  # tasks that share the folder leave these files to --results
        write_whole(results_file, run.results_text(results))
        if report.draw(sweep, results, sweep.out / "sweep.png"):
            text += f"\n\npicture: {sweep.out}/sweep.png"
    write_result(options, result, lambda: text)
    if failed := [str(r["index"]) for r in results if r["status"] == "failed"]:
        raise RecjaxError(
            f"{len(failed)} of {len(results)} runs failed: {', '.join(failed)}. `recjax sweep FILE --dry-run` prints "
            "their lines, counted from 0; what each said stands above. The same command tries them again, and skips "
            "those that are done."
        )


def tune(options: argparse.Namespace) -> None:
    """Searches for good settings."""
    from recjax.config import preset_files
    from recjax.sweep import report, run
    from recjax.sweep.file import Sweep
    from recjax.sweep.search_file import read_search
    from recjax.sweep.tune import Study
    from recjax.utils.files import write_whole

    file = preset_files.find_sweep(options.file)
    search = read_search(file, options.out, options.trials, trust_code=options.trust_code)
    study = Study(search)
    if not options.results:
        study.work()
    results = study.results()
    write_whole(search.out / "results.jsonl", run.results_text(results))
    found = Sweep(search.file, search.out, search.axes, search.sort, ())
    ordered = report.ordered(found, results)
    best = next((row for row in ordered if row["status"] == "done"), None)
    result = {"out": str(search.out), "best": best, "runs": ordered}
    text = report.table(found, results)
    if best is not None:
        text += (
            f"\n\nbest: trial {best['index']}, {search.sort} {report.measure(best, search.sort):.4f}\n{best['command']}"
        )
    write_result(options, result, lambda: text)


def prepare(options: argparse.Namespace) -> None:
    """Prepares raw files."""
    from recjax import settings
    from recjax.config import preset_files, presets
    from recjax.data import catalog

    preset = None
    if options.dataset not in catalog.DATASETS:
        with contextlib.suppress(ConfigError):  # then it is no dataset either
            preset = preset_files.find_preset(options.dataset)
    if preset:
        data = presets.load(options.dataset, options.overrides).data
    else:
        data = settings.override(catalog.default(options.dataset), options.overrides)
    made = catalog.prepare(data, options.source, options.out, overwrite=options.overwrite, beam=options.beam)
    write_result(options, made, lambda: f"prepared {options.dataset} in {options.out}")


def info(options: argparse.Namespace) -> None:
    """Describes data."""
    from recjax.data import catalog, presence, statistics

    source = catalog.open_verified(options.dataset, options.overrides)
    if not options.presence:
        described = statistics.describe(source)
        write_result(options, described, lambda: statistics.to_text(described))
        return
    counted = presence.presence_of(source, options.batches, options.batch_size, options.seed, not options.in_order)
    found = presence.describe(counted)
    write_result(options, found, lambda: presence.to_text(found))


def import_weights(options: argparse.Namespace) -> None:
    """Takes another library's weights."""
    from recjax.config import presets
    from recjax.interop import weights

    config = presets.load(options.preset, options.overrides)
    made = weights.import_weights(options.file, config, options.out)
    write_result(
        options, made, lambda: f"{made['format']} weights, {made['values']:,} values, are step 0 of {options.out}"
    )


def export_weights(options: argparse.Namespace) -> None:
    """Writes weights for another library."""
    from recjax.interop import weights

    of_run = options.run_folder, options.format, options.out, options.overrides, options.step
    made = weights.export_weights(*of_run, trust_code=options.trust_code)
    write_result(options, made, lambda: f"wrote {made['values']:,} values of step {made['step']} to {options.out}")


def write_result(options: argparse.Namespace, result: Any, text: Callable[[], str]) -> None:
    """Prints a result as text or, with --json, as one object; of several processes the first prints."""
    from recjax.utils.files import jsonable

    if not distributed.is_main():
        return
    print(json.dumps(jsonable(result), allow_nan=False) if options.json else text())
