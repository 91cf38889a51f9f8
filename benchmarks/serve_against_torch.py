"""The same model by recjax and by PyTorch behind the same server: latencies over rates, for 1, 64 and 512 candidates.

    python benchmarks/serve_against_torch.py EXPORT [--torch SITE_PACKAGES] [--qps 20,50,100] [--seconds 10]

EXPORT is a DLRM with int8 rows in memory and bags of fixed sizes, such as `exports/in_memory` of `recjax study sdm`.
PyTorch's tables are FBGEMM's quantised ones (IntNBitTableBatchedEmbeddingBagsCodegen, int8 with scale and bias of 16
bits), or where fbgemm-gpu-cpu does not load `torch.ops.quantized.embedding_bag_byte` on the export's own bytes; its
MLPs are eager, in inference mode. Both servers run at once and are asked by turns, over HTTP, at random times. --torch
names a folder of packages that is searched last, so that PyTorch may be installed elsewhere (with the same Python):

    python3.11 -m venv peer && peer/bin/pip install numpy torch==2.13.0 fbgemm-gpu-cpu==1.8.0
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from recjax.errors import StoppedError
from recjax.lab.bench import load
from recjax.lab.bench.machine_load import Others
from recjax.serving import loader, server
from recjax.serving.example_rows import Examples
from recjax.serving.scoring import Scorer
from recjax.serving.service import Service, ServiceConfig
from recjax.utils import garbage


class Torch:
    """A `loader.Model` whose `run` is PyTorch."""

    padded = False

    def __init__(self, folder, model):
        import torch

        self.torch, self.manifest, self.signature = torch, model.manifest, model.signature
        self.stores = self.pooled = {}
        manifest = model.manifest
        with np.load(folder / "parameters.npz") as file:
            names = manifest["parameters"]["dense"]
            self.leaves = {name: torch.from_numpy(file[f"dense.{i:04}"]) for i, name in enumerate(names)}
        self.layers = {
            mlp: 1 + max(int(name.split(".")[2]) for name in self.leaves if name.startswith(mlp))
            for mlp in ("bottom", "top")
        }
        sides = {feature["name"]: feature["side"] for feature in manifest["inputs"]["features"]}
        self.order = [lookup["feature"] for lookup in manifest["lookups"]]
        self.sides = {side: [n for n in self.order if sides[n] == side] for side in ("user", "item")}
        of = {lookup["feature"]: manifest["tables"][lookup["table"]] for lookup in manifest["lookups"]}
        raw = {name: np.load(folder / of[name]["file"]) for name in self.order}
        try:
            import fbgemm_gpu  # noqa: F401
        except (ImportError, OSError):
            self.kernel, make = "embedding_bag_byte", self._bytes
        else:
            self.kernel, make = "FBGEMM", self._fbgemm
        self.pool = {side: make([raw[n] for n in names]) for side, names in self.sides.items() if names}
        F = len(self.order) + 1
        i, j = np.tril_indices(F, -1)
        self.triangle = torch.from_numpy(i * F + j)

    def _fbgemm(self, tables):
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

        specs = [
            (f"t{n}", len(t), t.shape[1] - 8, SparseType.INT8, EmbeddingLocation.HOST) for n, t in enumerate(tables)
        ]
        made = IntNBitTableBatchedEmbeddingBagsCodegen(
            specs, pooling_mode=PoolingMode.SUM, device="cpu", output_dtype=SparseType.FP32
        )
        made.initialize_weights()
        for (weights, scales), raw in zip(made.split_embedding_weights(), tables, strict=True):
            weights.copy_(self.torch.from_numpy(np.ascontiguousarray(raw[:, :-8])))
            halves = np.ascontiguousarray(raw[:, -8:]).view(np.float32).astype(np.float16)
            scales.copy_(self.torch.from_numpy(halves.view(np.uint8)))

        def pool(ids):
            lengths = np.concatenate([np.full(len(x), x.shape[1], np.int32) for x in ids])
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)
            flat = np.concatenate([x.ravel() for x in ids]).astype(np.int32)
            return made(self.torch.from_numpy(flat), self.torch.from_numpy(offsets)).view(len(ids[0]), len(ids), -1)

        return pool

    def _bytes(self, tables):
        held = [self.torch.from_numpy(np.ascontiguousarray(raw)) for raw in tables]

        def pool(ids):
            found = []
            for table, x in zip(held, ids, strict=True):
                flat = self.torch.from_numpy(x.ravel().astype(np.int64))
                offsets = self.torch.arange(0, x.size + 1, x.shape[1])
                found.append(
                    self.torch.ops.quantized.embedding_bag_byte(table, flat, offsets, include_last_offset=True)
                )
            return self.torch.stack(found, 1)

        return pool

    def _mlp(self, name, x):
        for k in range(self.layers[name]):
            kernel, bias = (self.leaves[f"{name}.layers.{k}.{part}.value"] for part in ("kernel", "bias"))
            x = self.torch.addmm(bias, x, kernel)
            x = x if name == "top" and k == self.layers[name] - 1 else x.relu_()
        return x

    def run(self, inputs):
        """Logits, as `loader.Model.run`."""
        torch = self.torch
        with torch.inference_mode():
            x = self._mlp("bottom", torch.from_numpy(np.ascontiguousarray(inputs["dense"])))
            pooled = {}
            for side, names in self.sides.items():
                if names:
                    found = self.pool[side]([inputs["ids"][name] for name in names])
                    if side == "user":
                        found = found[torch.from_numpy(inputs["user"].astype(np.int64))]
                    pooled |= {name: found[:, n] for n, name in enumerate(names)}
            vectors = torch.stack([x, *(pooled[name] for name in self.order)], 1)
            products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.triangle)
            return self._mlp("top", torch.cat([x, products], 1))[:, 0].numpy()


def made(folder, way, config):
    """A service whose scores come from recjax's program, or from PyTorch."""
    service = Service(folder, config)
    if way == "torch":
        service.scorer = Scorer(Torch(folder, loader.load(folder)), config.most_candidates)
    return service


