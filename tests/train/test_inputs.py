"""The input stream by itself: a reader and a router that only count. Nothing is lost, cut or read for other sizes."""

import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from recjax.train.inputs import InputStream
from recjax.train.routers import InFlight

PERIOD = 3


class Router:
    """Gives the number of each batch and the capacities that it was completed with."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def start(self, batch: InFlight, capacities: dict[str, int]) -> InFlight:
        assert capacities["rows"] >= batch.routed.required_capacities["rows"]
        return batch

    def complete(self, batch: InFlight, capacities: dict[str, int]) -> Any:
        assert capacities["rows"] >= batch.required_capacities["rows"]
        return batch.batch, capacities["rows"]


def stream_of(required: list[int], size: int, epoch: int, depth: int) -> InputStream:
    """Batches of `size` samples, `epoch` of them in an epoch, that require so many rows each."""
    per_epoch = -(-epoch // size)

    def read(position: int) -> Iterator[InFlight]:
        begun, offset = divmod(position, epoch)
        for number in range(begun * per_epoch + offset // size, len(required)):
            routed: Any = SimpleNamespace(required_capacities={"rows": required[number]})
            batch: Any = number
            yield InFlight(batch, routed)

    router: Any = Router(depth)
    return InputStream(read, router, size, epoch, PERIOD)


STREAMS = st.tuples(
    st.lists(st.integers(0, 200), min_size=1, max_size=20), st.integers(1, 7), st.integers(1, 20), st.integers(0, 2)
)


@given(STREAMS, st.data())
def test_a_stream_that_goes_on_gives_what_was_left_in_the_same_sizes(made, data):
    stream, whole, states = stream_of(*made), [], []
    states.append(json.dumps(stream.state_dict()))
    for given_now in stream:
        whole.append(given_now)
        states.append(json.dumps(stream.state_dict()))
    assert [number for number, _ in whole] == list(range(len(made[0])))
    at = data.draw(st.integers(0, len(whole)))
    again = stream_of(*made)
    list(itertools.islice(again, data.draw(st.integers(0, len(whole)))))  # wherever it is
    again.load_state_dict(json.loads(states[at]))
    assert list(again) == whole[at:]


@given(STREAMS)
def test_the_position_is_that_of_the_next_sample(made):
    required, size, epoch, _ = made
    stream, position = stream_of(*made), 0
    for _ in stream:
        position += min(size, epoch - position % epoch)
        assert stream.position == position == stream.state_dict()["position"]


def test_sizes_fall_after_a_period_that_would_have_done_with_less():
    """Rungs by hand: 100 and its 3% fit into 104; 10 into 16."""
    sizes = [size for _, size in stream_of([100, 10, 10, 10, 10, 10, 10], 2, 100, 0)]
    assert sizes == [104, 104, 104, 104, 104, 104, 16]


def test_a_closed_stream_reads_again_what_was_under_way():
    stream = stream_of([1] * 9, 2, 100, 2)
    assert [number for number, _ in itertools.islice(stream, 3)] == [0, 1, 2]
    stream.close()
    assert [number for number, _ in stream] == [3, 4, 5, 6, 7, 8]
