"""NumPy's files as several threads read them."""

import concurrent.futures
import gc
import io
import time

import numpy as np
import pytest

from recjax.utils.npy import map_array, read_header


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


def test_many_threads_read_at_a_time(tmp_path, turns):
    np.save(tmp_path / "ids.npy", np.arange(12, dtype=np.int64))

    def read(_):
        for _ in range(10):
            np.testing.assert_array_equal(map_array(tmp_path / "ids.npy"), np.arange(12, dtype=np.int64), strict=True)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


def test_a_header_is_read_without_what_follows():
    for array in (np.zeros((3, 0), ">f8"), np.int8(1), np.zeros(2, [("é", "i4")])):
        file = io.BytesIO()
        np.lib.format.write_array(file, np.asarray(array))
        file.seek(0)
        assert read_header(file) == (array.shape, array.dtype)
    for content, words in ((b"PK", "magic"), (b"\x93NUMPY\2\0\xff\xff\xff\xff{" + bytes(10**6), "array header")):
        with pytest.raises(ValueError, match=words):
            read_header(io.BytesIO(content))