def child(options, config):
    service = made(options.export, options.child, config)
    service.scorer.warm_up()
    listener = server.listening("127.0.0.1", 0)
    with contextlib.suppress(StoppedError):
        server.serve(service, listener, lambda url: print(url, flush=True))


def difference(folder, config):
    """The largest difference of logits of a request, the size of logits, and PyTorch's kernel."""
    ours, theirs = made(folder, "recjax", config), made(folder, "torch", config)
    body = json.dumps(Examples(ours).request(np.random.default_rng(0), 64)).encode()
    found = [np.array(json.loads(service.answer_now(body))["scores"]["logit"]) for service in (ours, theirs)]
    return np.abs(found[0] - found[1]).max(), np.abs(found[0]).max(), theirs.scorer._model.kernel, ours


async def by_turns(urls, service, options):
    """A line for each way, candidates and rate."""
    async with load.Http(urls["recjax"]) as ours, load.Http(urls["torch"]) as theirs:
        posts = {"recjax": ours.post, "torch": theirs.post}
        drawn, lines = Examples(service), []
        for candidates in options.candidates:
            rng = np.random.default_rng(0)
            bodies = [json.dumps(drawn.request(rng, candidates)).encode() for _ in range(64)]
            for qps in options.qps:
                for way, post in posts.items():
                    await load.offer(post, bodies, qps, 1.0, rng)
                    found = await load.offer(post, bodies, qps, options.seconds, rng)
                    lines.append({"way": way, "candidates": candidates, "qps": qps, **found})
    return lines


def main():
    numbers = lambda kind: lambda text: [kind(word) for word in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser()
    parser.add_argument("export", type=Path)
    parser.add_argument("--torch", default="")
    parser.add_argument("--qps", type=numbers(float), default=[20, 50, 100])
    parser.add_argument("--candidates", type=numbers(int), default=[1, 64, 512])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        sys.path.append(options.torch)
    config = ServiceConfig(max(512, *options.candidates))
    if options.child:
        return child(options, config)
    apart, largest, kernel, service = difference(options.export, config)
    print(f"PyTorch with {kernel}; logits differ by {apart:.1e} at most, of up to {largest:.2g}")
    running, urls, others = {}, {}, Others([])
    try:
        for way in ("recjax", "torch"):
            command = [sys.executable, __file__, str(options.export), "--torch", options.torch, "--child", way]
            running[way] = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ, text=True)
        for way, process in running.items():
            urls[way] = process.stdout.readline().strip().removeprefix("http://")
        with garbage.left_alone():
            lines = asyncio.run(by_turns(urls, service, options))
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            process.wait()  # whose time is then ours
    print(load.to_text({"serve": lines, "seconds": options.seconds, "others_share": others.share()}))
    return None


if __name__ == "__main__":
    main()
