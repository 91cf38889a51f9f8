"""`recjax trace PRESET`: trains some steps under the profiler, and writes down every collective of each.

Or, with --compile, those of a step that is compiled and not run, for devices that nobody owns.

Kinds, groups and padded sizes come from the compiled step's text, true splits from the routing of each batch, and times
from the profile, where operations are named after the program's instructions.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from recjax import settings
from recjax.config.run import RunConfig
from recjax.embedding.exchange.events import Event as Told
from recjax.embedding.exchange.wire import piece_scope
from recjax.embedding.routing import host
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.sharded import exchanges_of
from recjax.errors import ConfigError
from recjax.lab.bench.breakdown import scopes
from recjax.lab.formats.trace import ITEM_BYTES, JOINED, Event, Trace, checked
from recjax.lab.replay import profile
from recjax.lab.trace.times import Timeline
from recjax.parallel import distributed
from recjax.planning.compiled_collectives import Collective, collectives, members
from recjax.planning.costs import Costs
from recjax.planning.graph import read_graph
from recjax.planning.machine import Machine
from recjax.planning.schedule import ANY, schedule
from recjax.settings.values import written
from recjax.train import first_batch
from recjax.train.build import build_trainer
from recjax.train.compile_only import abstract_inputs, abstract_state, compile_step
from recjax.train.routers import InFlight, place_all
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer
from recjax.utils.hlo import bodies

Timelines = dict[tuple[int, int], tuple[profile.Span, ...]]  # (rank, step) -> what ran
UNTIMED = 3  # steps before the first one that is recorded: they compile, and fill the pipeline
_DTYPES = {  # as the program's text has them -> as NumPy does
    "pred": "bool",
    "s8": "int8",
    "u8": "uint8",
    "s16": "int16",
    "u16": "uint16",
    "s32": "int32",
    "u32": "uint32",
    "s64": "int64",
    "u64": "uint64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """Description of a step, beside its times.

    Attributes:
      capacities: of its arrays, which its program was compiled for.
      counts: group name -> the counts of its routing, on all devices.
    """

    capacities: dict[str, int]
    counts: dict[str, GroupRouting]


def record(config: RunConfig, steps: int, alone: bool = False) -> Trace:
    """Trains `UNTIMED + steps` steps from new weights and gives the trace of the last `steps`.

    Several processes record together, and all of them get the trace of all ranks.

    Args:
      config: what to train.
      steps: how many to record.
      alone: whether all batches lie on the devices before the first step, so that nothing of the host's runs beside
        the steps. On host devices that would take their cores from them.

    Raises:
      ConfigError: `steps` is not positive, or what `build_trainer` refuses.
      DataError, DeviceError: as `build_trainer`.
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}; record at least 1.")
    begun = Recording(config, UNTIMED + steps if alone else 0)
    distributed.note(f"training {UNTIMED} steps and recording {steps} on {begun.trainer.bound.all_devices} device(s)")
    begun.train(UNTIMED)
    return begun.record(steps)


class Recording:
    """A training whose steps may be recorded, some at a time."""

    def __init__(self, config: RunConfig, placed: int = 0) -> None:
        """Sets it up; the first steps, which compile and fill the pipeline, are for `train`.

        Args:
          config: what to train.
          placed: batches to place on the devices now, so that nothing of the host's runs beside the steps: when all
            have been trained on, the first comes again. None if 0.

        Raises:
          ConfigError, DataError, DeviceError: as `build_trainer`.
        """
        self.trainer = build_trainer(config, splits=("train",))
        self._alone = placed > 0
        self._loop = _alone(self.trainer, placed) if placed else _as_it_trains(self.trainer)
        self._programs: dict[tuple[tuple[str, int], ...], str] = {}

    def train(self, steps: int) -> list[Step]:
        """Trains, and waits for the end."""
        done = []
        for _ in range(steps):
            state, step = next(self._loop)
            done.append(step)
        jax.block_until_ready(state)
        return done

    def record(self, steps: int) -> Trace:
        """Trains, and gives the trace of these steps."""
        trainer = self.trainer
        done: list[Step] = []
        taken = profile.profile(lambda: done.extend(self.train(steps)), None)
        times = profile.timelines(profile.events(taken), "jit_train_step", list(trainer.mesh.devices.flat), steps)
        profile.discard(taken)
        done, times = _gathered(done, times)
        ranks: dict[int, list[Event]] = {rank: [] for rank in range(trainer.bound.all_devices)}
        for number, step in enumerate(done):
            key = tuple(sorted(step.capacities.items()))
            if key not in self._programs:
                distributed.note("reading the compiled step")
                self._programs[key] = compiled_text(trainer, step.capacities)
            for rank, events in step_events(trainer, self._programs[key], step.counts, step.capacities).items():
                line = Timeline(times.get((rank, number), ()))
                ranks[rank] += line.joined(events, number, first_id=len(ranks[rank]))
        all_ranks = {rank: tuple(events) for rank, events in ranks.items()}
        trace = Trace(trainer.bound.all_devices, all_ranks, _about(trainer, steps, self._alone))
        return checked(trace, "the trace")


