"""Tables of products that nobody measured."""

from pathlib import Path

from recjax.models.dense import PRODUCTS, LayerShape
from recjax.planning.product_table import Table, Times, this_machine, write


def times(*, default: dict[str, float] | None = None, **products: dict[str, float]) -> Times:
    """Microseconds of a layer's products: those given, and `default` for the others."""
    return {product: products.get(product, default or {"kernels": 10.0, "xla": 20.0}) for product in PRODUCTS}


def write_table(path: Path, us: Times, dtype: str = "float32", **machine: str) -> Path:
    """A table of one layer, of this machine but for what `machine` says."""
    write(Table({**this_machine(), **machine}, ((LayerShape(64, 16, 8, dtype), us),)), path)
    return path
