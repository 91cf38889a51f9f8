"""Initial values that know nothing of mesh or plan, and the way of tables to the host and back."""

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from support.problems import mesh_of

from recjax.embedding import buffers as product
from recjax.embedding.bind import bind
from recjax.embedding.buffers import initial_rows, initialise
from recjax.embedding.collection import export_tables, import_tables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.optim import Adam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import TrainingError
from recjax.utils import lazy_arrays
from recjax.utils.lazy_arrays import LazyArray, load

pytestmark = pytest.mark.light_compile

ADAGRAD = RowWiseAdagrad(0.1, initial_accumulator=0.25)
USER = TableSpec("user", 1003, 6, ADAGRAD)
TINY = TableSpec("tiny", 2, 6, ADAGRAD)  # fewer rows than devices
ITEM = TableSpec("item", 517, 6, ADAGRAD, init_scale=2.0)
OTHER = TableSpec("other", 70, 4, Sgd())
WIDE = TableSpec("wide", 50, 4, Adam())  # slots of one number an element
TABLES = (USER, TINY, ITEM, OTHER, WIDE)


def bound_to(tables: tuple[TableSpec, ...], plan: str, devices: int, hosts: int = 1) -> BoundPlan:
    return bind(
        make_plan(plan, tables), tables, tuple(FeatureSpec(t.name, t.name) for t in tables), devices, hosts=hosts
    )


def hosts_for(plan: str) -> int:
    """One, unless the placement is of two levels."""
    return 2 if plan == "grid" else 1


@functools.cache
def values(table: TableSpec, seed: int = 0) -> np.ndarray:
    """Initial values in storage order."""
    rows = bound_to((table,), "row_wise", 1).groups[0].segments[0].order.row(np.arange(table.rows))
    return np.asarray(initial_rows(seed, table.name, jnp.asarray(rows, jnp.int32), table.dim, table.scale))


@pytest.mark.parametrize(
    ("devices", "plan", "tables"),
    [
        (1, "row_wise", (USER, TINY, ITEM)),
        (2, "row_wise", (ITEM, USER)),
        (3, "row_wise", (USER, TINY)),
        (8, "row_wise", (USER, TINY, ITEM)),
        (3, "data_parallel", (ITEM, USER)),
        (3, "table_wise", (USER, TINY, ITEM)),
        (8, "table_wise", (USER, TINY)),  # most devices hold nothing
        (1, "column_wise", (USER, TINY)),
        (4, "column_wise", (USER, TINY, ITEM)),  # 2, 2, 1 and 1 of 6 columns
        (8, "column_wise", (USER, ITEM)),  # more devices than columns
        (8, "grid", (USER, TINY, ITEM)),
    ],
)
def test_initial_values_depend_on_no_mesh_plan_or_neighbour(devices, plan, tables, monkeypatch):
    monkeypatch.setattr(product, "CHUNK_FLOATS", 300)  # 50 rows at a time: several chunks, the last one overlapping
    bound = bound_to(tables, plan, devices, hosts_for(plan))
    buffers, slots = initialise(bound, mesh_of(devices, bound.hosts), 0)
    exported = load(export_tables(bound, buffers, slots))
    assert exported.keys() == {t.name for t in tables}
    for table in tables:
        np.testing.assert_array_equal(exported[table.name]["rows"], values(table))
    for group in bound.groups:
        assert buffers[group.name].shape == (group.parts * group.rows, group.width)
        used = np.zeros((group.parts * group.rows, group.width), bool)
        for table in group.segments:
            for piece in group.pieces(table):
                first = piece.part * group.rows + piece.offset
                used[first : first + piece.stop - piece.start, : piece.last - piece.first] = True
        assert not np.asarray(buffers[group.name])[~used].any()  # padding is zeros
        for name, slot in group.slots().items():
            assert slots[group.name][name].shape == used.shape[:1] + slot.shape
            assert (np.asarray(slots[group.name][name]) == slot.initial).all()


def test_float64_tables_start_from_the_same_numbers():
    bound = bound_to((USER,), "row_wise", 2)
    with jax.enable_x64(True):
        exported = load(export_tables(bound, *initialise(bound, mesh_of(2), 0, jnp.float64)))["user"]
    assert exported["rows"].dtype == exported["sum_of_squares"].dtype == np.float64
    np.testing.assert_array_equal(exported["rows"], values(USER))  # and one chunk gives the same as many


