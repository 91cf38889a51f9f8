"""`recjax bench`: rounds of training steps, alternating with a peer, and what the steps consist of."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval

from recjax import kernels
from recjax.config.run import ComputeDtype, RunConfig
from recjax.embedding.spec import ids_per_sample
from recjax.errors import ConfigError, TrainingError
from recjax.lab.bench import breakdown, machine, overlap, roofline
from recjax.lab.bench.machine_load import Others
from recjax.lab.bench.peer import Peer, require_known
from recjax.lab.bench.timing import Ours, Round, reading_in_words, spread
from recjax.lab.replay import profile
from recjax.planning.compiled_collectives import wire_bytes
from recjax.train.build import build_trainer
from recjax.train.products import in_words
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer
from recjax.utils import log, processor

CHECKED = 5  # first steps whose losses must agree with the peer's
TOLERANCE = 1e-3  # relative; float32 sums of another order give about 1e-6
PROFILED = 12  # steps in a profile


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a measurement.

    Attributes:
      against: None, "torchrec" or "torch".
      rounds: times that each contestant trains `steps` steps, one after the other.
      steps: timed steps of a round.
      peer_python: interpreter of the peer; None takes this one.
      profile: folder for the profiler's traces; None keeps none.
    """

    against: str | None = None
    rounds: int = 10
    steps: int = 20
    peer_python: str | None = None
    profile: Path | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.steps < 1:
            raise ConfigError(f"--rounds is {self.rounds} and --steps {self.steps}; both must be at least 1.")


def bench(config: RunConfig, options: Options) -> dict[str, Any]:
    """Measures the training step of a config.

    With a peer both sides run in float32 and in bfloat16 and take turns; the first losses, from equal weights on equal
    batches, must agree. All our precisions train one state, so tables are held once.

    Returns:
      JSON values: "setup", what ran and on what; "speed", contestant -> samples/s as median, quartiles and rounds;
      "cpu_ms_per_step", of our own -> CPU time of all threads, which other processes change less than the speed;
      "ratio", ours over the peer's round by round; "peer"; "steps", precision -> parts, bytes and shares of
      the machine's rates ("machine").

    Raises:
      ConfigError: the peer is not installed or knows no such model; or what `build_trainer` refuses.
      TrainingError: the peer computes something else, or died.
    """
    precisions: tuple[ComputeDtype, ...] = ("float32", "bfloat16") if options.against else (config.compute_dtype,)
    source = config.data.open()
    if options.against:
        require_known(config, source.schema)
    ours = {
        p: Ours(build_trainer(dataclasses.replace(config, compute_dtype=p), source, ("train",))) for p in precisions
    }
    first = ours[precisions[0]].trainer
    state = first.init_state()
    with contextlib.ExitStack() as stack:
        peer = None
        if options.against:
            log.info(f"writing weights and batches for {options.against}")
            peer = stack.enter_context(Peer(options.against, first, state, options.peer_python))
        state, checked = _first_steps(ours[precisions[0]], peer, state)
        others = Others([peer.pid] if peer else [])
        state, rounds = _rounds(ours, peer, state, options)
        busy = others.share()
    speed = {
        name: spread([options.steps * first.config.train.batch_size / r.seconds for r in done])
        for name, done in rounds.items()
    }
    result: dict[str, Any] = {"setup": _about(first, options, busy), "speed": speed}
    result["cpu_ms_per_step"] = {
        name: float(np.median([r.cpu_seconds for r in done if r.cpu_seconds is not None])) / options.steps * 1e3
        for name, done in rounds.items()
        if done[0].cpu_seconds is not None
    }
    if peer:
        result |= {"peer": peer.about | checked, "ratio": _ratios(speed, peer.kind)}
    device = first.mesh.devices.flat[0]
    result["machine"] = machine.rates(tuple(p for p in precisions if p != "float64"), device)
    result["steps"] = {}
    for name, side in ours.items():
        log.info(f"profiling {name}")
        state, result["steps"][name] = _step(side, state, options, result["machine"], speed[f"recjax {name}"]["median"])
    return result


