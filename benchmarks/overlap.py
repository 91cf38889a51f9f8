"""What a training step's collectives overlap with, as an accelerator's compiler schedules it. Needs no accelerator.

    python benchmarks/overlap.py bench_mlperf64 mesh.devices=8 data.max_rows=20000 plan=row_wise \
        train.bucket_mib=1 --gpu h100_sxm.txtpb
    python benchmarks/overlap.py bench_mlperf64 mesh.devices=8 data.max_rows=20000 plan=row_wise \
        train.bucket_mib=1 --tpu v5e:2x4 --flag xla_tpu_enable_async_all_to_all=true

For a GPU it takes JAX's CUDA plugin (the extra cuda12) and a description of the GPU, such as those in OpenXLA's
repository under xla/backends/gpu/target_config/specs; for a TPU libtpu (the extra tpu), and minutes. The state is made
on so many host devices first, so cap the rows.
`recjax bench` prints the same table of the program that really ran, on an accelerator.

Compiled on JAX 0.12.0.1 with the arguments above, for eight devices; beside a collective run:

    H100, no flags:   row_exchange: 5 operations of the bottom MLP. Four buckets' all-reduces: 3, 3 and 6 of the MLPs'
                      backward pass, the last one 8 of the tables' update. grad_exchange: 8 of the backward pass.
                      With train.bucket_mib=0: grad_exchange none of it, the one all-reduce 2 of pool_backward.
                      With plan=auto XLA added the all-reduce of small, copied tables to the first bucket, which then
                      waits for their gradient: the buckets' all-reduces have 1, 1 and 3 beside them.
    TPU v5e, no flag: nothing, all collectives are synchronous. With that flag and the next three all three exchanges
                      are asynchronous (row_exchange: 5 of the bottom MLP), and so is a bucket of 4 MiB, beside 3 of
                      the backward pass and grad_exchange; those of 0.6 to 2.5 MiB stay synchronous:
                      xla_tpu_enable_async_collective_fusion=true, xla_enable_async_all_reduce=true and
                      xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true. In a small program of one all-to-all
                      and one all-reduce, the first flag alone sufficed for the former, and all three of these were
                      needed for the latter.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from recjax.config import presets
from recjax.lab.bench.overlap import flights
from recjax.lab.bench.report import flights as table
from recjax.parallel.mesh import AXES
from recjax.train.build import build_trainer


def devices_of(arguments: argparse.Namespace, count: int) -> list[Any]:
    """Devices that can be compiled for and nothing else."""
    if arguments.tpu:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no machine to ask what it is
        return topologies.get_topology_desc(arguments.tpu, "tpu").devices
    target = arguments.gpu.read_text()
    return topologies.get_topology_desc("gpu", "cuda", topology=f"1x1x{count}", target_config=target).devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", type=Path, metavar="FILE", help="description of the GPU, as XLA's target_config")
    where.add_argument("--tpu", metavar="TOPOLOGY", help="for example v5e:2x4")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="of the compiler")
    parser.add_argument("--text", type=Path, metavar="FILE", help="also write the compiled program")
    arguments = parser.parse_args()

    trainer = build_trainer(presets.load(arguments.preset, [*arguments.overrides, "mesh.platform=cpu"]))
    count = trainer.mesh.devices.size
    devices = devices_of(arguments, count)
    if len(devices) != count:
        sys.exit(f"the topology has {len(devices)} devices: set mesh.devices={len(devices)}, not {count}")
    target = Mesh(np.array(devices).reshape(trainer.mesh.devices.shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    inputs = next(trainer.train_inputs())

    def there(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = x.sharding
        assert isinstance(sharding, NamedSharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(target, sharding.spec))

    state, inputs = jax.tree.map(there, (trainer.init_state(), inputs))
    lowered = dataclasses.replace(trainer, mesh=target).step_program.lower(state, inputs)
    compiled = lowered.compile(compiler_options=dict(flag.split("=", 1) for flag in arguments.flag) or None)
    text = compiled.as_text() or ""
    if arguments.text:
        arguments.text.write_text(text)
    print(table(flights(text)))
    print(compiled.memory_analysis())


if __name__ == "__main__":
    main()