def compiled(config: RunConfig, machine: Machine | None = None) -> Trace:
    """The trace of a first step that is compiled, not run: sizes and dependencies; times only if a machine is given.

    For any number of devices, whether or not anybody owns them, as `recjax plan --compile`. The true splits are those
    of all ids, or if these are too many (see `first_batch.sample`) those of the first devices, of which the others
    are taken to ask alike; then "counted_ranks" in `about` says how many were counted.

    Args:
      config: what would be trained.
      machine: on which times are predicted, alike on all ranks: of computing, so that the trace can be simulated on
        any network, and of the collectives on the machine's own. None leaves all times out.

    Raises:
      ConfigError: several processes, or what `build_trainer` refuses.
      DataError, DeviceError: as `build_trainer`.
    """
    if distributed.processes() > 1:
        raise ConfigError("--compile is for one process, which compiles for all devices. Start it by itself.")
    trainer = build_trainer(config, splits=("train",), weights=False)
    found = first_batch.sample(trainer)
    distributed.note(f"compiling for {trainer.bound.all_devices} device(s)")
    text = compile_step(trainer, found.capacities, kernels=machine is not None).as_text() or ""
    counts = repeated(found.counts, found.devices, trainer.bound.all_devices)
    ranks = step_events(trainer, text, counts, found.capacities)
    about = _about(trainer, 1, False) | {"compiled": True}
    if found.devices < trainer.bound.all_devices:
        about["counted_ranks"] = found.devices
    if machine is not None:
        line = _predicted(trainer, text, machine)
        ranks = {rank: line.joined(events, 0, first_id=0) for rank, events in ranks.items()}
        about |= {"predicted_for": machine.name, "measured_machine": machine.measured}
    all_ranks = {rank: tuple(events) for rank, events in ranks.items()}
    return checked(Trace(trainer.bound.all_devices, all_ranks, about), "the trace")


def repeated(counts: dict[str, GroupRouting], counted: int, devices: int) -> dict[str, GroupRouting]:
    """The counts of some devices' routing as those of all: what the first ask for, the others ask for in turn."""
    if counted == devices:
        return counts
    of_all = np.arange(devices) % counted
    return jax.tree.map(lambda of_counted: np.asarray(of_counted)[of_all], counts)


def _predicted(trainer: Trainer, text: str, machine: Machine) -> Timeline:
    """Returns when a device of a machine does what, in ns from the beginning of the step."""
    devices = trainer.bound.all_devices
    graph = read_graph(text, devices, hosts=trainer.config.mesh.hosts)
    found = schedule(graph, Costs(machine, devices), ((1.0, machine.cores / devices),) if machine.shared else ANY)
    found = found.stretched(machine.longer(devices))
    spans = [
        profile.Span(node.name, round(span.start_us * 1e3), round(span.end_us * 1e3))
        for node, span in zip(graph.nodes, found.spans, strict=True)
        if span.end_us > span.start_us
    ]
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start, span.end))))


def _as_it_trains(trainer: Trainer) -> Iterator[tuple[TrainState, Step]]:
    state = trainer.init_state()
    stream = trainer.train_inputs(host=state.host)
    for done, inputs in enumerate(stream, 1):
        state, _ = trainer.train_step(state, inputs)
        state = trainer.averaged(state, done)
        yield state, Step(dict(stream.capacities), true_counts(trainer, stream.latest))