def _first_steps(side: Ours, peer: Peer | None, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Compiles, and checks that both sides compute the same."""
    log.info("first steps")
    state, mine = side.round(state, CHECKED - 1, untimed=1)
    if peer is None:
        return state, {}
    theirs = peer.round("float32", CHECKED - 1, untimed=1)
    apart = float(np.max(np.abs(np.array(mine.losses) / np.array(theirs.losses) - 1)))
    if not apart < TOLERANCE:
        raise TrainingError(
            f"recjax and {peer.kind} do not compute the same: from equal weights, on equal batches, the losses of the "
            f"first steps are {mine.losses} and {theirs.losses}. Their speeds would say nothing."
        )
    log.info(f"{peer.kind} tries torch.compile")
    dense = {name: peer.choose(name) for name in ("float32", "bfloat16")}
    losses = {"recjax": mine.losses, peer.kind: theirs.losses, "largest_relative_difference": apart}
    return state, {"dense": dense, "losses": losses}


def _rounds(
    ours: dict[ComputeDtype, Ours], peer: Peer | None, state: TrainState, options: Options
) -> tuple[TrainState, dict[str, list[Round]]]:
    """Every contestant's rounds. They take turns, and turn about, so that a drift of the machine hits all alike."""
    turns: list[tuple[str, Ours | None, ComputeDtype]] = [(f"recjax {name}", side, name) for name, side in ours.items()]
    if peer:
        turns += [(f"{peer.kind} {name}", None, name) for name in ours]
    done: dict[str, list[Round]] = {name: [] for name, _, _ in turns}
    for number in range(options.rounds + 1):
        log.info(f"round {number} of {options.rounds}" if number else "a first round, which does not count")
        for name, side, precision in turns if number % 2 else reversed(turns):
            if side:
                state, one = side.round(state, options.steps)
            else:
                assert peer is not None
                one = peer.round(precision, options.steps)
            if number:
                done[name].append(one)
    return state, done


def _ratios(speed: dict[str, Any], kind: str) -> dict[str, Any]:
    """Ours over the peer's, of the rounds that stand beside each other; and the best of each side by its median."""
    best = {
        who: max((n for n in speed if n.startswith(who + " ")), key=lambda n: speed[n]["median"])
        for who in ("recjax", kind)
    }
    pairs = [(f"recjax {p}", f"{kind} {p}") for p in ("float32", "bfloat16")]
    pairs.append((best["recjax"], best[kind]))
    return {
        f"{a} / {b}": spread([x / y for x, y in zip(speed[a]["rounds"], speed[b]["rounds"], strict=True)])
        for a, b in pairs
    }


def _step(
    side: Ours, state: TrainState, options: Options, limits: dict[str, Any], samples_per_s: float
) -> tuple[TrainState, dict[str, Any]]:
    """Parts of one precision's step."""
    trainer = side.trainer
    config, bound = trainer.config, trainer.bound
    holder = {}

    def train() -> None:
        holder["state"], _ = side.round(state, PROFILED - 2, untimed=1)

    folder = options.profile / config.compute_dtype if options.profile else None
    trace = profile.profile(train, folder)
    state = holder["state"]
    # One more batch, laid out as those of the profile were, to read sizes and the compiled program from.
    inputs = trainer.first_inputs(side.capacities, state.host)
    traced = trainer.step_program.trace(state, inputs)
    hlo = traced.lower().compile().as_text() or ""
    found = breakdown.read(trace, hlo)
    if folder is None:
        profile.discard(trace)
    step_s = config.train.batch_size / samples_per_s
    lookup = roofline.lookup_bytes(bound, inputs.routing, config.train.batch_size)
    needed, _ = partial_eval.dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.out_avals))  # as XLA leaves it
    flops = roofline.matmul_flops(needed)
    item_bytes = config.item_bytes
    samples = inputs.labels_B.shape[0] // bound.all_devices
    copy, products = limits["copy_bytes_per_s"], limits["flops_per_s"].get(config.compute_dtype)
    ms = found["device_ms"]
    forward_s = sum(ms.get(p, 0) for p in ("gather", "row_exchange", "pooled_exchange", "pool")) / 1e3
    backward_s = (
        sum(ms.get(p, 0) for p in ("pool_backward", "grad_exchange", "pooled_grad_exchange", "sparse_update")) / 1e3
    )
    return state, {
        "step_ms": step_s * 1e3,
        "compilations": side.compilations,
        "profile": found,
        "wire": wire_bytes(hlo, bound, inputs.routing, item_bytes, config.mesh.hosts, samples),
        "flights": overlap.flights(hlo),
        "sparse": {
            "lookup_bytes": lookup,
            "forward_bytes_per_s": lookup / forward_s if forward_s else None,
            "backward_bytes_per_s": 2 * lookup / backward_s if backward_s else None,
            "forward_share_of_copy": lookup / forward_s / copy if forward_s else None,
            "backward_share_of_copy": 2 * lookup / backward_s / copy if backward_s else None,
        },
        "matmul": {
            "flops": flops,
            "flops_per_s": flops / step_s,
            "share_of_matmul": flops / step_s / products if products else None,
        },
    }


def _about(trainer: Trainer, options: Options, busy: float | None) -> dict[str, Any]:
    config, schema = trainer.config, trainer.source.schema
    return {
        "model": config.model.kind,
        "tables": len(schema.features),
        "rows": sum(f.rows for f in schema.features),
        "dim": config.embedding.dim,
        "ids_per_sample": ids_per_sample(trainer.bound.features),
        "batch_size": config.train.batch_size,
        "devices": trainer.mesh.devices.size,
        "device": trainer.mesh.devices.flat[0].device_kind,
        "threads": processor.cores(),
        "steps_per_round": options.steps,
        "cpu_share_of_others": busy,
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "kernels": kernels.variant()},
        "products": in_words(trainer.products, trainer.mesh),
        "routing": trainer.router.name,
        "reading": reading_in_words(trainer),
    }
