"""The engine of the optional kernels against Python's: every time, byte, event and loss is the same."""

import itertools
import re
import shutil
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.random import bit_generator
from support.simulating import collective, exchange, play, topology

from recjax.errors import ConfigError
from recjax.lab.simulate import compiled
from recjax.lab.simulate.collectives import ALGORITHMS
from recjax.lab.simulate.tcp import Tcp
from recjax.lab.simulate.workload import Operation

needs_it = pytest.mark.skipif(compiled.library() is None, reason="not installed: pip install ./kernels")
ALGORITHM_OF = {
    "all_reduce": ["ring", "direct", "double_binary_tree", "halving_doubling"],
    "all_to_all": ["direct", "ring"],
}
MOST: dict[str, list[float]] = {
    "window_bytes": [3000, 9000.5, 1e6],
    "segment_bytes": [700, 1460.25, 1e9],
    "buffer_bytes": [2500, 8000, 1e9],
    "ack_delay_ns": [0, 37],
    "start_segments": [0, 1, 3],
    "timeout_ns": [5000, 1e5],
}
FITS_NO_BUFFER = {key: of[0] for key, of in MOST.items()} | {"segment_bytes": 1e9}
transports = st.one_of(st.none(), st.fixed_dictionaries({key: st.sampled_from(of) for key, of in MOST.items()}))
networks = st.sampled_from(
    ["switch:4", "switch:8", "ring:4", "fully_connected:4,switch:2", "switch:2,switch:4", "ring:2,switch:2,ring:2"]
)


def both(run):
    """Results of `run` with the library and without it, or the text of the ConfigError that it raises."""
    found = []
    for library in (compiled.library, lambda: None):
        with mock.patch.object(compiled, "library", library):
            try:
                found.append(run())
            except ConfigError as error:
                found.append(str(error))
    return found


def assert_same(with_library, without):
    """Results of a simulation are equal to the last bit; errors may name different segments."""
    if isinstance(without, str):
        assert re.sub(r"[\d,]+", "N", with_library) == re.sub(r"[\d,]+", "N", without)
        return
    for name in ("time_ns", "shortcut", "refused", "bytes_on", "events", "lost"):
        assert getattr(with_library, name) == getattr(without, name), name
    for name in ("ready", "started", "finished", "waited", "late"):
        np.testing.assert_array_equal(getattr(with_library, name), getattr(without, name), name)


@needs_it
@given(
    st.sampled_from([(name, algorithm) for name, found in ALGORITHMS.items() for algorithm in found]),
    networks,
    st.integers(1, 30_000),
    st.integers(0, 3000),
    st.integers(1, 5),
    st.integers(1, 8),
    st.booleans(),
    transports,
    st.sampled_from(["auto", "never"]),
)
def test_a_collective(pair, text, size, latency, chunks, in_flight, congestion, transport, shortcut):
    tcp = Tcp(**transport) if transport and congestion else None
    how = {"chunks": chunks, "in_flight": in_flight, "congestion": congestion, "tcp": tcp, "shortcut": shortcut}
    delays = {"endpoint_delay_ns": size % 3 * 50, "copy_latency_ns": size % 2 * 30}
    assert_same(*both(lambda: collective(*pair, text, size, latency=latency, **how, **delays)))


@needs_it
@example("fully_connected:4,switch:2", 42, FITS_NO_BUFFER, "fifo", 1)
@given(networks, st.integers(0, 2**32 - 1), transports, st.sampled_from(["fifo", "lifo"]), st.integers(1, 4))
def test_several_operations_that_meet(text, seed, transport, scheduling, chunks):
    """Collectives of random sizes, unequal exchanges and ranks that come late, on the same connections."""
    rng = np.random.default_rng(seed)
    where = topology(text, latency=float(rng.integers(0, 100)))
    operations = []
    for number in range(rng.integers(2, 6)):
        name, needs = f"o{number}", tuple(f"o{i}" for i in range(number) if rng.random() < 0.3)
        if rng.random() < 0.3:
            times = tuple(rng.integers(0, 2000, where.size).astype(float).tolist())
            operations.append(Operation(name, "compute", duration_ns=times, depends_on=needs))
        elif rng.random() < 0.3:
            pairs = itertools.permutations(range(where.size), 2)
            sizes = {pair: float(rng.integers(0, 3000)) for pair in pairs}
            operations.append(exchange(sizes, where.size, name, depends_on=needs))
        else:
            kind = ["all_reduce", "all_to_all"][rng.integers(2)]
            size = float(rng.integers(1, 20_000))
            operations.append(Operation(name, "collective", collective=kind, bytes=size, depends_on=needs))
    algorithms = {kind: found[rng.integers(len(found))] for kind, found in ALGORITHM_OF.items()}
    tcp = Tcp(**transport) if transport else None
    how = {"scheduling": scheduling, "chunks": chunks, "in_flight": int(rng.integers(1, 5)), "tcp": tcp}
    assert_same(*both(lambda: play(operations, where, algorithms=algorithms, **how)))


@needs_it
def test_losses_are_the_same():
    """Seven ranks fill the buffer of a switch, with senders' windows and without."""
    sizes = {(rank, 0): 20_000.0 for rank in range(1, 8)}
    for start in (0, 1):
        tcp = Tcp(5000, 10, 6000, 1000, 3000, start)
        found, plain = both(lambda tcp=tcp: play([exchange(sizes, 8)], topology("switch:8", latency=5.0), tcp=tcp))
        assert found.lost > 10
        assert_same(found, plain)


@needs_it
def test_what_is_too_late_for_64_bits_is_played_by_python():
    """Ten thousand seconds of computing, and a message of as many bytes as take a day."""
    day = 86400 * 10**9
    operations = [
        Operation("compute", "compute", duration_ns=1e13),
        exchange({(0, 1): float(day)}, 2, depends_on=("compute",)),
    ]
    found = play(operations, topology("fully_connected:2"))
    assert found.time_ns == pytest.approx(1e13 + day, abs=1)


@pytest.fixture
def other_kernels(tmp_path, monkeypatch):
    """A folder recjax_kernels that is found first; what was found before comes back after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "recjax_kernels", raising=False)  # `find_spec` takes it from there
    monkeypatch.delenv("RECJAX_KERNELS", raising=False)
    folder = tmp_path / "recjax_kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    compiled.library.cache_clear()
    yield folder
    compiled.library.cache_clear()


def test_kernels_of_another_version_are_refused(other_kernels):
    with pytest.raises(ConfigError, match=r"another version of recjax.*pip install \./kernels"):
        compiled.library()
    shutil.copy(bit_generator.__file__, other_kernels / "_kernels.so")  # some library, which every Python here has
    with pytest.raises(ConfigError, match="another version of recjax"):
        collective("all_reduce", "direct", "switch:4", 1000.0)


def test_kernels_can_be_off(other_kernels, monkeypatch):
    monkeypatch.setenv("RECJAX_KERNELS", "off")
    assert compiled.library() is None
    assert collective("all_reduce", "direct", "switch:4", 1000.0).time_ns > 0