def test_every_part_of_the_key_matters():
    """Seed, table, row and column; and nothing else: a slice of the columns is the same numbers."""
    rows = jnp.arange(100, dtype=jnp.int32)
    draw = np.asarray(initial_rows(5, "user", rows, 8, 1.0))
    assert len(np.unique(draw)) > 790  # of 800: neither rows nor columns repeat
    for seed, name in ((6, "user"), (5, "resu"), (5, "user2")):
        other = np.asarray(initial_rows(seed, name, rows, 8, 1.0))
        assert abs(np.corrcoef(other.ravel(), draw.ravel())[0, 1]) < 0.2
    np.testing.assert_array_equal(initial_rows(5, "user", rows[::-1], 8, 1.0), draw[::-1])
    np.testing.assert_array_equal(initial_rows(5, "user", rows, 3, 1.0), draw[:, :3])
    np.testing.assert_array_equal(initial_rows(5, "user", rows, 8, 0.25), draw / 4)
    largest = initial_rows(5, "user", jnp.asarray([2**31 - 2], jnp.int32), 8, 1.0)
    assert not (np.asarray(largest) == draw).all(axis=1).any()


def test_names_of_one_checksum_draw_values_of_their_own():
    one, other = "t327175_0", "t395601_19"
    assert zlib.crc32(one.encode()) == zlib.crc32(other.encode())
    rows = jnp.arange(100, dtype=jnp.int32)
    draws = [np.asarray(initial_rows(5, name, rows, 8, 1.0)) for name in (one, other)]
    assert abs(np.corrcoef(draws[0].ravel(), draws[1].ravel())[0, 1]) < 0.2


def test_values_are_uniform_within_the_scale():
    """Mean 0, variance s^2 / 3, and tenths of the range filled alike, each within five standard errors."""
    table = TableSpec("t", 20_000, 16, Sgd())
    s, n = table.scale, 20_000 * 16
    assert s == math.sqrt(1 / 20_000)
    x = np.asarray(initial_rows(0, "t", jnp.arange(20_000, dtype=jnp.int32), 16, s)).astype(np.float64)
    # the bounds are float32's of s; only -s itself may be drawn
    assert x.min() >= -np.float32(s) and x.max() < np.float32(s)
    assert x.min() < -0.9999 * s and x.max() > 0.9999 * s
    assert abs(x.mean()) < 5 * s / math.sqrt(3 * n)
    # Var[x^2] = E[x^4] - E[x^2]^2 = s^4 / 5 - s^4 / 9
    assert abs((x**2).mean() - s**2 / 3) < 5 * s**2 * math.sqrt(4 / 45 / n)
    counts, _ = np.histogram(x, bins=10, range=(-s, s))
    assert np.abs(counts - n / 10).max() < 5 * math.sqrt(n * 0.09)
    # no pattern along rows or columns
    assert np.abs(x.mean(axis=0)).max() < 5 * s / math.sqrt(3 * 20_000)
    assert np.abs(x.mean(axis=1)).max() < 6 * s / math.sqrt(3 * 16)


def test_tables_of_the_same_sizes_are_initialised_by_the_program_that_is_there(monkeypatch):
    """Names, seeds, scales and the order of rows are its arguments: a second trainer compiles nothing."""
    compiled = []
    compile_one = compiler.compile_or_get_cached

    def counted(backend: Any, computation: Any, *arguments: Any, **options: Any) -> Any:
        compiled.append(str(computation.operation.attributes["sym_name"]))
        return compile_one(backend, computation, *arguments, **options)

    monkeypatch.setattr(compiler, "compile_or_get_cached", counted)
    first, other = TableSpec("first", 101, 6, ADAGRAD), TableSpec("other", 100, 6, ADAGRAD, init_scale=0.5)
    for table, seed in ((first, 0), (first, 1), (other, 1)):
        bound = bound_to((table,), "row_wise", 3)
        buffers, slots = initialise(bound, mesh_of(3), seed)
        rows = load(export_tables(bound, buffers, slots))[table.name]["rows"]
        np.testing.assert_array_equal(rows, values(table, seed))
    assert compiled.count('"jit__initial_block"') == 1


def test_initialisation_needs_no_temporary_of_the_tables_size():
    bound = bound_to((TableSpec("large", 2**20, 16, ADAGRAD),), "row_wise", 1)
    compiled = jax.jit(lambda: initialise(bound, mesh_of(1), 0)).lower().compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes >= 2**20 * 17 * 4  # 64 MiB of rows, 4 MiB of slots
    assert memory.temp_size_in_bytes < 6 * 2**20


def some_tables() -> dict[str, dict[str, np.ndarray]]:
    """Arrays as a checkpoint holds them, with numbers that a careless copy would alter."""
    rng = np.random.default_rng(0)
    saved = {}
    for table in TABLES:
        arrays = {"rows": rng.normal(size=(table.rows, table.dim)).astype(np.float32)}
        arrays["rows"][0, :4] = [-0.0, np.nan, 1e-42, np.inf]
        for name, slot in table.optimizer.slots(table.dim).items():
            arrays[name] = rng.random((table.rows, *slot.shape)).astype(np.float32)
        saved[table.name] = arrays
    return saved


