"""Tables, users and requests of the study: what is exported once, and read from disk or from memory then."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from recjax.config import presets
from recjax.data.batch import Bags
from recjax.data.synthetic.clicks import BoundedZipf
from recjax.errors import ConfigError
from recjax.serving import loader
from recjax.serving.export import write
from recjax.serving.requests import Scorable
from recjax.train.build import build_trainer

ITEM_TABLES, ITEM_ROWS = 4, 10_000  # of one id each, in memory


@dataclasses.dataclass(frozen=True)
class Size:
    """Requests of a study, and the tables that they ask.

    Attributes:
      tables: of users, on disk.
      rows: of each.
      dim: D of every table.
      ids: in a bag of a user.
      users: who ask, each with bags of its own.
      candidates: of a request.
      id_exponent: of the Zipf law of ids in bags.
      user_exponent: of that of users in requests.
      seed: of all that is drawn.
    """

    tables: int = 8
    rows: int = 200_000
    dim: int = 48
    ids: int = 16
    users: int = 20_000
    candidates: int = 64
    id_exponent: float = 1.05
    user_exponent: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tables", "rows", "dim", "users", "candidates"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 1 or more.")
        if self.ids < 2:
            raise ConfigError(f"ids is {self.ids}; give 2 or more, as bags of one are not pooled.")


def export_both(size: Size, folder: Path) -> tuple[Path, Path]:
    """Writes an untrained DLRM with int8 rows twice: with the tables of users on disk, and with all in memory.

    Exports of this size that are there already are taken; ConfigError if they are of another one.
    """
    made = folder / "on_disk", folder / "in_memory"
    wanted = {f"sparse_{number}": [size.rows, size.dim] for number in range(size.tables)}
    there = [out for out in made if (out / "manifest.json").exists()]
    for out in there:
        tables = loader.read_manifest(out)["tables"]
        held = {name: [table["rows"], table["dim"]] for name, table in tables.items()}
        if wanted != {name: held.get(name) for name in wanted} or len(held) != size.tables + ITEM_TABLES:
            raise ConfigError(f"{out} has tables of another size. Delete it, or give another --out.")
    if len(there) == len(made):
        return made
    rows = ",".join([str(size.rows)] * size.tables + [str(ITEM_ROWS)] * ITEM_TABLES)
    bags = ",".join([str(size.ids)] * size.tables + ["1"] * ITEM_TABLES)
    data = [f"data.rows={rows}", f"data.ids_per_bag={bags}", "data.weighted=false", f"embedding.dim={size.dim}"]
    model = [f"model.bottom=64-{size.dim}", "model.top=128-64-1", "embedding.optimizer=sgd", "mesh.devices=1"]
    few = ["data.train_rows=64", "data.validation_rows=64", "data.test_rows=64", f"seed={size.seed}"]
    trainer = build_trainer(presets.load("synthetic_multihot", [*data, *model, *few]))
    state = trainer.init_state()
    users = [f"sparse_{number}" for number in range(size.tables)]
    for out, disk in zip(made, (users, []), strict=True):
        if out not in there:
            write(trainer, state, 0, out, "int8", ["cpu"], user=users, disk=disk)
    return made


class Workload:
    """Users with their bags, and the requests that they make.

    Attributes:
      size: of it.
      probability: that a request is of each user, float64 [users].
      ids: of each user in each table, int32 [users, tables, ids].
    """

    def __init__(self, size: Size) -> None:
        """Draws all bags."""
        self.size = size
        rng = np.random.default_rng(size.seed)
        weights = np.arange(1, size.users + 1, dtype=np.float64) ** -size.user_exponent
        self.probability = weights / weights.sum()
        zipf = BoundedZipf(size.rows, size.id_exponent)
        ranks = zipf.ids(rng.random((size.users, size.tables, size.ids)))
        self.ids = np.empty(ranks.shape, np.int32)
        for table in range(size.tables):  # frequent rows lie anywhere in the file, not side by side
            self.ids[:, table] = rng.permutation(size.rows).astype(np.int32)[ranks[:, table]]
        self._rng = np.random.default_rng(size.seed + 1)

    def presence(self, table: int) -> np.ndarray:
        """Probability that a request asks for each row of a table, float64 [rows]."""
        found = np.zeros(self.size.rows)
        ids = np.sort(self.ids[:, table], axis=1)
        first = np.concatenate([np.ones((len(ids), 1), bool), np.diff(ids, axis=1) > 0], axis=1)
        np.add.at(found, ids[first], np.broadcast_to(self.probability[:, None], ids.shape)[first])
        return found

    def users(self, count: int) -> np.ndarray:
        """The users of the next requests, int64 [count]."""
        return self._rng.choice(self.size.users, count, p=self.probability)

    def request(self, user: int) -> Scorable:
        """A request of a user, with candidates that are drawn evenly."""
        n, size = self.size.candidates, self.size
        bags = {f"sparse_{table}": Bags(self.ids[user, table][None], None, None) for table in range(size.tables)}
        for table in range(size.tables, size.tables + ITEM_TABLES):
            bags[f"sparse_{table}"] = Bags(self._rng.integers(0, ITEM_ROWS, (n, 1), np.int32), None, None)
        return Scorable(self._rng.normal(size=(n, 4)).astype(np.float32), bags, 1)
