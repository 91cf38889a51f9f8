"""The verb `plan`: where tables go, and how long a step will take."""

from __future__ import annotations

import argparse
from typing import Any

from recjax.cli import common, lab
from recjax.cli.verbs import write_result
from recjax.errors import ConfigError
from recjax.utils.files import replacing
from recjax.utils.paths import expanded, located


def add(names: Any) -> None:
    """Adds the verb to these subparsers."""
    plans = common.verb(
        names,
        "plan",
        plan,
        "print where every table goes, bytes per device, and why",
        "plan movietweetings mesh.devices=4 --save plan.json",
    )
    plans.add_argument("preset", help=common.PRESET)
    common.overrides(plans)
    plans.add_argument("--save", metavar="FILE", help="also write the plan to this file, for plan=FILE")
    plans.add_argument(
        "--compile",
        action="store_true",
        help="also compile the step for mesh.devices, owned or not, and print the memory of a device and the bytes of "
        "every collective",
    )
    plans.add_argument(
        "--memory-gib",
        type=float,
        metavar="GIB",
        help="with --compile: GiB of memory of a device, to compare with what the step needs",
    )
    plans.add_argument("--predict", action="store_true", help="also compile the step and predict how long it takes")
    plans.add_argument(
        "--devices",
        metavar="N,...",
        help="compare these numbers of devices of --machine, each with its best plan: samples/s, memory, exposed "
        "communication, cost",
    )
    plans.add_argument(
        "--tiers",
        action="store_true",
        help="predict how tiers behave under tier.device_bytes: rows on devices, in memory and on disk, hits, bytes a "
        "step, what is hidden, nodes",
    )
    plans.add_argument(
        "--step-ms",
        type=float,
        metavar="MS",
        help="with --tiers: time of a step with all rows on the devices (default: predicted, with --machine)",
    )
    plans.add_argument(
        "--samples-per-s", type=float, metavar="R", help="with --tiers: samples a second that nodes have to reach"
    )
    plans.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="with --tiers: number of training processes, each with its own tier.dram_bytes (default: 1)",
    )
    plans.add_argument("--price", type=float, metavar="P", help="with --devices: cost of a device per hour")
    plans.add_argument(
        "--machine",
        metavar="FILE",
        help="with --predict, --devices or --tiers: file that `recjax calibrate` wrote, or a shipped machine such as "
        "h100 (default: planner.machine; if that is empty machine.json, but none for --tiers)",
    )
    plans.add_argument(
        "--target",
        choices=("", "h200", "v5e", "v6e"),
        default="",
        help="with --predict: compile for this device, which need not be present (extra aot), instead of the one that "
        "is",
    )
    plans.add_argument(
        "--measure", action="store_true", help="with --predict: also measure the step here, as bench does"
    )
    plans.add_argument(
        "--out",
        type=expanded,
        metavar="DIR",
        help="with --predict: also write prediction.json, prediction.png and trace.json (for ui.perfetto.dev) to this "
        "folder; with --devices offers.json and offers.png; with planner.machine=FILE choice.json and choice.png",
    )
    plans.set_defaults(tunables=True)


