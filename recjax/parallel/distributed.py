"""A run of several processes: who this one is, and how it joins the others. Importing this starts nothing.

A process is described by its environment, never by config or command line, so that all get the same of both:

    RECJAX_COORDINATOR    HOST:PORT of process 0, as the others reach it
    RECJAX_PROCESSES      how many there are
    RECJAX_PROCESS        which one this is, from 0
    RECJAX_LOCAL_DEVICES  accelerators of this machine that are its own, such as 0,1; all if it is not set
    RECJAX_BIND           HOST:PORT at which process 0 listens, if that is another than the first
    RECJAX_CLUSTER        instead of the first three: slurm, ompi, mpi4py, gketpu or gcetpu, or auto: JAX finds them
    RECJAX_LIMIT_S        seconds after which a lost or stalled peer ends the run

Everything that processes tell each other outside of compiled programs goes through the key-value store of JAX's
distributed runtime (`post`, `fetch`), which is process 0's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

from recjax.errors import ConfigError, DeviceError
from recjax.settings.values import either
from recjax.utils import log

_DEFAULT_LIMIT_S = 60.0
PATIENCE_S = 1800.0  # that one waits for a process that is at work; whether it still is, `watchdog.py` finds out
_CLUSTERS = "RECJAX_CLUSTER"
CLUSTERS = ("auto", "slurm", "ompi", "mpi4py", "gketpu", "gcetpu")  # JAX's names; auto finds Kubernetes, too
_EXPLICIT = ("RECJAX_COORDINATOR", "RECJAX_PROCESSES", "RECJAX_PROCESS")


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of this process among all, as the environment describes it.

    Attributes:
      coordinator: HOST:PORT of process 0; None if JAX is to find out, with the next two.
      processes: how many there are.
      process: which one this is.
      bind: HOST:PORT at which process 0 listens.
      local_devices: its accelerators; None: all of this machine.
      cluster: JAX's name for the kind of cluster, or None.
      limit_s: see RECJAX_LIMIT_S.
    """

    coordinator: str | None
    processes: int | None
    process: int | None
    bind: str | None
    local_devices: tuple[int, ...] | None
    cluster: str | None
    limit_s: float


def place(environment: Mapping[str, str] | None = None) -> Place | None:
    """Reads this process's place from the environment; None if it is the only one.

    Args:
      environment: its variables; None: those of the process.

    Raises:
      ConfigError: a variable is missing or makes no sense.
    """
    environment = os.environ if environment is None else environment  # help and documentation show a default's value
    given = [name for name in _EXPLICIT if environment.get(name)]
    cluster = environment.get(_CLUSTERS) or None
    if not given and not cluster:
        return None
    if cluster and given:
        raise ConfigError(
            f"{_CLUSTERS}={cluster} lets JAX find out which process this is, but {' and '.join(given)} say it too. "
            "Unset the one or the other."
        )
    if cluster and cluster not in CLUSTERS:
        raise ConfigError(f"{_CLUSTERS}={cluster} is not known. It may be {either(CLUSTERS)}.")
    if given and len(given) < len(_EXPLICIT):
        missing = " and ".join(name for name in _EXPLICIT if name not in given)
        raise ConfigError(f"{' and '.join(given)} without {missing}: a process of several needs all three set.")
    processes, process = (_whole(environment, name) for name in _EXPLICIT[1:]) if given else (None, None)
    if processes is not None and process is not None and not 0 <= process < processes:
        raise ConfigError(
            f"RECJAX_PROCESS={process} with RECJAX_PROCESSES={processes}: processes are numbered from 0 to "
            f"{processes - 1}. Correct the script that starts them."
        )
    if processes == 1:
        return None
    for name in ("RECJAX_COORDINATOR", "RECJAX_BIND"):
        if environment.get(name):
            _check_address(name, environment[name])
    devices = environment.get("RECJAX_LOCAL_DEVICES")
    try:
        local = tuple(int(part) for part in devices.split(",")) if devices else None
    except ValueError as error:
        raise ConfigError(f"RECJAX_LOCAL_DEVICES={devices!r} needs numbers such as 0,1.") from error
    bind = environment.get("RECJAX_BIND") or environment.get("RECJAX_COORDINATOR") or None
    limit = limit_s(environment)
    return Place(environment.get("RECJAX_COORDINATOR"), processes, process, bind, local, cluster, limit)


def limit_s(environment: Mapping[str, str] | None = None) -> float:
    """Reads RECJAX_LIMIT_S, in seconds.

    Args:
      environment: as for `place`.

    Raises:
      ConfigError: it makes no sense.
    """
    given = (os.environ if environment is None else environment).get("RECJAX_LIMIT_S") or str(_DEFAULT_LIMIT_S)
    try:
        limit = float(given)
    except ValueError as error:
        raise ConfigError(f"RECJAX_LIMIT_S={given!r} is no number of seconds.") from error
    if not 5 <= limit < 1e6:
        raise ConfigError(f"RECJAX_LIMIT_S={limit:g}: a process may be busy for some seconds; give at least 5.")
    return limit


