"""The kernels that `recjax calibrate` measures: for each class a grid of sizes, and some sizes that are held out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from recjax.lab.calibrate.cases import Argument, Case, Run, in_place, runner

_HIGHEST = jax.lax.Precision.HIGHEST
IN_A_PASS = {"transcendental": 1, "convert": 8}  # of a class that computes: operations on an element of a case's pass


@dataclasses.dataclass(frozen=True)
class _Class:
    """A kernel class: its grid, sizes that are held out, and from sizes to the case's `make`."""

    kernel: str
    names: tuple[str, ...]
    grid: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    quick: tuple[tuple[int, ...], ...]
    quick_held_out: tuple[tuple[int, ...], ...]
    make: Callable[..., Run]
    fits: Callable[..., bool] = lambda *sizes: True

    def cases(self, quick: bool) -> Iterator[Case]:
        grid, held_out = (self.quick, self.quick_held_out) if quick else (self.grid, self.held_out)
        for sizes in itertools.product(*grid):
            if self.fits(*sizes):
                yield self._case(sizes, False)
        for sizes in held_out:
            yield self._case(sizes, True)

    def _case(self, sizes: Sequence[int], held_out: bool) -> Case:
        named = {name: float(size) for name, size in zip(self.names, sizes, strict=True)}
        return Case(self.kernel, named, functools.partial(self.make, *sizes), held_out)


def kernel_cases(quick: bool, dtypes: Sequence[str]) -> list[Case]:
    """The cases of all classes that one device runs.

    Args:
      quick: few and small ones.
      dtypes: of products, "f32" among them.
    """
    return [case for one in _classes(dtypes) for case in one.cases(quick)]


