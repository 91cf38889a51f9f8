"""`recjax study NAME ...`: options and what they run. Light to import; the work is elsewhere."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from recjax.errors import ConfigError
from recjax.utils import log
from recjax.utils.paths import expanded, out_folder

if TYPE_CHECKING:
    from recjax.lab.studies.report import Report

Print = Callable[[argparse.Namespace, Any, Callable[[], str]], None]
Say = Callable[[str], None]
Done = tuple[Mapping[str, Any], Callable[[dict[str, Any]], "Report"]]  # figures, and a report of them, by its `about`
_PRESET = "movietweetings"
_OUT = "folder of the report: the same command goes on with what is left of the study"


def add(
    verbs: Any,
    verb: Callable[..., argparse.ArgumentParser],
    overrides: Callable[..., None],
    preset: str,
    show: Print,
) -> None:
    """Adds the verb.

    Args:
      verbs: the subparsers to add to.
      verb: makes a parser: (of, name, run, what it does, example).
      overrides: adds the settings of a config to a parser.
      preset: the help of a preset's name.
      show: prints a result: (options, object for --json, text).
    """
    study = verbs.add_parser(
        "study",
        help="reproduce a published study: trainings, measures, figures",
        epilog="example: recjax study tiers --out studies/tiers",
    )
    actions = study.add_subparsers(title="studies", metavar="NAME", required=True)

    def new(
        name: str, run: Callable[[argparse.Namespace, Say], Done], what: str, example: str, out: str = _OUT
    ) -> argparse.ArgumentParser:
        made = verb(actions, name, functools.partial(_run, run, name, show), what, f"study {name} {example}")
        made.add_argument("--out", type=out_folder, required=True, metavar="DIR", help=out)
        made.set_defaults(tunables=True)
        return made

    one = verb(
        actions,
        "replicas",
        lambda o: _replicas(o, show),
        "replica groups with tables of their own, after the distributed DLRM of UW-Madison",
        "study replicas movietweetings --out studies/replicas",
    )
    one.add_argument(
        "preset",
        nargs="?",
        default="",
        help=f"{preset} (default: {_PRESET}, or yelp with --data); train.batch_size is that of two groups, "
        "mesh.devices those of four",
    )
    overrides(one)
    one.add_argument(
        "--out",
        type=out_folder,
        required=True,
        metavar="DIR",
        help="folder of the report, its pictures and replicas.json: the same command goes on with what is left",
    )
    one.add_argument(
        "--data",
        type=expanded,
        metavar="DIR",
        help="folder of Yelp's files, which are then prepared and studied twice: with a row for each business, as the "
        "source has it, and with a row for each review, of what was known before it",
    )
    one.add_argument(
        "--full",
        action="store_true",
        help="run the whole study: 6,000 iterations a training, measured every 200, three seeds of all, 2,000 timed "
        "one by one: hours",
    )
    one.add_argument("--iterations", type=int, metavar="N", help="iterations of each training (default: 300, or 6,000)")
    one.add_argument("--every", type=int, metavar="N", help="iterations between measures (default: 50, or 200)")
    one.add_argument("--seeds", type=int, metavar="N", help="trainings of each kind (default: 3)")
    one.add_argument(
        "--timed",
        type=int,
        metavar="N",
        help="iterations of a profile, over which the times of parts are averaged; 0 leaves out all times (default: "
        "20, or 100)",
    )
    one.add_argument("--series", type=int, metavar="N", help="iterations timed one by one (default: 100, or 2,000)")
    add_hoti2020(actions, verb, show, "study")
    seen = new(
        "foresight",
        _foresight,
        "measure how far predictions are off, and whether plans are ranked right",
        "--out studies/foresight",
        "folder of the campaign: the same command goes on with what is left of it",
    )
    seen.add_argument(
        "--full",
        action="store_true",
        help="run the whole campaign: 60 random models on one device, 30 on more, 20 plans of 5 workloads on 2 and 8 "
        "devices, ten times seven changes: hours, which should be quiet ones",
    )
    seen.add_argument(
        "--machine",
        default="",
        metavar="FILE",
        help="machine file to predict on (default: this machine, measured first)",
    )
    seen.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="stop after this many minutes; 0: when all is done (default: 10, with --full 0)",
    )
    seen.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random models (default: 0)")
    seen.add_argument("--no-published", action="store_true", help="leave out model A on 128 V100")
    chu = new(
        "communication",
        _communication,
        "communication by size, placement, buckets and precision, after Chu et al. (Meta)",
        "--out studies/communication",
    )
    chu.add_argument(
        "--full",
        action="store_true",
        help="compile model A whole, 793 billion parameters, in 3 GB of memory: a minute or less for each of 9 cases "
        "(default: every 8th table)",
    )
    chu.add_argument(
        "--ranks",
        type=int,
        default=128,
        metavar="N",
        help="number of ranks to compile for (default: 128, as in the paper)",
    )
    chu.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="number of devices to measure on; 0: nothing is measured (default: all that the machine has, its cores "
        "if it has no accelerator)",
    )
    chu.add_argument(
        "--trace",
        type=expanded,
        metavar="DIR",
        help="a trace of GPUs whose times stand beside, such as PARAM's of DLRM on 8 V100 "
        "(et_replay/tests/inputs/dlrm_pytorch_et.tar.gz in facebookresearch/param)",
    )
    chu.add_argument(
        "--kineto",
        type=expanded,
        metavar="DIR",
        help="folder of the files that PyTorch's profiler wrote of that trace (dlrm_kineto.tar.gz there)",
    )
    hot = new(
        "hot_rows",
        _hot_rows,
        "copies of the rows in most batches, after P2RES",
        "bench_kaggle16 data.max_rows=100000 --out studies/hot_rows",
    )
    hot.add_argument("preset", help=preset)
    overrides(hot)
    hot.add_argument(
        "--rows",
        default="",
        metavar="K,...",
        help="numbers of hot rows (default: 1000,4000,16000; with --choice 64, 256, 1024, ... 131072)",
    )
    hot.add_argument("--devices", default="2,8", metavar="N,...", help="numbers of devices (default: 2,8)")
    hot.add_argument(
        "--hosts",
        default="2",
        metavar="H,...",
        help="numbers of hosts over which the devices are spread to count copies on hosts; 0: none are counted "
        "(default: 2)",
    )
    hot.add_argument(
        "--batches", type=int, default=100, metavar="N", help="number of batches whose ids are counted (default: 100)"
    )
    hot.add_argument(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="number of turns of each way to hold the tables; 0 leaves out the times (default: 5)",
    )
    hot.add_argument("--steps", type=int, default=4, metavar="N", help="number of steps of a turn (default: 4)")
    hot.add_argument(
        "--choice",
        default="",
        metavar="FILE",
        help="measure instead, for this machine file, steps with numbers of hot rows and with the number that auto "
        "chooses by it",
    )
    disk = new(
        "sdm",
        _sdm,
        "inference from disk: caches of rows and of pooled bags",
        "--out studies/sdm",
        "folder for the report; its exports, of some 200 MB, are kept there",
    )
    disk.add_argument(
        "--rows", type=int, default=200_000, metavar="N", help="rows of each table on disk (default: 200000)"
    )
    disk.add_argument("--tables", type=int, default=8, metavar="N", help="number of tables on disk (default: 8)")
    disk.add_argument(
        "--shares",
        default="0.02,0.05,0.1,0.2",
        metavar="X,...",
        help="sizes of the cache, as shares of the rows (default: 0.02,0.05,0.1,0.2)",
    )
    disk.add_argument(
        "--seconds", type=float, default=4, metavar="S", help="length of each measurement in seconds (default: 4)"
    )
    tiers = new("tiers", _tiers, "tables larger than memory: hits, steps, nodes, after MTrainS", "--out studies/tiers")
    tiers.add_argument(
        "--full", action="store_true", help="run larger tables, more sizes and more rounds: an hour or so"
    )
    tiers.add_argument(
        "--disk", default="", metavar="DIR", help="also measure steps with half of the rows in a file in this folder"
    )
    tiers.add_argument("--no-times", action="store_true", help="leave out everything that has to be measured")


def add_hoti2020(actions: Any, verb: Callable[..., argparse.ArgumentParser], show: Print, of: str) -> None:
    """Adds the study of Rashidi et al. to the actions of a verb.

    Args:
      actions: the subparsers to add to.
      verb: as for `add`.
      show: likewise.
      of: the verb's name, "study" or "simulate".
    """
    run = functools.partial(_run, _hoti2020, "hoti2020", show)
    made = verb(
        actions,
        "hoti2020",
        run,
        "reproduce the study of Rashidi et al. (HOTI 2020)",
        f"{of} hoti2020 --experiments systems --ranks 16 --chunks 2 --out hoti2020",
    )
    made.add_argument(
        "--ranks", type=int, default=128, metavar="N", help="number of GPUs, 8 a node (default: 128, as in the paper)"
    )
    made.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        help="number of chunks that collectives are cut into, where it is not what varies; at most 128 in "
        "hierarchical systems (default: 32, with --full 1024)",
    )
    made.add_argument(
        "--full", action="store_true", help="cut collectives into as many chunks as in the study: hours without kernels"
    )
    made.add_argument(
        "--experiments",
        metavar="NAME,...",
        help="experiments to do, any of systems, flops, in_flight, chunk_counts, copies, lone_all_reduce, transport, "
        "gradients (default: all)",
    )
    made.add_argument("--out", type=out_folder, required=True, metavar="DIR", help=_OUT)


def _run(study: Callable[[argparse.Namespace, Say], Done], name: str, show: Print, options: argparse.Namespace) -> None:
    """Does a study, writes its report and all its figures, and shows them."""
    from recjax.lab.studies.report import provenance, to_json, to_text, write

    began = time.monotonic()
    result, report = study(options, functools.partial(log.info, f"{name}:"))
    made = report(provenance(began))
    files = write(made, result, options.out)
    shown = {**result, "report": to_json(made)}
    show(options, shown, lambda: f"{to_text(made)}\n\nin {options.out}: {', '.join(files)}")


def _replicas(options: argparse.Namespace, show: Print) -> None:
    import dataclasses

    from recjax.config import presets
    from recjax.lab.studies import report
    from recjax.lab.studies.replica_groups import study as replicas

    names = ("iterations", "every", "seeds", "timed", "series")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    how = replicas.checked(dataclasses.replace(replicas.FULL if options.full else replicas.SMALL, **given))
    preset, overrides = options.preset, list(options.overrides)
    if "=" in preset:  # it is an override, and the preset was left out
        preset, overrides = "", [preset, *overrides]
    if options.data is None:
        result, made = replicas.study(presets.load(preset or _PRESET, overrides), options.out, how)
        show(options, result, lambda: f"{report.to_text(made)}\n\nin {options.out}: {', '.join(result['files'])}")
        return
    found = replicas.on_yelp(presets.load(preset or "yelp", overrides), options.data, options.out, how)
    texts = [
        f"{report.to_text(made)}\n\nin {options.out / per}: {', '.join(of['files'])}"
        for per, (of, made) in found.items()
    ]
    show(options, {per: of for per, (of, _) in found.items()}, lambda: "\n\n".join(texts))


def _hot_rows(options: argparse.Namespace, say: Say) -> Done:
    from recjax.config import presets
    from recjax.lab.studies.hot_rows import draw, findings, study, sweep

    def numbers(name: str) -> tuple[int, ...]:
        text = getattr(options, name)
        if not all(word.strip().isdigit() for word in text.split(",")):
            raise ConfigError(f"--{name} {text}: give numbers with commas between them, as in 2,8.")
        return tuple(int(word) for word in text.split(","))

    options.rows = options.rows or ("64,256,1024,4096,16384,65536,131072" if options.choice else "1000,4000,16000")
    hosts = () if options.hosts == "0" else numbers("hosts")
    how = study.Options(numbers("rows"), numbers("devices"), options.batches, options.rounds, options.steps, hosts)
    if options.choice:
        if not how.rounds:
            raise ConfigError("--choice compares times: give at least one round (--rounds).")
        config = presets.load(options.preset, [*options.overrides, f"embedding.hot.batches={how.batches}"])
        swept = sweep.sweep(config, how, options.choice, options.out, say)
        return swept, lambda about: sweep.report(swept, about | swept["about"])
    result = study.study(presets.load(options.preset, options.overrides), how, options.out, say)
    return result, lambda about: findings.report(result, about | result["about"], draw.pictures(result))


def _communication(options: argparse.Namespace, say: Say) -> Done:
    from recjax.lab.studies.communication import study

    if options.ranks < 2 or (options.devices is not None and options.devices < 0):
        raise ConfigError(
            f"--ranks is {options.ranks} and --devices {options.devices}; give at least 2 and at least 0."
        )
    if options.kineto and not options.trace:
        raise ConfigError("--kineto has the times of an execution trace: give its folder, too (--trace DIR).")
    return study.study(options.out, options.full, options.ranks, options.devices, say, options.trace, options.kineto)


def _hoti2020(options: argparse.Namespace, say: Say) -> Done:
    from recjax.lab.studies.hoti2020 import observed, study
    from recjax.lab.studies.hoti2020.draw import pictures

    names = options.experiments.split(",") if options.experiments else tuple(study.EXPERIMENTS)
    chunks = options.chunks or (1024 if options.full else 32)
    found = study.run(options.out, options.ranks, chunks, options.full, names, say)
    return found, lambda about: observed.report(found, about, pictures(found))


def _foresight(options: argparse.Namespace, say: Say) -> Done:
    from recjax.lab.studies.foresight import findings, study

    minutes = options.minutes if options.minutes is not None else 0.0 if options.full else 10.0
    if not 0 <= minutes < float("inf"):
        raise ConfigError(f"--minutes is {options.minutes}; give 0 or more.")
    size = study.FULL if options.full else study.SMALL
    with_published = not options.no_published
    result, pictures = study.study(options.out, size, options.machine, options.seed, minutes, with_published, say)
    return result, lambda about: findings.report(result, about, pictures)


def _sdm(options: argparse.Namespace, say: Say) -> Done:
    from recjax.lab.studies.sdm import findings, study
    from recjax.lab.studies.sdm.workload import Size

    try:
        shares = tuple(float(word) for word in options.shares.split(","))
    except ValueError:
        raise ConfigError(f"--shares {options.shares}: give shares with commas between them, as in 0.05,0.1.") from None
    how = study.Options(Size(tables=options.tables, rows=options.rows), shares, options.seconds)
    result = study.study(options.out, how, say)
    return result, functools.partial(findings.report, result)


def _tiers(options: argparse.Namespace, say: Say) -> Done:
    import dataclasses

    from recjax.lab.studies.tiers import findings, study

    how = dataclasses.replace(study.FULL if options.full else study.SMALL, disk=options.disk)
    if options.no_times:
        how = dataclasses.replace(how, rounds=0)
    result = study.study(options.out, how, say)
    return result, functools.partial(findings.report, result)
