"""DLRM by its shapes: what a rank computes and sends in an iteration, under data, model and hybrid parallelism.

The defaults are the model of Rashidi et al. (HOTI 2020). Their text leaves open, and these are our assumptions: "5+2"
bottom layers are an input layer, five hidden ones and one down to D; "10+2" top layers likewise, down to 1; the
interaction is pairwise dot products; the 60 TFLOP/s are reached; lookups run at a V100's memory bandwidth (900 GB/s);
tables are spread evenly, whatever their number; the update of rows reads and writes each looked-up row once.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from recjax.errors import ConfigError
from recjax.lab.simulate.layers import Comm, Layer, training_loop
from recjax.lab.simulate.workload import Workload


@dataclasses.dataclass(frozen=True)
class DlrmShape:
    """A DLRM and the device it runs on."""

    parallelism: Literal["data", "model", "hybrid"] = "hybrid"  # hybrid: tables by model, MLPs by data
    batch_per_rank: int = 512  # samples
    value_bytes: int = 2  # of activations, gradients and embeddings
    gradient_bytes: int = 0  # of the MLPs' gradients; 0: as value_bytes
    id_bytes: int = 8  # exchanged under data parallelism only
    tables: int = 64
    dim: int = 64  # D
    pooling: int = 60  # ids a sample and table
    dense_features: int = 1600
    bottom: tuple[int, ...] = (1024, 1024, 1024, 1024, 1024, 1024, 64)  # widths; the last one is D
    top: tuple[int, ...] = (2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048, 1)
    flops_per_s: float = 60e12
    memory_bytes_per_s: float = 900e9


PRESETS = {"hoti2020": DlrmShape()}


def dlrm(shape: DlrmShape, ranks: int, iterations: int = 1, name: str = "dlrm") -> Workload:
    """Iterations of training a DLRM.

    Under hybrid parallelism the pooled embeddings of a rank's samples come by an all-to-all, their gradients go back by
    another, and the gradients of every MLP layer are all-reduced. Under data parallelism tables are replicated too: the
    pooled gradients and the ids of all samples are all-gathered, from which every rank updates its copy. Under model
    parallelism a layer's outputs are spread over the ranks, which share all samples: activations are all-gathered,
    input gradients all-reduced.

    Args:
      shape: of the model.
      ranks: how many there are.
      iterations: how many.
      name: of the workload.

    Raises:
      ConfigError: bottom does not end in D, or a size below 1.
    """
    if shape.bottom[-1:] != (shape.dim,):
        raise ConfigError(f"bottom {shape.bottom} must end in dim={shape.dim}: both go into the interaction.")
    if min(shape.batch_per_rank, shape.tables, shape.dim, shape.pooling, *shape.bottom, *shape.top, iterations) < 1:
        raise ConfigError("every size of the model, and the number of iterations, must be 1 or more.")
    if min(shape.flops_per_s, shape.memory_bytes_per_s) <= 0:
        raise ConfigError("flops_per_s and memory_bytes_per_s must be above 0.")
    vectors = shape.tables + 1
    interaction = vectors * (vectors - 1) // 2
    widths = [(f"bottom_{i}", a, b) for i, (a, b) in _pairs(shape.dense_features, shape.bottom)]
    widths += [(f"top_{i}", a, b) for i, (a, b) in _pairs(interaction + shape.dim, shape.top)]
    layers = [_embedding(shape, ranks)]
    dot_ns = 2.0 * shape.batch_per_rank * vectors * vectors * shape.dim / shape.flops_per_s * 1e9
    for layer, inputs, outputs in widths:
        made = _dense(shape, ranks, layer, inputs, outputs)
        if layer == "top_0":
            made = dataclasses.replace(
                made, forward_ns=made.forward_ns + dot_ns, input_gradient_ns=made.input_gradient_ns + 2 * dot_ns
            )
        if layer == "bottom_0":
            made = dataclasses.replace(made, input_gradient_ns=0.0, input_gradient=None)  # of data, which need none
        layers.append(made)
    return training_loop(name, layers, iterations, shape.parallelism != "model", embedding_of=len(shape.bottom))


def _pairs(first: int, widths: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(zip((first, *widths), widths, strict=False)))


def _embedding(shape: DlrmShape, ranks: int) -> Layer:
    pooled = float(shape.batch_per_rank * shape.tables * shape.dim * shape.value_bytes)  # of a rank's samples
    lookup_ns = pooled * shape.pooling / shape.memory_bytes_per_s * 1e9  # on average, of a rank's tables
    update_ns = 2 * lookup_ns
    if shape.parallelism == "hybrid":
        exchange = Comm("all_to_all", pooled)
        return Layer("embedding", lookup_ns, exchange, 0.0, exchange, update_ns)
    if shape.parallelism == "model":
        gathered = Comm("all_gather", pooled * ranks)  # every rank needs all samples, and has all their gradients
        return Layer("embedding", lookup_ns, gathered, weight_gradient_ns=update_ns)
    ids = float(shape.batch_per_rank * shape.tables * shape.pooling * shape.id_bytes)
    return Layer("embedding", lookup_ns, None, 0.0, Comm("all_gather", (pooled + ids) * ranks), update_ns * ranks)


def _dense(shape: DlrmShape, ranks: int, name: str, inputs: int, outputs: int) -> Layer:
    flops_ns = 2.0 * shape.batch_per_rank * inputs * outputs / shape.flops_per_s * 1e9
    if shape.parallelism == "model":  # all samples, a part of the outputs: as many operations
        samples_bytes = float(shape.batch_per_rank * ranks * shape.value_bytes)
        forward, back = Comm("all_gather", samples_bytes * outputs), Comm("all_reduce", samples_bytes * inputs)
        return Layer(name, flops_ns, forward, flops_ns, back, flops_ns)
    weights = Comm("all_reduce", float((inputs + 1) * outputs * (shape.gradient_bytes or shape.value_bytes)))
    return Layer(name, flops_ns, None, flops_ns, None, flops_ns, weights)
