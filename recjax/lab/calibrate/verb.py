"""The verb `recjax calibrate`: its options, and what they run."""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from typing import Any

from recjax.cli import common
from recjax.cli.verbs import write_result
from recjax.errors import ConfigError, DeviceError
from recjax.utils import log
from recjax.utils.paths import expanded, located

_HOST_DEVICES = 8  # that a full calibration has: collectives and a step's start take other times with each device


def add(names: Any) -> None:
    """Adds the verb to these subparsers."""
    calibrates = common.verb(
        names,
        "calibrate",
        calibrate,
        "measure what this machine can do, for plan --predict",
        "calibrate --out machine.json",
    )
    calibrates.add_argument("--out", type=expanded, required=True, metavar="FILE", help="machine file to write")
    calibrates.add_argument("--quick", action="store_true", help="measure few and small sizes, in a minute, to try it")
    calibrates.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="largest number of devices that collectives are measured over; 2 is measured, too (default: all "
        "accelerators, or 8 host devices, 2 with --quick)",
    )
    calibrates.add_argument(
        "--platform",
        choices=("auto", "cpu", "gpu", "tpu"),
        default="auto",
        help="platform of the devices (default: auto)",
    )
    calibrates.add_argument(
        "--disk", default="", metavar="DIR", help="also measure the disk of this folder, for tier.disk"
    )
    calibrates.add_argument("--name", default="", metavar="NAME", help="name of the machine (default: its processor's)")
    calibrates.set_defaults(tunables=True)


def calibrate(options: argparse.Namespace) -> None:
    """Measures this machine."""
    import jax

    from recjax.lab.bench.machine_load import Others
    from recjax.lab.bench.timing import wait_for_each
    from recjax.lab.calibrate import calibrate as calibration
    from recjax.lab.calibrate import report
    from recjax.lab.predict.in_training import POSSIBLE, References
    from recjax.parallel.mesh import MeshConfig, make_mesh
    from recjax.planning.machine import write

    if options.out.is_dir() or not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {options.out} cannot be written: name a file in a folder that exists.")
    disk = _disk(options.disk)
    platform: Any = options.platform
    wait_for_each()
    try:
        if options.devices is None and jax.config.values["jax_num_cpu_devices"] < 1:
            with contextlib.suppress(RuntimeError):  # JAX has started: it keeps what it has
                jax.config.update("jax_num_cpu_devices", 2 if options.quick else _HOST_DEVICES)
        mesh = make_mesh(MeshConfig(devices=options.devices or 0, platform=platform))
    except DeviceError as error:  # which speaks of settings, and here there are options
        raise DeviceError(re.sub(r"mesh\.(platform|devices)=", r"--\1 ", str(error))) from error
    others = Others([])
    effort = calibration.QUICK if options.quick else calibration.FULL
    if POSSIBLE and mesh.devices.flat[0].platform == "cpu":
        log.info("some models are trained between the passes, too; compiling them makes the first one longer")
        with References(options.quick) as trainings:
            machine = calibration.calibrate(mesh, effort, log.info, options.name, trainings.round)
        machine = trainings.applied(machine)
    else:
        machine = calibration.calibrate(mesh, effort, log.info, options.name)
    machine = report.with_note(machine, others.share(), options.quick)
    write(machine, located(options.out))  # before the disk, which may fail
    if disk is not None:
        from recjax.lab.calibrate.rates import with_disk

        machine = with_disk(machine, disk)
        write(machine, located(options.out))
    write_result(
        options,
        {"out": str(options.out), **report.figures(machine)},
        lambda: f"{report.to_text(machine)}\n\nwrote {options.out}",
    )


def _disk(given: str) -> Path | None:
    """The folder of --disk, which is made if need be; None without."""
    if not given:
        return None
    from recjax.tiers.host_rows import folder_of

    try:
        return folder_of(given)
    except ConfigError as error:  # which speaks of the setting
        raise ConfigError(str(error).replace("tier.disk=", "--disk ")) from error