def plan(options: argparse.Namespace) -> None:
    """Prints where tables go."""
    from recjax.config import presets
    from recjax.data.source import mean_ids
    from recjax.embedding.bind import bind
    from recjax.embedding.plan import is_file
    from recjax.embedding.plan_report import describe_plan, plan_table
    from recjax.planning.loads import describe_loads, loads_table
    from recjax.planning.resolve import workload
    from recjax.train import planned
    from recjax.train.table_specs import check_shared_values, specs
    from recjax.train.two_sided import open_data

    named = next((text for text in options.overrides if text.startswith("planner.machine=")), None)
    if options.predict and not options.machine and named is not None:
        raise ConfigError(
            f"{named} chooses where tables live; the machine whose step --predict predicts is --machine "
            f"{named.partition('=')[2]}: give that too, or instead."
        )
    if options.memory_gib is not None and not options.compile:
        raise ConfigError("--memory-gib is compared with what --compile finds: give both.")
    if options.measure and not options.predict:
        raise ConfigError("--measure belongs to --predict: give that too.")
    if options.machine and not (options.predict or options.devices or options.tiers):
        raise ConfigError(
            "--machine belongs to --predict, --devices or --tiers: give one of these too. With planner.machine=FILE "
            "plan=auto chooses by a machine."
        )
    for name in ("step_ms", "samples_per_s"):
        given = getattr(options, name)
        if given is not None and not (options.tiers and 0 < given < float("inf")):
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --tiers, and is above 0.")
    if options.processes != 1 and not (options.tiers and options.processes > 0):
        raise ConfigError("--processes belongs to --tiers, and is above 0.")
    if options.target and not options.predict:
        raise ConfigError("--target belongs to --predict: give that too.")
    if options.price is not None and not options.devices:
        raise ConfigError("--price belongs to --devices: give that too.")
    config = presets.load(options.preset, options.overrides)
    planned.require_asked(config)
    planner_asked = config.planner.machine
    if options.out and not (options.predict or options.devices or planner_asked):
        raise ConfigError("--out belongs to --predict, --devices or planner.machine=FILE: give one of these too.")
    if options.devices:
        if options.predict or options.compile or options.save or options.tiers:
            raise ConfigError(
                "--devices compares numbers of devices, and --predict, --compile, --tiers and --save are about one "
                "plan: leave it or them out, and set mesh.devices."
            )
        _offers(options, config)
        return
    source = open_data(config)
    config = config.for_rows(int(source.row_counts("train").sum()))
    check_shared_values(config, source)
    tables, features = specs(config, source.schema, mean_ids(source))
    judge = None
    if config.planner.compile:
        from recjax.parallel.mesh import make_mesh
        from recjax.train.build import judge as judge_of

        judge = judge_of(config, source, make_mesh(config.mesh))
    plan, chosen, hot = planned.plan_of(config, source, tables, features, config.mesh.shape, judge)
    if options.save:
        beside = is_file(config.plan) and located(config.plan).parent == located(options.save).parent
        saved = plan if beside else plan.without_files()  # whose paths are relative to the plan file
        try:
            with replacing(located(options.save)) as unfinished:
                unfinished.write_text(saved.to_json(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--save {options.save} cannot be written: {error.strerror}. Choose another path."
            ) from error
    replicas, hosts, each = config.mesh.shape
    sizes = (hosts * each, config.train.batch_size, config.item_bytes, hosts, replicas)
    described = describe_plan(plan, tables, features, *sizes)
    bound = bind(plan, tables, features, hosts * each, hosts=hosts)
    loads = describe_loads(workload(config, source, tables, features, config.mesh.shape), bound)
    result, texts = described | {"loads": loads}, [plan_table(described), loads_table(loads)]
    if chosen is not None:
        found = planned.figures(chosen)
        result, texts = result | {"chosen": found}, [*texts, planned.to_text(found)]
        if options.out:
            from recjax.planning.draw_choice import picture
            from recjax.utils.files import write_json, write_whole

            options.out.mkdir(parents=True, exist_ok=True)
            write_json(options.out / "choice.json", found)
            write_whole(options.out / "choice.png", picture(found))
            texts.append(f"wrote choice.json and choice.png to {options.out}")
    if hot is not None:
        from recjax.planning.hot import describe_hot, hot_table

        result["hot"] = describe_hot(hot)
        texts.append(hot_table(result["hot"]))
    if options.compile:
        from recjax.train import compile_report

        found = compile_report.on_paper(config, options.memory_gib)
        result, texts = result | {"compiled": found}, [*texts, compile_report.to_text(found)]
    if options.predict:
        from recjax.planning.machine import open_machine

        prediction = lab.load("predict.prediction", "plan --predict")
        machine = open_machine(options.machine or config.planner.machine or "machine.json")
        foreseen = prediction.on_machine(config, machine, options.measure, options.out, options.target)
        result, texts = result | {"predicted": foreseen}, [*texts, prediction.to_text(foreseen)]
    if options.tiers:
        from recjax.planning.machine import open_machine

        tier_plan, tier_report = (lab.load(f"predict.{name}", "plan --tiers") for name in ("tier_plan", "tier_report"))
        name = options.machine or config.planner.machine
        tiers = tier_plan.tier_plan(
            config, open_machine(name) if name else None, options.step_ms, options.samples_per_s, options.processes
        )
        result, texts = result | {"tiers": tiers}, [*texts, tier_report.to_text(tiers)]
    write_result(options, result, lambda: "\n\n".join(texts))


def _offers(options: argparse.Namespace, config: Any) -> None:
    """Prints what a run would be on several numbers of devices."""
    from recjax.planning.machine import open_machine
    from recjax.utils.files import write_json, write_whole

    offers = lab.load("predict.offers", "plan --devices")

    machine = open_machine(options.machine or config.planner.machine or "machine.json")
    result = offers.offers(config, machine, offers.read_devices(options.devices), options.price)
    text = offers.to_text(result)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "offers.json", result)
        if (drawn := offers.picture(result)) is not None:
            write_whole(options.out / "offers.png", drawn)
            text += f"\n\nwrote offers.json and offers.png to {options.out}"
    write_result(options, result, lambda: text)
