"""One batch as the jitted steps take it, and the way onto the mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.data.batch import Batch
from recjax.embedding.routing.routed import Routing
from recjax.parallel.mesh import Share
from recjax.parallel.packed import put_batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One global batch as the step takes it; every leading axis is device-major and split over the mesh.

    Attributes:
      dense_BxK: float [N * b, K], zeros in padding rows.
      labels_B: float [N * b]; or [N * b, T], where the data name T labels.
      weights_B: likewise, 0 in padding rows.
      routing: the routed ids.
    """

    dense_BxK: Any
    labels_B: Any
    weights_B: Any
    routing: Routing


def place(batch: Batch, routing: Routing, local: int, mesh: Mesh, dtype: Any) -> StepInputs:
    """Pads a batch to b rows a device, of weight 0, and puts it and its routing on the mesh.

    Of several processes each gives the samples of its own devices: see `Share`.

    Args:
      batch: up to `local` samples for each device of this process.
      routing: of these samples, as the host or the devices laid it out.
      local: b.
      mesh: the devices.
      dtype: of dense features, labels and weights on the devices.
    """
    total = local * Share.of(mesh).count

    def padded(x: np.ndarray) -> np.ndarray:
        out = np.zeros((total, *x.shape[1:]), dtype)
        out[: len(x)] = x
        return out

    return put_batch(StepInputs(padded(batch.dense), padded(batch.labels), padded(batch.weights), routing), mesh)
