"""Nanoseconds an id that the host takes to route a batch: of a static table, and of one that gives rows to keys.

    python benchmarks/dynamic_ids.py [--ids 65536] [--rows 1000000] [--batches 40]

Ids follow Zipf's law. Dynamic is `IdMap.advance`, then the same routing: with a row for each key, all of which came
before ("held"), or from an empty map on ("first"), and with a row for one key in four ("quarter", by age and by
frequency), after as many batches. Prints, in processor time, medians over batches of the static
table's routing, of `advance` and of the routing after it, and of how many times the first the other two are.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import numpy as np

from recjax.data.batch import Bags, Batch
from recjax.data.prepare.ids import stable_hash
from recjax.data.synthetic.clicks import BoundedZipf
from recjax.embedding.bind import bind
from recjax.embedding.dynamic.id_map import IdMap
from recjax.embedding.layout import BoundPlan
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import make_plan
from recjax.embedding.routing import host
from recjax.embedding.spec import DynamicIds, FeatureSpec, TableSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=65_536)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    L, V, rng = options.ids, options.rows, np.random.default_rng(0)
    zipf = BoundedZipf(V, 1.05)
    batches = [zipf.ids(rng.random(L)).astype(np.int64) for _ in range(options.batches)]
    keys = [stable_hash(ids).view(np.int64) for ids in batches]
    dense, one = np.zeros((L, 0), np.float32), np.ones(L, np.float32)

    def timed(each: Callable[[], object]) -> float:
        start = time.thread_time()
        each()
        return (time.thread_time() - start) / L * 1e9

    for devices in (1, 8):

        def of_rows(rows: int, devices: int = devices) -> BoundPlan:
            tables = (TableSpec("t", rows, 16, RowWiseAdagrad(0.1)),)
            return bind(make_plan("row_wise", tables), tables, (FeatureSpec("t", "t", 1),), devices)

        def routed(ids_L: np.ndarray, bound: BoundPlan) -> None:
            found = host.route_on_host(Batch(dense, {"t": Bags(ids_L[:, None])}, one, one), bound, L)
            host.pack(found, bound, found.required_capacities)

        bound = of_rows(V)
        routed(batches[0], bound)
        print(f"{devices} device(s), {L:,} ids, {V:,} rows")
        for name, capacity, evict in (
            ("held", V, "age"),
            ("held by frequency", V, "frequency"),
            ("first", V, "age"),
            ("quarter by age", V // 4, "age"),
            ("quarter by frequency", V // 4, "frequency"),
        ):
            of_keys = IdMap(DynamicIds(capacity, 1, evict))  # type: ignore[arg-type]
            if name != "first":
                if capacity == V:
                    of_keys.advance(stable_hash(np.arange(V)).view(np.int64))
                for batch in keys:
                    of_keys.advance(batch)
            held, found = of_rows(capacity + 1), []
            for ids_L, keys_L in zip(batches, keys, strict=True):
                static = timed(functools.partial(routed, ids_L, bound))
                rows_L: list[np.ndarray] = []
                advanced = timed(lambda: rows_L.append(of_keys.advance(keys_L)[0]))  # noqa: B023
                found.append((static, advanced, timed(functools.partial(routed, rows_L[0], held))))
            static, advanced, after = (statistics.median(of) for of in zip(*found, strict=True))
            times = statistics.median((b + c) / a for a, b, c in found)
            print(
                f"  {name}: static {static:.1f} ns an id; {advanced:.1f} + {after:.1f}, {times:.2f} times", flush=True
            )


if __name__ == "__main__":
    main()