def _classes(dtypes: Sequence[str]) -> Iterator[_Class]:
    mnk, small, batches = ("m", "n", "k"), (4, 16, 64, 256, 1024), (64, 256, 1024, 4096, 16_384)
    outer = ((300, 100, 30), (2000, 500, 200), (1000, 32, 700), (8192, 128, 128))
    few = ((256, 4096), (1, 16, 256), (16, 256))
    for layout in ("nn", "nt"):
        yield _Class(
            f"matmul.{layout}_f32",
            mnk,
            (batches, (1, *small[1:]), small),
            outer,
            few,
            ((300, 100, 30),),
            functools.partial(_matmul, layout, "f32"),
        )
    # Two columns take as long as sixteen: where rows are summed over, XLA's library has tiles of so many.
    tn = functools.partial(_matmul, "tn", "f32")
    yield _Class(
        "matmul.tn_f32",
        mnk,
        ((4, 16, 60, 250, 1000), (1, 2, *small[1:]), batches),
        ((30, 100, 300), (200, 500, 2000), (700, 32, 1000), (128, 128, 8192)),
        ((16, 500), (1, 32, 512), (256, 4096)),
        ((30, 100, 300),),
        tn,
    )
    yield _Class(
        "matmul.strided_tn_f32",
        mnk,
        ((256, 512, 1024), (1, 2, *small[1:]), batches),
        ((512, 200, 2000), (768, 32, 1000), (512, 128, 8192)),
        ((256, 1024), (1, 32, 512), (256, 4096)),
        ((512, 100, 300),),
        tn,
    )
    for dtype in dtypes:
        if dtype != "f32":
            # Gradients of weights come as these, too: few rows, and sums over the batch.
            for layout, name in (("nn", f"matmul.{dtype}"), ("nt", f"matmul.nt_{dtype}")):
                yield _Class(
                    name,
                    mnk,
                    ((16, 128, 1024, 8192), (16, 128, 1024), (16, 128, 1024, 8192)),
                    (*outer[:2], (60, 200, 4000)),
                    ((16, 512, 4096), (16, 256), (16, 512, 4096)),
                    (),
                    functools.partial(_matmul, layout, dtype),
                    _affordable,
                )
    # Of an interaction: [F, D] of a sample with itself, and on the way back [F, F] with [F, D]. F is any number, and 27
    # for Criteo's tables; 25 take more than twice as long as 19.
    samples, vectors, dims = (256, 4096), (3, 5, 9, 14, 19, 27, 41), (8, 16, 32, 64, 128)
    batched = ("batch", "m", "n", "k")
    yield _Class(
        "batched_matmul.nt_f32",
        batched,
        (samples, vectors, vectors, dims),
        ((1024, 23, 23, 64), (2048, 10, 10, 16), (8192, 5, 5, 16)),
        ((256, 4096), (3, 27), (3, 27), (16, 128)),
        ((512, 11, 11, 32),),
        functools.partial(_batched, "nt"),
        lambda B, m, n, k: m == n,
    )
    yield _Class(
        "batched_matmul.nn_f32",
        batched,
        (samples, vectors, dims, vectors),
        ((1024, 23, 64, 23), (2048, 10, 16, 10), (8192, 5, 16, 5)),
        ((256, 4096), (3, 27), (16, 128), (3, 27)),
        ((512, 11, 32, 11),),
        functools.partial(_batched, "nn"),
        lambda B, m, n, k: m == k,
    )
    # XLA calls a library for each product of so small matrices, and nothing for larger ones.
    for layout in ("nt", "nn"):
        yield _Class(
            f"batched_matmul.each_{layout}_f32",
            batched,
            (samples, (4, 6), (4, 6), (4, 6)),
            ((1024, 5, 5, 4),) if layout == "nt" else ((1024, 5, 4, 5),),
            ((256, 1024), (4, 6), (4,), (4,)),
            (),
            functools.partial(_batched, layout),
        )
    lookup = ("rows", "row_bytes", "table_bytes")
    # Rows of every width that models have: 64 floats may take longer than 128, which XLA makes other code for. Times of
    # a row grow by a multiple where those touched no longer fit into a cache.
    rows, row_bytes = (256, 2**11, 2**14, 2**17, 2**20), (4, 16, 32, 64, 128, 256, 512)
    held = ((1000, 128, 2**20), (20_000, 64, 2**24), (10_000, 256, 2**26))
    yield _Class(
        "gather",
        lookup,
        (rows, row_bytes, (2**16, 2**21, 2**25, 2**27)),
        held,
        ((256, 2**14), (4, 64, 512), (2**16, 2**25)),
        held[:1],
        _gather,
        _fits,
    )
    for kernel, look_up in (
        ("gather.fused", _gather_fused),
        ("scatter.add", functools.partial(_scatter_add, False)),
        ("scatter.sorted_add", functools.partial(_scatter_add, True)),
    ):
        yield _Class(
            kernel,
            lookup,
            (rows, row_bytes, (2**16, 2**21, 2**25)),
            held[:2],
            ((256, 2**15), (4, 64, 512), (2**16, 2**25)),
            held[:1],
            look_up,
            _fits,
        )
    yield _Class(
        "scatter.sorted",
        lookup,
        (rows[:-1], row_bytes, (2**18, 2**21, 2**25, 2**27)),
        held,
        ((256, 2**15), (4, 64, 512), (2**18, 2**25)),
        held[:1],
        _scatter_sorted,
        _has_rows,
    )
    yield _Class(
        "sort",
        ("keys", "operands"),
        ((2**8, 2**12, 2**16, 2**18), (1, 2)),
        ((20_000, 2),),
        ((2**8, 2**14), (1, 2)),
        ((2000, 2),),
        _sort,
    )
    for kernel, each, make in (
        ("elementwise", 8, _pass(lambda x: x * 1.5 + 1, 8)),
        ("elementwise.bf16", 6, _pass(lambda x: (x * 1.5 + 1).astype(jnp.bfloat16), 6)),
        # columns of rows, as they are cut
        ("copy", 128, _pass(lambda x: jax.lax.slice_in_dim(x, 16, 32, axis=1), 128, 48)),
        ("copy.joined", 512, _copy_joined),
        ("copy.fused_joined", 512, _copy_fused_joined),
        ("copy.transposed", 8, functools.partial(_copy_transposed, "f32")),
        ("copy.bf16_transposed", 4, functools.partial(_copy_transposed, "bf16")),
        ("reduce.rows", 256, _pass(lambda x: x.sum(axis=1), 256, 64)),
        ("reduce.columns", 256, _pass(lambda x: x.sum(axis=0), 256, 64)),
    ):
        yield _Class(
            kernel,
            ("bytes",),
            (_bytes(each, *range(8, 28)),),
            _held_bytes(each, 11, 16, 22),
            (_bytes(each, 10, 16, 20, 26),),
            _held_bytes(each, 17),
            make,
        )
    yield _Class(
        "transcendental",
        ("elements",),
        (tuple(2**e for e in range(6, 23)),),
        ((50_000,),),
        ((2**8, 2**16, 2**20),),
        (),
        _pass(lambda x: jnp.exp(x), 1),
    )
    yield _Class(
        "convert",
        ("elements",),
        (tuple(2**e for e in range(9, 26)),),
        ((400_000,),),
        ((2**11, 2**19, 2**23),),
        (),
        _pass(_rounded, IN_A_PASS["convert"]),
    )


