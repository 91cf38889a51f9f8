"""A training loop over layers, each with a forward, an input-gradient and a weight-gradient part, as in ASTRA-sim 1.

Every part is a computation and perhaps a collective after it. What waits for what:

    forward          the next layer waits for this one's collective; and a layer for its own weight-gradient collective
                     (and update) of the iteration before
    backward         from the last layer to the first; a layer waits for the input-gradient collective of the one above
    weight gradient  its collective holds up nothing but the layer's next forward pass

`embedding_of` makes the loop one of a DLRM: layer 0 is the embeddings, whose all-to-all goes out first and which only
the layer after the last bottom one waits for; that layer's input gradient sends the embeddings' gradients back, which
only the embeddings' update waits for. Both all-to-alls go before all-reduces, whatever the scheduling.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from recjax.lab.simulate.workload import Operation, Workload, from_operations


@dataclasses.dataclass(frozen=True)
class Comm:
    """A collective of a layer: see `Operation` for its fields."""

    collective: str
    bytes: float
    group: tuple[int, ...] | None = None
    ranks: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: times in ns, on a rank, and the collectives after them."""

    name: str
    forward_ns: float = 0.0
    forward: Comm | None = None
    input_gradient_ns: float = 0.0
    input_gradient: Comm | None = None
    weight_gradient_ns: float = 0.0
    weight_gradient: Comm | None = None
    update_ns: float = 0.0


def training_loop(
    name: str,
    layers: Sequence[Layer],
    iterations: int = 1,
    weights_first: bool = True,
    embedding_of: int | None = None,
) -> Workload:
    """Iterations of a training loop.

    Args:
      name: of the workload.
      layers: from the input to the output.
      iterations: how many.
      weights_first: whether a layer's weight gradient is computed before its input gradient, so that its collective
        starts early; else after it, beside the input gradient's collective.
      embedding_of: None; or the last bottom layer of a DLRM, whose embeddings are layer 0.
    """
    made: list[Operation] = []
    names = [layer.name for layer in layers]
    times = collections.Counter(names)
    labels = [n if times[n] == 1 else f"{n}#{i}" for i, n in enumerate(names)]
    updated: dict[int, str] = {}  # layer -> what its next forward pass waits for

    def add(what: str, i: int, phase: str, ns: float, comm: Comm | None, after: Sequence[str]) -> str:
        """A computation and its collective; returns the name of the last of them."""
        step = f"{what}/{labels[i]}/{phase}"
        made.append(Operation(step, "compute", ns, depends_on=tuple(after), layer=labels[i], phase=phase))
        return communicate(step, i, phase, comm, (step,)) if comm else step

    def communicate(step: str, i: int, phase: str, comm: Comm, after: tuple[str, ...]) -> str:
        first = embedding_of is not None and comm.collective == "all_to_all"
        made.append(
            Operation(
                f"{step}/{comm.collective}",
                "collective",
                collective=comm.collective,
                bytes=comm.bytes,
                group=comm.group,
                ranks=comm.ranks,
                depends_on=after,
                layer=labels[i],
                phase=phase,
                priority=int(first),
            )
        )
        return made[-1].name

    def update(what: str, i: int) -> list[str]:
        """The operations that layer i's next forward pass waits for."""
        waits = updated.pop(i, None)
        if waits is None or not layers[i].update_ns:
            return [waits] if waits else []
        return [add(what, i, "update", layers[i].update_ns, None, [waits])]

    for iteration in range(iterations):
        what = f"iteration {iteration}"
        before: list[str] = []
        embedded: list[str] = []
        for i, layer in enumerate(layers):
            after = before + update(what, i)
            if embedding_of is not None and i == embedding_of + 1:
                after += embedded
            done = add(what, i, "forward", layer.forward_ns, layer.forward, after)
            if embedding_of is not None and i == 0:
                embedded = [done]
            else:
                before = [done]
        gradient: list[str] = before
        for i in reversed(range(len(layers))):
            layer = layers[i]
            if embedding_of is not None and i == 0:
                back = add(what, i, "input_gradient", layer.input_gradient_ns, None, embedded)
                updated[i] = add(what, i, "weight_gradient", layer.weight_gradient_ns, layer.weight_gradient, [back])
                continue
            if weights_first:
                updated[i] = add(what, i, "weight_gradient", layer.weight_gradient_ns, layer.weight_gradient, gradient)
            above, gradient = (
                gradient,
                [add(what, i, "input_gradient", layer.input_gradient_ns, layer.input_gradient, gradient)],
            )
            if not weights_first:
                updated[i] = add(what, i, "weight_gradient", layer.weight_gradient_ns, layer.weight_gradient, above)
            if embedding_of is not None and i == embedding_of + 1:
                comm, step = layers[0].input_gradient, f"{what}/{labels[0]}/input_gradient"
                embedded = [communicate(step, 0, "input_gradient", comm, (gradient[0],))] if comm else gradient
    for i in range(len(layers)):
        update("end", i)
    return from_operations(name, made)
