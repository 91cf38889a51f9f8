"""Times joined to a step's collectives, by hand."""

from recjax.lab.formats.trace import COMPUTE, Event
from recjax.lab.replay.profile import Span
from recjax.lab.trace.times import Timeline

GROUP = (0, 1)


def event(id: int, name: str, *deps: int) -> Event:
    return Event(id, "all_to_all", name=name, group=GROUP, in_bytes=8, out_bytes=8, deps=deps)


def test_computing_is_cut_at_the_edges_of_collectives():
    """One rank: 0-10 work; collective a 10-30, work 15-20 and 25-40 beside and behind it; b 50-60."""
    spans = (
        Span("fusion", 0, 6),
        Span("copy", 6, 10),
        Span("a2a.1", 10, 30),
        Span("dot", 15, 20),
        Span("dot.1", 25, 40),
        Span("a2a.2", 50, 60),
    )
    found = Timeline(spans).joined([event(0, "a2a.1"), event(1, "a2a.2", 0)], 3, first_id=10)
    assert [(e.id, e.kind, e.name, e.start_ns, e.duration_ns, e.deps) for e in found] == [
        (10, COMPUTE, COMPUTE, 0, 10, (9,)),  # after the step before
        (11, "all_to_all", "a2a.1", 10, 20, (10,)),
        (12, COMPUTE, COMPUTE, 15, 10, (10,)),  # 5 + 5 within a
        (13, COMPUTE, COMPUTE, 30, 10, (11, 12)),
        (14, "all_to_all", "a2a.2", 50, 10, (11, 13)),
    ]
    assert {e.step for e in found} == {3}


def test_both_ends_of_an_asynchronous_collective():
    spans = (Span("all-to-all-start.4", 5, 6), Span("dot", 6, 9), Span("all-to-all-done.4", 9, 12))
    found = Timeline(spans).joined([event(0, "all-to-all-start.4")], 0, first_id=0)
    assert [(e.kind, e.start_ns, e.duration_ns) for e in found] == [("all_to_all", 5, 7), (COMPUTE, 6, 3)]


def test_without_times_nothing_is_lost():
    found = Timeline().joined([event(0, "a"), event(1, "b", 0)], 1, first_id=7)
    assert [(e.id, e.kind, e.start_ns, e.deps) for e in found] == [
        (7, "all_to_all", None, (6,)),
        (8, "all_to_all", None, (7,)),
    ]


def test_collectives_keep_the_order_of_the_program():
    """Two that depend on nothing run in another order on this rank; their order in the trace is that of all ranks."""
    spans = (Span("b", 0, 4), Span("a", 5, 9))
    found = Timeline(spans).joined([event(0, "a"), event(1, "b")], 0, first_id=0)
    assert [(e.name, e.start_ns) for e in found] == [("a", 5), ("b", 0)]