@pytest.mark.parametrize(
    ("devices", "plan"),
    [(1, "row_wise"), (2, "auto"), (3, "row_wise"), (8, "row_wise"), (8, "data_parallel")]
    + [(3, "table_wise"), (8, "table_wise"), (1, "column_wise"), (4, "column_wise"), (8, "column_wise")]
    + [(8, "grid")],
)
def test_tables_come_back_bit_for_bit_through_any_mesh_and_plan(devices, plan):
    saved = some_tables()
    bound = bound_to(TABLES, plan, devices, hosts_for(plan))
    buffers, slots = import_tables(bound, mesh_of(devices, bound.hosts), saved)
    returned = load(export_tables(bound, buffers, slots))
    assert returned.keys() == saved.keys()
    for name, arrays in saved.items():
        assert returned[name].keys() == arrays.keys()
        for key, array in arrays.items():
            assert returned[name][key].dtype == np.float32 and returned[name][key].shape == array.shape
            assert returned[name][key].tobytes() == array.tobytes()
            assert returned[name][key].flags.owndata  # a view would pin the device's buffer

    for group in bound.groups:  # each row is where `locate` says, which export alone could not show
        full = np.empty((group.owners, group.rows, group.dim), np.float32)
        parts = np.split(np.asarray(buffers[group.name]), group.parts)
        for part, piece in zip(parts, group.pieces(group.segments[0]), strict=True):
            full[group.place(piece.part)[0], :, piece.first : piece.last] = part[:, : piece.last - piece.first]
        full = full.reshape(-1, group.dim)
        for table in group.segments:
            owner, slot, _ = table.locate(np.arange(table.spec.rows))
            by_row = saved[table.spec.name]["rows"][table.order.position(np.arange(table.spec.rows))]
            assert full[owner * group.rows + slot].tobytes() == by_row.tobytes()
        assert len(buffers[group.name].sharding.device_set) == devices
        assert buffers[group.name].sharding.is_fully_replicated == (group.parts == 1)


@pytest.mark.parametrize(
    ("name", "key", "change", "message"),
    [
        (
            "user",
            None,
            None,
            r"holds nothing for 'rows' of table 'user', but the model needs shape \(1003, 6\), float32",
        ),
        ("item", "rows", None, "holds nothing for 'rows' of table 'item'"),
        ("item", "sum_of_squares", None, "holds nothing for 'sum_of_squares' of table 'item'"),
        ("item", "rows", lambda x: x[:-1], r"holds shape \(516, 6\), float32 for 'rows' of table 'item'"),
        ("item", "rows", lambda x: x[:, :5], r"shape \(517, 5\), float32"),
        (
            "other",
            "rows",
            lambda x: x.astype(np.float64),
            r"shape \(70, 4\), float64 .* needs shape \(70, 4\), float32",
        ),
        ("tiny", "sum_of_squares", lambda x: x[:, None], r"shape \(2, 1\), float32 for 'sum_of_squares'"),
    ],
)
def test_arrays_of_another_model_are_refused(name, key, change, message):
    saved = some_tables()
    if key is None:
        del saved[name]
    elif change is None:
        del saved[name][key]
    else:
        saved[name][key] = change(saved[name][key])
    with pytest.raises(TrainingError, match=message):
        import_tables(bound_to(TABLES, "row_wise", 2), mesh_of(2), saved)


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "plan"), [(3, "row_wise"), (2, "data_parallel"), (3, "table_wise"), (3, "column_wise")]
)
def test_parts_are_all_that_an_export_reads_and_an_import_takes(devices, plan, monkeypatch):
    """Whatever the blocks of the store; the host-copy path is `load` of the same arrays."""
    saved, mesh = some_tables(), mesh_of(devices)
    bound = bound_to(TABLES, plan, devices)
    whole = load(export_tables(bound, *import_tables(bound, mesh, saved)))
    monkeypatch.setattr(lazy_arrays, "PART_BYTES", 1000)
    read = []

    def stored(array: np.ndarray, block: tuple[int, ...]) -> LazyArray:
        def part(index: Any) -> np.ndarray:
            read.append(array[index].nbytes)
            return array[index]

        return LazyArray(array.shape, array.dtype, part, block)

    for block in ((1, 1), (13, 6), (200, 1), (41, 4)):
        parted = {
            name: {key: stored(x, block[: x.ndim]) for key, x in arrays.items()} for name, arrays in saved.items()
        }
        read.clear()
        exported = export_tables(bound, *import_tables(bound, mesh, parted))
        assert sum(read) == sum(x.nbytes for arrays in saved.values() for x in arrays.values()), "each byte once"
        assert max(read) <= 1000
        for name, arrays in saved.items():
            for key, array in arrays.items():
                parts = list(exported[name][key].parts())
                assert len(parts) >= array.nbytes // 1000
                for part in parts:
                    got = exported[name][key].read(part)
                    assert got.nbytes <= 1000 and got.tobytes() == array[part].tobytes()
                assert whole[name][key].tobytes() == array.tobytes()