def _whole(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError as error:
        raise ConfigError(f"{name}={environment[name]!r} is no whole number.") from error


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name}={address!r} is no address. Write HOST:PORT, such as node17:7777.")


def processes() -> int:
    """Number of processes of the run; 1 before `join`."""
    state = _state()
    return int(state.num_processes) if state.client is not None else 1


def joined() -> bool:
    """Returns whether this process has joined others."""
    return _state().client is not None


def process() -> int:
    """Number of this process."""
    return int(_state().process_id) if _state().client is not None else 0


def is_main() -> bool:
    """Returns whether this is process 0, which alone writes and prints what there is one of."""
    return process() == 0


def note(text: str) -> None:
    """Logs a line on process 0."""
    if is_main():
        log.info(text)


def _state() -> Any:
    from jax._src import distributed  # JAX has no public way to its store; Orbax takes this one too

    return distributed.global_state


def join(where: Place) -> None:
    """Joins the other processes. Waits for all of them; starts no JAX back end.

    Raises:
      DeviceError: not all have come within the limit, or the coordinator cannot be reached.
      ConfigError: JAX does not find the cluster.
    """
    import jax

    explicit: dict[str, Any] = {}
    if where.cluster is None:
        explicit = {
            "coordinator_address": where.coordinator,
            "num_processes": where.processes,
            "process_id": where.process,
            "coordinator_bind_address": where.bind,
            "cluster_detection_method": "deactivate",
        }
    elif where.cluster != "auto":
        explicit = {"cluster_detection_method": where.cluster}
    if where.local_devices is not None:
        explicit["local_device_ids"] = list(where.local_devices)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    try:
        jax.distributed.initialize(
            initialization_timeout=int(where.limit_s),
            heartbeat_timeout_seconds=int(2 * where.limit_s),  # the watchdog's words come first, also on a busy machine
            shutdown_timeout_seconds=int(where.limit_s),
            **explicit,
        )
    except ValueError as error:
        raise ConfigError(
            f"{_CLUSTERS}={where.cluster}: JAX does not find the other processes ({error}). Set RECJAX_COORDINATOR, "
            "RECJAX_PROCESSES and RECJAX_PROCESS instead."
        ) from error
    except RuntimeError as error:
        raise DeviceError(
            f"the processes did not find each other within {where.limit_s:g} s ({' '.join(str(error).split())[:300]}). "
            f"Process 0 must be reachable at {where.coordinator}, and all {where.processes} must be started."
        ) from error


def leave() -> None:
    """Waits for the others to be done too, and parts."""
    import jax

    if _state().client is not None:
        jax.distributed.shutdown()


def post(key: str, value: str) -> None:
    """Tells all processes."""
    _state().client.key_value_set(f"recjax/{key}", value, allow_overwrite=True)


def fetch(key: str, timeout_s: float) -> str | None:
    """Returns the value that some process posted under `key`, waiting for it up to `timeout_s`; None if it did not."""
    try:
        value: str = _state().client.blocking_key_value_get(f"recjax/{key}", int(timeout_s * 1000))
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
    return value


def posted(folder: str) -> dict[str, str]:
    """Key (below `folder`) -> value of what has been posted there."""
    prefix = f"recjax/{folder}/"
    return {key.removeprefix(prefix): value for key, value in _state().client.key_value_dir_get(prefix)}


def forget(folder: str) -> None:
    """Removes all that has been posted in a folder."""
    _state().client.key_value_delete(f"recjax/{folder}/")


_turns = itertools.count()


def gather(topic: str, value: str) -> list[str]:
    """Returns the values of all processes, in their order. All must call it, in the same order.

    Raises:
      DeviceError: a process did not within `PATIENCE_S`, or says something else.
    """
    if processes() == 1:
        return [value]
    turn = next(_turns)
    post(f"gather/{turn}/{process()}", json.dumps([topic, value]))
    if is_main():
        answers = []
        for k in range(processes()):
            answer = fetch(f"gather/{turn}/{k}", PATIENCE_S)
            if answer is None:
                raise DeviceError(f"process {k} did not say {topic!r} within {PATIENCE_S:g} s. See what it printed.")
            other, given = json.loads(answer)
            if other != topic:
                raise DeviceError(f"process {k} says {other!r}, process 0 {topic!r}: they do different things.")
            answers.append(given)
        post(f"gathered/{turn}", json.dumps(answers))
        forget(f"gather/{turn}")
        _state().client.key_value_delete(f"recjax/gathered/{turn - 1}")  # all have read it
    text = fetch(f"gathered/{turn}", PATIENCE_S)
    if text is None:
        raise DeviceError(f"process 0 did not say {topic!r} within {PATIENCE_S:g} s. See what it printed.")
    found: list[str] = json.loads(text)
    return found


def from_main(topic: str, value: str) -> str:
    """Returns the value of process 0; those of the others are not used. All must call it, in the same order."""
    return gather(topic, value if is_main() else "")[0]