def _bytes(each: int, *exponents: int) -> tuple[int, ...]:
    """About 2 to these exponents of bytes, for a count of elements or rows with many factors of two, as a batch has.

    Of an odd number of elements XLA's code is several times as slow.
    """
    return tuple(sorted({each << max(0, exponent - each.bit_length() + 1) for exponent in exponents}))


def _held_bytes(each: int, *exponents: int) -> tuple[tuple[int], ...]:
    """Some in the midst between those of `_bytes`: a quarter more than these."""
    return tuple((size + size // 4,) for size in _bytes(each, *exponents))


def _affordable(m: int, n: int, k: int) -> bool:
    return m * n * k <= 2**33


def _fits(rows: int, row_bytes: int, table_bytes: int) -> bool:
    return rows * row_bytes <= 2**26


def _has_rows(rows: int, row_bytes: int, table_bytes: int) -> bool:
    return rows * row_bytes <= table_bytes


def _values(shape: tuple[int, ...], dtype: str = "f32", plus: float = 0.0) -> Argument:
    """Values that are neither zero nor alike."""
    return Argument(shape, _cycles(dtype, plus).dtype, lambda: jnp.array(np.resize(_cycles(dtype, plus), shape)))


@functools.cache
def _cycles(dtype: str, plus: float) -> np.ndarray:
    """Values by turns, many times over: a copy of them takes no longer than memory does."""
    cycle = np.arange(251, dtype=np.float32) / 251 + np.float32(0.5 + plus)
    return np.tile(cycle.astype({"f32": np.float32, "bf16": jnp.bfloat16}[dtype]), 4096)


def _table_of(R: int, D: int) -> Argument:
    """A table that a case updates in place."""
    return Argument((R, D), jnp.float32, lambda: jnp.zeros((R, D)))


def _ids(rows: int, of: int, in_order: bool = False) -> Argument:
    def make() -> jax.Array:
        ids = np.random.default_rng(rows).integers(0, max(1, of), rows, dtype=np.int32)
        return jnp.asarray(np.sort(ids) if in_order else ids)

    return Argument((rows,), jnp.int32, make)


def _sorted_ids(rows: int, of: int) -> Argument:
    """Row numbers that differ, in order."""
    count = min(rows, of)

    def make() -> jax.Array:
        return jnp.asarray(np.sort(np.random.default_rng(rows).choice(of, count, replace=False)).astype(np.int32))

    return Argument((count,), jnp.int32, make)


def _matmul(layout: str, dtype: str, m: int, n: int, k: int) -> Run:
    left = _values((m, k) if layout[0] == "n" else (k, m), dtype)
    right = _values((k, n) if layout[1] == "n" else (n, k), dtype)
    over = (((int(layout[0] == "n"),), (int(layout[1] == "t"),)), ((), ()))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a, b, over, precision=_HIGHEST, preferred_element_type=jnp.float32)

    return runner(product, left, right)


def _batched(layout: str, batch: int, m: int, n: int, k: int) -> Run:
    over = (((2,), (2 if layout == "nt" else 1,)), ((0,), (0,)))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a, b, over, precision=_HIGHEST)

    return runner(product, _values((batch, m, k)), _values((batch, n, k) if layout == "nt" else (batch, k, n)))


