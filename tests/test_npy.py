"""NumPy's files as several threads read them."""

import concurrent.futures
import gc
import time
import zipfile

import numpy as np
import pytest

from recjax.utils.npy import map_array, open_arrays

ARRAYS = {
    "ids": np.arange(12, dtype=np.int64),
    "columns": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "none": np.zeros((0, 3), np.uint8),
    "one": np.array(3.5),
}


@pytest.fixture
def file(tmp_path):
    np.savez(tmp_path / "arrays.npz", **ARRAYS)
    return tmp_path / "arrays.npz"


def test_arrays_are_those_that_numpy_wrote(file, tmp_path):
    with open_arrays(file) as arrays:
        assert set(arrays) == set(ARRAYS) and len(arrays) == 4 and "ids" in arrays and "other" not in arrays
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(arrays[name], array, strict=True)
    np.save(tmp_path / "ids.npy", ARRAYS["ids"])
    np.testing.assert_array_equal(map_array(tmp_path / "ids.npy"), ARRAYS["ids"], strict=True)


@pytest.fixture
def turns():
    """Lets threads take turns where the parser makes objects: collecting garbage may call Python, as with JAX."""

    def wait(*_):
        time.sleep(0)

    thresholds = gc.get_threshold()
    gc.callbacks.append(wait)
    gc.set_threshold(5)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(wait)


def test_many_threads_read_at_a_time(file, tmp_path, turns):
    np.save(tmp_path / "ids.npy", ARRAYS["ids"])

    def read(_):
        for _ in range(10):
            with open_arrays(file) as arrays:
                assert all(np.array_equal(arrays[name], array) for name, array in ARRAYS.items())
            assert len(map_array(tmp_path / "ids.npy")) == 12

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


def test_python_objects_are_refused(tmp_path):
    np.savez(tmp_path / "objects.npz", objects=np.array([{}], object))
    with open_arrays(tmp_path / "objects.npz") as arrays, pytest.raises(ValueError, match="Python objects"):
        arrays["objects"]


def test_damage_is_noticed(file):
    content = bytearray(file.read_bytes())
    content[content.index(np.int64(7).tobytes())] ^= 1
    file.write_bytes(content)
    with open_arrays(file) as arrays, pytest.raises(zipfile.BadZipFile, match="CRC"):
        arrays["ids"]
