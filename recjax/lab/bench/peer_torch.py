"""The same training step in PyTorch, as a program of its own: `python peer_torch.py FOLDER`.

It needs torch and NumPy, and with kernel "fbgemm" fbgemm_gpu, but nothing of recjax, so that it may run in another
environment. `peer.py` writes the folder, sends a line of JSON for each round on standard input and reads one from
standard output.

Tables: "fbgemm" is the kernel under TorchRec, SplitTableBatchedEmbeddingBagsCodegen, with the update fused into the
backward pass, called without TorchRec's modules around it. "torch" is one stacked
`embedding_bag(..., sparse=True)` and the same row-wise Adagrad on its coalesced gradient.
Batches are ready-made tensors on the device: the peer's input costs nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

# torch is imported where it is used: this file is part of recjax, which must be importable without it.


def main(folder: Path) -> None:
    """Serves rounds until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    peer = Peer(folder)
    answers.write(json.dumps({"about": peer.about}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        if "choose" in asked:
            answer: dict[str, Any] = {"dense": peer.choose(asked["choose"])}
        else:
            answer = peer.round(asked["steps"], asked["precision"], asked["untimed"])
        answers.write(json.dumps(answer) + "\n")


class Peer:
    """A model with its tables and batches, ready to train."""

    def __init__(self, folder: Path) -> None:
        """Loads everything that `peer.py` wrote."""
        import torch

        self.torch = torch
        self.spec: dict[str, Any] = json.loads((folder / "peer.json").read_text())
        torch.set_num_threads(self.spec["threads"])
        self.device = torch.device(self.spec["device"])
        torch.backends.cuda.matmul.allow_tf32 = False  # recjax's float32 products are float32
        self.tables = (Fbgemm if self.spec["kernel"] == "fbgemm" else Stacked)(self, folder)
        with np.load(folder / "dense.npz") as arrays:
            self.dense = {k: self._on_device(arrays[k]).requires_grad_() for k in arrays.files}
        rule = self.spec["dense_optimizer"]
        self.optimizer = torch.optim.Adagrad(
            list(self.dense.values()),
            lr=rule["learning_rate"],
            initial_accumulator_value=rule["initial_accumulator"],
            eps=rule["eps"],
            **({"fused": True} if self.device.type == "cpu" else {"foreach": True}),
        )
        self.batches = self._batches(folder)
        self.done = 0
        plain = self._dlrm if self.spec["model"]["kind"] == "dlrm" else self._dcnv2
        self.forward = {"float32": plain, "bfloat16": plain}
        F = len(self.spec["tables"]) + 1
        i, j = np.tril_indices(F, -1)
        self.triangle = self._on_device(i * F + j)
        kernel = {"fbgemm": "FBGEMM table-batched embeddings", "torch": "embedding_bag(sparse=True)"}
        self.about = {
            "torch": torch.__version__,
            "tables": kernel[self.spec["kernel"]] + self.tables.version,
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        }

    def round(self, steps: int, precision: str, untimed: int) -> dict[str, Any]:
        """Trains untimed + steps steps and one more: seconds of `steps`, losses of all; the clock is as recjax's."""
        losses: list[float] = []
        ends: list[float] = []
        pending = None
        while True:
            loss = self.step(precision)
            if pending is not None:
                losses.append(float(pending))
                ends.append(time.perf_counter())
            pending = loss
            if len(ends) == untimed + steps:
                break
        float(pending)
        return {"seconds": ends[-1] - ends[untimed - 1], "losses": losses}

    def choose(self, precision: str) -> str:
        """Tries the dense part as it is and with torch.compile, stays with the faster one and gives its name."""
        plain = self.forward[precision]
        ways = {"eager": plain, "torch.compile": self.torch.compile(plain)}
        best: dict[str, float] = {}
        for _ in range(3):
            for name, forward in ways.items():
                self.forward[precision] = forward
                try:
                    seconds = self.round(5, precision, 2)["seconds"]
                except Exception as error:  # whatever a compiler that is missing or fails raises
                    print(f"{name}: {error!r}", file=sys.stderr)
                    seconds = float("inf")
                best[name] = min(seconds, best.get(name, seconds))
        found = min(best, key=lambda name: best[name])
        self.forward[precision] = ways[found]
        return found

    def step(self, precision: str) -> Any:
        """One training step on the next batch; gives its mean loss, before the update."""
        torch = self.torch
        dense, labels, ids = self.batches[self.done % len(self.batches)]
        self.done += 1
        pooled = self.tables.lookup(ids)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = self.forward[precision](dense, pooled)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.tables.update()
        return loss.detach()

    def _mlp(self, name: str, x: Any, last_relu: bool) -> Any:
        layers = self.spec["model"][name]
        for k in range(len(layers)):
            x = self.torch.nn.functional.linear(x, self.dense[f"{name}.{k}.weight"], self.dense[f"{name}.{k}.bias"])
            if last_relu or k < len(layers) - 1:
                x = self.torch.relu(x)
        return x

    def _dlrm(self, dense: Any, pooled: Any) -> Any:
        x = self._mlp("bottom", dense, last_relu=True)
        vectors = self.torch.cat([x, pooled.to(x.dtype)], dim=1).view(len(x), -1, x.shape[1])
        products = self.torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        joined = self.torch.cat([x, products.index_select(1, self.triangle)], dim=1)
        return self._mlp("top", joined, last_relu=False)[:, 0]

    def _dcnv2(self, dense: Any, pooled: Any) -> Any:
        x = self._mlp("bottom", dense, last_relu=True)
        first = x = self.torch.cat([x, pooled.to(x.dtype)], dim=1)
        for k in range(self.spec["model"]["cross_layers"]):
            inner = self.torch.nn.functional.linear(x, self.dense[f"cross.v.{k}.weight"])
            outer = self.torch.nn.functional.linear(
                inner, self.dense[f"cross.w.{k}.weight"], self.dense[f"cross.w.{k}.bias"]
            )
            x = first * outer + x
        return self._mlp("top", x, last_relu=False)[:, 0]

    def _on_device(self, x: np.ndarray) -> Any:
        return self.torch.from_numpy(np.array(x)).to(self.device)

    def _batches(self, folder: Path) -> list[Any]:
        dense, labels, ids = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("batch_dense", "labels", "ids")
        )
        return [
            (self._on_device(dense[s]), self._on_device(labels[s]), self.tables.prepare(ids[s]))
            for s in range(len(labels))
        ]


class Fbgemm:
    """FBGEMM's table-batched embeddings with exact row-wise Adagrad in the backward pass."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        """Loads the tables."""
        import fbgemm_gpu
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.peer, self.version = peer, f" {fbgemm_gpu.__version__}"
        cpu = peer.device.type == "cpu"
        where = (EmbeddingLocation.HOST, ComputeDevice.CPU) if cpu else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        rule = peer.spec["table_optimizer"]
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(t["rows"], t["dim"], *where) for t in peer.spec["tables"]],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=rule["learning_rate"],
            eps=rule["eps"],
            pooling_mode=PoolingMode.SUM,
            weights_precision=SparseType.FP32,
            output_dtype=SparseType.FP32,
            bounds_check_mode=BoundsCheckMode.NONE,  # recjax has checked the ids
            device=peer.device,
        )
        for t, weights in enumerate(self.module.split_embedding_weights()):
            weights.copy_(peer.torch.from_numpy(np.load(folder / f"table_{t}.npy")))

    def prepare(self, ids: np.ndarray) -> tuple[Any, Any]:
        """The ids of one batch, table by table, as indices and offsets."""
        sizes = np.repeat([t["bag"] for t in self.peer.spec["tables"]], self.peer.spec["batch_size"])
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return self.peer._on_device(ids.astype(np.int64)), self.peer._on_device(offsets)

    def lookup(self, ids: tuple[Any, Any]) -> Any:
        """Pooled vectors [B, T * D]."""
        return self.module(*ids)

    def update(self) -> None:
        """Nothing: the backward pass has updated the rows."""


class Stacked:
    """One weight [all rows, D] and `embedding_bag(sparse=True)`; row-wise Adagrad on the coalesced gradient."""

    version = ""

    def __init__(self, peer: Peer, folder: Path) -> None:
        """Loads the tables."""
        self.peer, tables = peer, peer.spec["tables"]
        torch = peer.torch
        self.first = np.cumsum([0] + [t["rows"] for t in tables])
        self.weight = torch.empty(int(self.first[-1]), tables[0]["dim"], device=peer.device)
        for t, (start, stop) in enumerate(zip(self.first, self.first[1:], strict=False)):
            self.weight[start:stop].copy_(torch.from_numpy(np.load(folder / f"table_{t}.npy")))
        self.weight.requires_grad_()
        self.sums = torch.zeros(len(self.weight), device=peer.device)

    def prepare(self, ids: np.ndarray) -> tuple[Any, Any]:
        """The ids of one batch as rows of the stacked weight, table by table, and offsets."""
        sizes = [t["bag"] * self.peer.spec["batch_size"] for t in self.peer.spec["tables"]]
        bags = np.repeat([t["bag"] for t in self.peer.spec["tables"]], self.peer.spec["batch_size"])
        offsets = np.concatenate([[0], np.cumsum(bags)[:-1]])
        return self.peer._on_device(ids + np.repeat(self.first[:-1], sizes)), self.peer._on_device(offsets)

    def lookup(self, ids: tuple[Any, Any]) -> Any:
        """Pooled vectors [B, T * D]."""
        B = self.peer.spec["batch_size"]
        found = self.peer.torch.nn.functional.embedding_bag(ids[0], self.weight, ids[1], mode="sum", sparse=True)
        return found.view(-1, B, found.shape[1]).transpose(0, 1).reshape(B, -1)

    def update(self) -> None:
        """Row-wise Adagrad, s += mean_d(G^2); w -= lr * G / (sqrt(s) + eps) on the touched rows."""
        rule = self.peer.spec["table_optimizer"]
        with self.peer.torch.no_grad():
            grad = self.weight.grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            sums = self.sums[rows] + values.square().mean(dim=1)
            self.sums[rows] = sums
            self.weight.index_add_(0, rows, values / (sums.sqrt() + rule["eps"])[:, None], alpha=-rule["learning_rate"])
        self.weight.grad = None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