def _table(row_bytes: int, table_bytes: int) -> tuple[int, int]:
    D = max(1, row_bytes // 4)
    return max(1, table_bytes // (4 * D)), D


def _gather(rows: int, row_bytes: int, table_bytes: int) -> Run:
    R, D = _table(row_bytes, table_bytes)

    def gathered(table: jax.Array, ids: jax.Array) -> jax.Array:
        return table.at[ids].get(mode="fill", fill_value=0)

    return runner(gathered, _values((R, D)), _ids(rows, R))


def _gather_fused(rows: int, row_bytes: int, table_bytes: int) -> Run:
    R, D = _table(row_bytes, table_bytes)

    def moved(table: jax.Array, ids: jax.Array, x: jax.Array) -> jax.Array:
        return table.at[ids].get(mode="fill", fill_value=0) - 0.5 * x

    return runner(moved, _values((R, D)), _ids(rows, R), _values((rows, D)))


def _scatter_add(in_order: bool, rows: int, row_bytes: int, table_bytes: int) -> Run:
    R, D = _table(row_bytes, table_bytes)

    def added(table: jax.Array, ids: jax.Array, new: jax.Array) -> jax.Array:
        return table.at[ids].add(new, mode="drop", indices_are_sorted=in_order)

    return in_place(added, _table_of(R, D), _ids(rows, R, in_order), _values((rows, D)))


def _scatter_sorted(rows: int, row_bytes: int, table_bytes: int) -> Run:
    R, D = _table(row_bytes, table_bytes)
    ids = _sorted_ids(rows, R)

    def written(table: jax.Array, ids: jax.Array, new: jax.Array) -> jax.Array:
        return table.at[ids].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    return in_place(written, _table_of(R, D), ids, _values((*ids.shape, D)))


def _sort(keys: int, operands: int) -> Run:
    given = [_ids(keys, 2**30), *(Argument((keys,), jnp.int32, lambda: jnp.arange(keys)) for _ in range(operands - 1))]
    return runner(lambda *given: jax.lax.sort(given, num_keys=1), *given)


def _pass(function: Callable[[jax.Array], jax.Array], each: int, *columns: int) -> Callable[[int], Run]:
    """From a size, in bytes or elements, to a pass over values, or rows of so many columns: one for each `each`."""
    return lambda size: runner(function, _values((max(1, size // each), *columns)))


def _rounded(x: jax.Array) -> jax.Array:
    """Rounds to bfloat16 after each operation."""
    for _ in range(IN_A_PASS["convert"]):
        x = (x * 1.01).astype(jnp.bfloat16).astype(jnp.float32)
    return x


def _copy_joined(moved: int) -> Run:
    D = 16
    parts = [_values((max(1, moved // (8 * 4 * D)), D), plus=i) for i in range(4)]
    return runner(lambda *parts: jnp.concatenate(parts, axis=1), *parts)


def _copy_fused_joined(moved: int) -> Run:
    """Flat and of unlike lengths, as gradients are joined: the change of shape makes it a fusion."""
    D = 16
    parts = [_values((max(1, moved // (8 * part * D)), D), plus=i) for i, part in enumerate((8, 2, 4, 8))]
    return runner(lambda *parts: jnp.concatenate([part.reshape(-1) for part in parts]), *parts)


def _copy_transposed(dtype: str, moved: int) -> Run:
    """A batch of 4,096 rows, or fewer where it would have less than 8 columns."""
    count = max(8, moved // {"f32": 8, "bf16": 4}[dtype])
    columns = max(8, count // 4096)
    return runner(lambda x: jnp.copy(x.T), _values((count // columns, columns), dtype))
