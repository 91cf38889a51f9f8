"""The input stream by itself: a reader and a router that only count. Nothing is lost, cut or read for other sizes."""

import itertools
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.embedding.routing.routed import OrderedStage
from recjax.train.inputs import InputStream
from recjax.train.routers import InFlight

PERIOD = 3


class Router:
    """Gives the numbers of batches and the sizes that they were put together in."""

    bound = SimpleNamespace(lookups=(), groups=(), pooled=())

    def counted(self, routed: Any) -> dict[str, int]:
        return {}

    def put(self, batches: Sequence[InFlight], capacities: dict[str, int]) -> Any:
        assert capacities["rows"] >= max(batch.routed.required_capacities["rows"] for batch in batches)
        return [(batch.batch, capacities["rows"]) for batch in batches]


def calls_of(stream: InputStream, count: int) -> Iterator[Any]:
    """All that a stream gives, `count` batches a call."""
    while True:
        try:
            yield stream.take(count)
        except StopIteration:
            return


def stream_of(required: list[int], size: int, epoch: int) -> InputStream:
    """Batches of `size` samples, `epoch` of them in an epoch, that require so many rows each."""
    per_epoch = -(-epoch // size)

    def read(position: int) -> Iterator[InFlight]:
        begun, offset = divmod(position, epoch)
        for number in range(begun * per_epoch + offset // size, len(required)):
            routed: Any = SimpleNamespace(required_capacities={"rows": required[number]})
            batch: Any = number
            yield InFlight(batch, routed)

    router: Any = Router()
    return InputStream(read, router, size, epoch, PERIOD)


STREAMS = st.tuples(st.lists(st.integers(0, 200), min_size=1, max_size=20), st.integers(1, 7), st.integers(1, 20))


@given(STREAMS, st.integers(1, 4), st.data())
def test_a_stream_that_goes_on_gives_what_was_left_in_the_same_sizes(made, count, data):
    stream, whole, states = stream_of(*made), [], []
    states.append(json.dumps(stream.state_dict()))
    for given_now in calls_of(stream, count):
        whole.append(given_now)
        states.append(json.dumps(stream.state_dict()))
    assert [number for call in whole for number, _ in call] == list(range(len(made[0])))
    assert {len(call) for call in whole} <= {1, count}
    at = data.draw(st.integers(0, len(whole)))
    again = stream_of(*made)
    list(itertools.islice(calls_of(again, count), data.draw(st.integers(0, len(whole)))))  # wherever it is
    again.load_state_dict(json.loads(states[at]))
    assert list(calls_of(again, count)) == whole[at:]


@given(STREAMS)
def test_the_position_is_that_of_the_next_sample(made):
    _, size, epoch = made
    stream, position = stream_of(*made), 0
    for _ in stream:
        position += min(size, epoch - position % epoch)
        assert stream.position == position == stream.state_dict()["position"]


def test_sizes_fall_after_a_period_that_would_have_done_with_less():
    """Rungs by hand: 100 and its 3% fit into 104; 10 into 16."""
    sizes = [size for ((_, size),) in stream_of([100, *[10] * 9], 2, 100)]
    assert sizes == [*[104] * 9, 16]  # the first period has three batches, the next one six


def test_a_closed_stream_reads_again_what_was_under_way():
    stream = stream_of([1] * 9, 2, 100)
    assert [number for number, _ in stream.take(3)] == [0, 1, 2]
    stream.close()
    assert [number for ((number, _),) in stream] == [3, 4, 5, 6, 7, 8]


def test_batches_before_one_that_cannot_be_read_are_given_first():
    def read(position: int) -> Iterator[InFlight]:
        for number in range(5):
            batch: Any = number
            yield InFlight(batch, routed)
        raise ValueError("the sixth")

    routed: Any = SimpleNamespace(required_capacities={"rows": 1})
    router: Any = Router()
    stream, found = InputStream(read, router, 2, 100, PERIOD), []
    with pytest.raises(ValueError, match="the sixth"):
        while True:
            found.append([number for number, _ in stream.take(3)])
    assert found == [[0, 1, 2], [3], [4]]


class Remembers(OrderedStage):
    """A stage whose every answer depends on all batches before it and on those that it is shown."""

    def __init__(self, look_ahead: int, depth: int) -> None:
        self.look_ahead, self.depth, self.seen = look_ahead, depth, [0]

    def advance(self, routed: Any, upcoming: Any) -> Any:
        assert len(upcoming) <= self.look_ahead
        self.seen = [*self.seen, routed.number]
        return SimpleNamespace(**vars(routed) | {"told": (tuple(self.seen), tuple(x.number for x in upcoming))})

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = list(state["seen"])


class Tells(Router):
    """Gives what the stages made of each batch."""

    def put(self, batches: Sequence[InFlight], capacities: dict[str, int]) -> Any:
        (batch,) = batches
        routed: Any = batch.routed
        return routed.told


def staged(batches: int, ahead: int, depth: int) -> InputStream:
    def read(position: int) -> Iterator[InFlight]:
        for number in range(position, batches):
            routed: Any = SimpleNamespace(required_capacities={"rows": 1}, number=number)
            yield InFlight(routed, routed)

    router: Any = Tells()
    return InputStream(read, router, 1, 1000, None, (Remembers(ahead, depth),))


@given(st.integers(0, 12), st.sampled_from((0, 1, 4)), st.integers(0, 2), st.data())
def test_stages_see_batches_in_order_with_those_that_follow_and_go_on_where_they_were(batches, ahead, depth, data):
    stream = staged(batches, ahead, depth)
    whole, states = [], [json.dumps(stream.state_dict())]
    for told in stream:
        whole.append(told)
        states.append(json.dumps(stream.state_dict()))
    numbers = list(range(batches))
    assert whole == [((0, *numbers[: k + 1]), tuple(numbers[k + 1 : k + 1 + ahead])) for k in numbers]
    at = data.draw(st.integers(0, batches))
    again = staged(batches, ahead, data.draw(st.integers(0, 2)))
    list(itertools.islice(again, data.draw(st.integers(0, batches))))
    again.load_state_dict(json.loads(states[at]))
    assert list(again) == whole[at:]
    again.load_state_dict({"position": 0, "capacities": {}, "peaks": {}})  # of a checkpoint without any: from the start
    assert list(again) == whole
