"""The verb `recjax bench`: its options, and what they run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from recjax.cli import common
from recjax.cli.verbs import cache_settings, served, write_result
from recjax.errors import ConfigError
from recjax.utils.paths import expanded


def add(names: Any) -> None:
    """Adds the verb to these subparsers."""
    options = common.verb(
        names,
        "bench",
        bench,
        "measure the training step and its parts, alone or against another library",
        "bench bench_kaggle16 --against torchrec",
    )
    options.add_argument("preset", help=f"{common.PRESET}; with --serve an export or a run folder")
    options.set_defaults(tunables=True)
    common.overrides(options)
    options.add_argument(
        "--against",
        choices=("torchrec", "torch"),
        help="also measure, by turns, the same model in PyTorch: with TorchRec's FBGEMM kernels or plain",
    )
    options.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="number of rounds, whose median counts (default: 10)"
    )
    options.add_argument(
        "--steps", type=int, default=20, metavar="N", help="number of timed steps in a round (default: 20)"
    )
    options.add_argument(
        "--peer-python", metavar="PATH", help="Python interpreter that has the library of --against (default: this one)"
    )
    options.add_argument(
        "--profile", type=expanded, metavar="DIR", help="also keep the profiler's traces in this folder"
    )

    options.add_argument(
        "--products",
        type=expanded,
        metavar="FILE",
        help="measure instead which of the kernels, XLA and oneDNN is fastest at each dense layer, and write the "
        "table for train.products to FILE (CPU)",
    )
    options.add_argument(
        "--host",
        action="store_true",
        help="measure instead what a training costs the host: CPU time a batch of the thread that trains and of all, "
        "with devices that have nothing to do",
    )
    options.add_argument(
        "--serve",
        action="store_true",
        help="measure instead the answers of a service, under load that comes at random times: see --qps, "
        "--candidates, --seconds, --http",
    )
    options.add_argument(
        "--qps",
        type=common.numbers(float),
        default=[20, 50, 100],
        metavar="A,B",
        help="requests a second (default: 20,50,100)",
    )
    options.add_argument(
        "--candidates",
        type=common.numbers(int),
        default=[1, 64, 512],
        metavar="A,B",
        help="candidates in each request (default: 1,64,512)",
    )
    options.add_argument(
        "--seconds", type=float, default=10, metavar="S", help="length of each measurement in seconds (default: 10)"
    )
    options.add_argument(
        "--http", action="store_true", help="also measure over HTTP, to a server in a process of its own"
    )
    common.caches(options)
    common.trusting(options, "the copy of your own model's code in the run folder of --serve")


def bench(options: argparse.Namespace) -> None:
    """Measures the step, or a service."""
    if options.serve:
        bench_serve(options)
        return
    if options.products:
        bench_products(options)
        return
    if options.host:
        bench_host(options)
        return
    from recjax.config import presets
    from recjax.lab.bench import report
    from recjax.lab.bench.run import Options, bench

    config = presets.load(options.preset, options.overrides)
    how = Options(options.against, options.rounds, options.steps, options.peer_python, options.profile)
    result = bench(config, how)
    write_result(options, result, lambda: report.to_text(result))


def bench_host(options: argparse.Namespace) -> None:
    """Measures the host alone."""
    from recjax.config import presets
    from recjax.lab.bench.timing import host_in_words, measure_host

    if options.against or options.profile:
        raise ConfigError("--host measures a training without its steps: leave out --against and --profile, or it.")
    result = measure_host(presets.load(options.preset, options.overrides), options.rounds, options.steps)
    write_result(options, result, lambda: host_in_words(result))


def bench_products(options: argparse.Namespace) -> None:
    """Measures the products of dense layers."""
    from recjax.config import presets
    from recjax.lab.bench import products
    from recjax.lab.bench.timing import wait_for_each

    if options.against or options.profile:
        raise ConfigError("--products measures layers alone: leave out --against and --profile, or it.")
    if options.products.is_dir() or not options.products.absolute().parent.is_dir():
        raise ConfigError(f"--products {options.products} cannot be written: name a file in a folder that exists.")
    wait_for_each()
    config = presets.load(options.preset, options.overrides)
    result = products.measure(config, options.rounds, options.products)
    write_result(options, result, lambda: products.to_text(result))


def bench_serve(options: argparse.Namespace) -> None:
    """Measures how long a service takes to answer."""
    import tempfile

    from recjax.lab.bench import load
    from recjax.lab.bench.machine_load import Others
    from recjax.serving import server
    from recjax.serving.service import ServiceConfig

    server.require()
    if options.overrides:
        raise ConfigError(f"{options.overrides[0]}: bench --serve takes no settings, but an export or a run folder.")
    how = load.LoadConfig(options.qps, options.candidates, options.seconds, options.http)
    config = ServiceConfig(max(512, *options.candidates), **cache_settings(options))
    with tempfile.TemporaryDirectory(prefix="recjax-serve-") as folder:
        export = served(expanded(options.preset), Path(folder) / "exported", trust_code=options.trust_code)
        others = Others([])
        lines = load.measure(export, how, config)
        result = {"serve": lines, "seconds": how.seconds, "queue": config.queue, "others_share": others.share()}
    write_result(options, result, lambda: load.to_text(result))