def _alone(trainer: Trainer, count: int) -> Iterator[tuple[TrainState, Step]]:
    state = trainer.init_state()
    batches = list(itertools.islice(trainer.routed_batches(host=state.host), count))
    inputs, sizes = jax.block_until_ready(place_all(trainer.router, batches))
    steps = [Step(sizes, true_counts(trainer, batch)) for batch in batches]
    for step, given in itertools.cycle(zip(steps, inputs, strict=True)):
        state, _ = trainer.train_step(state, given)
        yield state, step


def _gathered(done: list[Step], times: Timelines) -> tuple[list[Step], Timelines]:
    """Gathers what each process has seen of its own devices."""
    if distributed.processes() == 1:
        return done, times
    counts = [
        {
            name: [None if x is None else np.asarray(x).tolist() for x in (c.counts_NxO, c.handed_NxE)]
            for name, c in step.counts.items()
        }
        for step in done
    ]
    spans = [[rank, number, [dataclasses.astuple(s) for s in found]] for (rank, number), found in times.items()]
    gathered = [json.loads(text) for text in distributed.gather("what it recorded", json.dumps([counts, spans]))]
    whole = []
    for number, step in enumerate(done):
        joined = {}
        for name in step.counts:
            asked, handed = zip(*(of_one[number][name] for of_one, _ in gathered), strict=True)
            joined[name] = GroupRouting(
                None, np.concatenate(asked), None, None if handed[0] is None else np.concatenate(handed)
            )
        whole.append(Step(step.capacities, joined))
    return whole, {
        (rank, number): tuple(profile.Span(*s) for s in found) for _, spans in gathered for rank, number, found in spans
    }


def true_counts(trainer: Trainer, batch: InFlight) -> dict[str, GroupRouting]:
    """The counts of a batch's routing, whoever routed it."""
    routed = batch.routed
    if not routed.keys and trainer.bound.listing:
        train, share = trainer.config.train, trainer.router.share
        routed = host.route_on_host(routed.batch, trainer.bound, train.batch_size, train.accumulate, share)
    return host.all_true_counts(trainer.bound, routed)


def compiled_text(trainer: Trainer, capacities: dict[str, int]) -> str:
    """The text of the training step as it runs with these capacities."""
    lowered = trainer.step_program.lower(abstract_state(trainer), abstract_inputs(trainer, capacities))
    return lowered.compile().as_text() or ""


def dependencies(hlo: str) -> dict[str, tuple[str, ...]]:
    """For each collective of a program those that it waits for, without those that follow from others.

    A collective within a loop or a called computation is taken for the operation that calls it.

    Args:
      hlo: text of an optimised program, as for `collectives`.

    Returns:
      Name -> names, in the order of the text.
    """
    order = {c.name: place for place, c in enumerate(collectives(hlo))}
    computations, first = bodies(hlo)
    inside = {computation: [line.name for line in lines] for computation, lines in computations.items()}
    refers = {line.name: line.names(metadata=False) for lines in computations.values() for line in lines}

    def called(name: str, seen: frozenset[str] = frozenset()) -> list[str]:
        """Collectives within what an instruction calls."""
        own = [name] if name in order else []
        for other in refers.get(name, ()):
            if other in inside and other not in seen:
                own += [c for member in inside[other] for c in called(member, seen | {other})]
        return own

    reach: dict[str, frozenset[str]] = {}  # instruction -> all collectives that are done once its result is there
    found: dict[str, tuple[str, ...]] = {}
    for name in inside.get(first, ()):  # in the text an instruction comes after its operands
        waits = frozenset(c for other in refers[name] for c in reach.get(other, ()))
        own = frozenset(called(name))
        for collective in own:
            implied = frozenset(c for other in waits for c in reach[other] if c != other)
            found[collective] = tuple(sorted(waits - implied, key=order.__getitem__))
            reach[collective] = waits | {collective}
        reach[name] = waits | own
    return found


