"""Chakra execution traces in JSON, which ASTRA-sim's feeder reads beside protobuf: `trace.{rank}.json`, read alone.

A file is an object whose "workload_graph" is a list of nodes: "Id", "Name", "NodeType" (a number of protobuf's
NodeType), "is_cpu_op", "runtime" and "data_deps"; of communication also "comm_type", "comm_size" (bytes), "comm_src"
and "comm_dst". A runtime is in whole microseconds: Chakra's feeder hands it out where protobuf has `duration_micros`,
and ASTRA-sim takes a thousand times that as nanoseconds. They have neither process groups, so that collectives are of
all ranks, nor times at which they begin. Anything else in a node, such as "tensor_size" and "comm_priority", decides
nothing here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recjax.lab.formats.chakra_protobuf import events_of, new_node
from recjax.lab.formats.fields import Fields, parse_file
from recjax.lab.formats.trace import Trace

GRAPH = "workload_graph"
_TYPES = range(1, 8)  # NodeType without the invalid one
_NUMBERS = ("comm_type", "comm_size", "comm_src", "comm_dst")


def read(files: Mapping[int, Path], parse_one: Callable[[Path], Any] = parse_file) -> Trace:
    """The trace of some ranks' files.

    Raises:
      DataError: a file is damaged, or in another format.
    """
    world = max(files) + 1
    ranks = {}
    for rank, path in files.items():
        graph = Fields(parse_one(path), str(path)).items(GRAPH)
        nodes = [_node(values, f"{path}, node {place} of {GRAPH}") for place, values in enumerate(graph)]
        events = events_of(nodes, str(path), {}, world, rank)
        ranks[rank] = tuple(dataclasses.replace(event, start_ns=None) for event in events)
    return Trace(world, ranks, {"source": "Chakra execution trace in JSON"})


def _node(values: Any, place: str) -> Any:
    given = Fields(values, place)
    if (kind := given.whole("NodeType")) not in _TYPES:
        given.refuse("NodeType", kind, f"a whole number from {_TYPES[0]} to {_TYPES[-1]}")
    attributes: dict[str, int | bool] = {name: given.whole(name) for name in _NUMBERS if name in given.values}
    return new_node(
        {"is_cpu_op": bool(given.values.get("is_cpu_op")), **attributes},
        id=given.whole("Id"),
        name=given.text("Name", ""),
        type=kind,
        data_deps=given.wholes("data_deps", ()),
        duration_micros=given.whole("runtime", 0),
    )
