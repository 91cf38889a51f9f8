"""Published figures, and what is predicted for them from machine files, with every assumption by name.

C.-H. Chu et al. (Meta): model A on 128 V100 in 16 nodes, each with 8 RDMA network cards of 200 Gb/s (25 GB/s a GPU);
1.2 million samples/s, about 40% of the time waiting for communication.
Lin et al. (arXiv:2201.07821): on V100 end-to-end errors of 7.96% (GMAE), below 10% for each kernel class, and sums of
kernels alone up to 71% off; these stand beside the errors that the campaign measures here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from recjax import settings
from recjax.config import presets
from recjax.lab.studies.report import Row
from recjax.planning.machine import Machine, Quantity, open_machine
from recjax.planning.planner import answer
from recjax.planning.resolve import resolve
from recjax.train.planned import question

MODEL_A = {"devices": 128, "samples_per_s": 1.2e6, "exposed_share": 0.4}
NETWORK = Quantity(25e9, "B/s", "Chu et al.: eight RDMA network cards of 200 Gb/s a node of eight GPUs")
LIN = {"end_to_end_gmae": 0.0796, "kernel_gmae": 0.10, "kernels_alone_worst": 0.71}
_MEMORY_GIB = 40.0
ASSUMPTIONS = (
    "the rates of V100 are those of its data sheet, with the efficiencies that v100.json names as assumptions",
    f"a device may use {_MEMORY_GIB:g} GiB: with float32 values model A does not fit the 32 GB of a V100",
    "batch 65,536: 512 samples a GPU, as published",
    "the model is the preset bench_model_a, whose matrices are counted below beside the published 638 MFLOP a sample",
    "the host keeps up: it is in neither figure",
)


def model_a() -> dict[str, Any]:
    """Model A on 128 V100 under more and more assumptions.

    Returns:
      "published"; "assumptions"; "mflop_per_sample", forward; "rows", each with "what" is assumed, "step_ms",
      "samples_per_s", "exposed_share", and "ratio" of samples/s over the published.
    """
    config = presets.load("bench_model_a", ["mesh.devices=128", "mesh.hosts=16", f"planner.memory_gib={_MEMORY_GIB}"])
    source = config.data.open()
    v100 = open_machine("v100")
    fast = _with(v100, "network", NETWORK)
    half = _with(fast, "flops_bf16", Quantity(125e12, "FLOP/s", "V100 data sheet: tensor cores, in float16"))
    rows: list[dict[str, Any]] = []
    mflop = 0.0
    for what, machine, overrides in (
        ("6.25 GB/s of network a GPU, as the machine file has it (DGX-1), float32", v100, ()),
        ("25 GB/s, the source's network, float32", fast, ()),
        (
            "25 GB/s, half precision: of products, on tensor cores, and of vectors that travel",
            half,
            ("compute_dtype=bfloat16", "embedding.exchange.forward=bfloat16", "embedding.exchange.backward=bfloat16"),
        ),
    ):
        own = settings.override(config, list(overrides))
        own = own.for_rows(int(source.row_counts("train").sum()))
        asked = question(own, source, machine)
        plan, _ = resolve(own, source, asked.demand.tables, asked.demand.features, own.mesh.shape)
        found = answer(asked, plan)
        mflop = 2 * sum(k * n for k, n in asked.dense.layers) / 1e6
        if found is None:
            rows.append({"what": what, "step_ms": None})
            continue
        prediction = found.prediction
        rows.append(
            {
                "what": what,
                "step_ms": prediction.step_us / 1e3,
                "samples_per_s": prediction.samples_per_s,
                "exposed_share": prediction.exposed_us / prediction.step_us,
                "ratio": prediction.samples_per_s / MODEL_A["samples_per_s"],
            }
        )
    return {"published": MODEL_A, "assumptions": list(ASSUMPTIONS), "mflop_per_sample": mflop, "rows": rows}


def rows(figure: str, found: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Published figures of model A beside the predicted ones; the same within a quarter.

    Args:
      figure: of the source.
      found: "rows" of `model_a`.
    """
    speed, share = MODEL_A["samples_per_s"], MODEL_A["exposed_share"]
    for row in found:
        assumed = f"whole model A on 128 V100: {row['what']}"
        if row["step_ms"] is None:
            yield Row(figure, "samples/s", f"{speed:,.0f}", "no plan fits", False, assumed)
            continue
        waits, fast = row["exposed_share"], row["samples_per_s"]
        yield Row(
            figure,
            "communication that nothing hides, of a step",
            f"about {share:.0%}",
            f"{waits:.0%} (predicted)",
            abs(waits / share - 1) <= 0.25,
            assumed,
        )
        yield Row(
            figure, "samples/s", f"{speed:,.0f}", f"{fast:,.0f} (predicted)", abs(fast / speed - 1) <= 0.25, "likewise"
        )


def _with(machine: Machine, name: str, quantity: Quantity) -> Machine:
    return dataclasses.replace(machine, rates=machine.rates | {name: quantity})