def step_events(
    trainer: Trainer, hlo: str, counts: dict[str, GroupRouting], capacities: dict[str, int]
) -> dict[int, list[Event]]:
    """Rank -> the collectives of one step in the order of the program's text, not timed.

    Args:
      trainer: of the run.
      hlo: text of its compiled step.
      counts: as `Step` has them.
      capacities: likewise.
    """
    bound = trainer.bound
    item_bytes = np.dtype(trainer.dtype).itemsize
    samples = host.local_samples(trainer.config.train.batch_size, bound.all_devices, trainer.config.train.accumulate)
    scope_of, waits = scopes(hlo), dependencies(hlo)
    found = collectives(hlo)
    ids = {collective.name: number for number, collective in enumerate(found)}
    ranks: dict[int, list[Event]] = {rank: [] for rank in range(bound.all_devices)}
    events = {e.name: e.events(capacities, samples, item_bytes) for e in exchanges_of(bound)}
    exchanges = {e.name: e for e in exchanges_of(bound)}
    splits: dict[tuple[str, Told], np.ndarray | None] = {}
    for collective in found:
        scope = scope_of.get(collective.name, "").split("/")
        name = next((name for name in [*(g.name for g in bound.groups), *exchanges] if name in scope), "")
        deps = tuple(ids[name] for name in waits.get(collective.name, ()) if ids[name] < ids[collective.name])
        sent: np.ndarray | None = None
        groups = members(collective.groups, bound.all_devices)
        told = _event_of(collective, tuple(groups[0]), scope, events.get(name, ()))
        if told is not None and name in counts:
            if (name, told) not in splits:
                splits[name, told] = exchanges[name].sent_bytes(told, counts[name], samples, item_bytes)
            sent = splits[name, told]
        for taking in groups:
            for rank in taking:
                event = _event(collective, ids[collective.name], tuple(taking), deps, name)
                if sent is not None:
                    sends, receives = sent[rank, taking], sent[taking, rank]
                    event = dataclasses.replace(event, sends=tuple(map(int, sends)), receives=tuple(map(int, receives)))
                ranks[rank].append(event)
    return ranks


def _event_of(
    collective: Collective, taking: tuple[int, ...], scope: Sequence[str], events: Sequence[Told]
) -> Told | None:
    """The event that an exchange tells of a collective of its own, of which device 0 takes part with these devices."""
    alike = [e for e in events if (e.phase, e.kind, e.members) == (collective.phase, collective.kind, taking)]
    if len(alike) > 1 and alike[0].places is not None:
        return next((e for e in alike if piece_scope(e.piece) in scope), alike[0])
    sizes = [e for e in alike if e.padded_bytes == collective.result_bytes]
    return next(iter(sizes or alike), None)


def _event(collective: Collective, id: int, group: tuple[int, ...], deps: tuple[int, ...], scope: str) -> Event:
    n, out_bytes = len(group), collective.result_bytes
    in_bytes = {"all-gather": out_bytes // n, "reduce-scatter": out_bytes * n}.get(collective.kind, out_bytes)
    largest = max(collective.shapes, key=lambda shape: np.prod(shape[1], dtype=np.int64), default=("", ()))
    kind = collective.kind.removeprefix("ragged-").removeprefix("collective-").replace("-", "_")
    kind = {"permute": "collective_permute"}.get(kind, kind)
    dtype = _DTYPES.get(largest[0], "")
    phase = JOINED.join(collective.phases)
    event = Event(id, kind, phase, scope, collective.name, 0, dtype, group, in_bytes, out_bytes, deps=deps)
    if kind != "all_reduce" or len(collective.shapes) == 1:
        return event
    items = (ITEM_BYTES.get(_DTYPES.get(name, ""), 1) for name, _ in collective.shapes)
    sizes = tuple(math.prod(dims) * item for item, (_, dims) in zip(items, collective.shapes, strict=True))
    return dataclasses.replace(event, parts=sizes)


def _about(trainer: Trainer, steps: int, alone: bool) -> dict[str, Any]:
    config = trainer.config
    return {
        "source": "recjax",
        "model": config.model.kind,
        "config": {key: written(value) for key, value in settings.flatten(config).items()},
        "devices": trainer.bound.all_devices,
        "hosts": config.mesh.hosts,
        "batch_size": config.train.batch_size,
        "steps": steps,
        "alone": alone,
        "device": trainer.mesh.devices.flat[0].device_kind,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
