"""Sizes of the routing arrays: enough, tight, few."""

from hypothesis import given
from hypothesis import strategies as st

from recjax.embedding.routing.capacity import grow, largest, rung, shrink

needs = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10**9), max_size=4)


def test_the_ladder_has_steps_of_five_percent_and_few_rungs():
    rungs = sorted({rung(need) for need in range(10_000)})
    assert rungs[:6] == [8, 16, 24, 32, 40, 48]
    assert all(size % 8 == 0 for size in rungs)
    assert all(above <= max(below + 8, 1.05 * below) for below, above in zip(rungs, rungs[1:], strict=False))
    assert len(rungs) < 120
    assert all(rung(size) == size for size in rungs)


@given(needs, st.lists(needs, max_size=5))
def test_sizes_rise_only_when_they_must_and_always_suffice(start, requests):
    sizes = grow({}, start)
    for asked in requests:
        before, sizes = sizes, grow(sizes, asked)
        assert before.keys() | asked.keys() == sizes.keys()
        for name, size in sizes.items():
            need = asked.get(name, 0)
            assert size >= max(need, before.get(name, 0), 8)
            if name in before and before[name] >= need:
                assert size == before[name]
            else:
                assert size <= 1.03 * 1.05 * need + 8
    assert grow(sizes, {}) == sizes


def test_growing_leaves_its_input_alone():
    sizes = {"a": 8}
    assert grow(sizes, {"a": 9, "b": 0}) == {"a": 16, "b": 8}
    assert sizes == {"a": 8}


@given(needs, st.lists(needs, min_size=1, max_size=5))
def test_sizes_fall_to_what_a_period_needed(start, requests):
    sizes, peaks = grow({}, start), {}
    for asked in requests:
        sizes, peaks = grow(sizes, asked), largest(peaks, asked)
    fallen = shrink(sizes, peaks)
    assert fallen.keys() == sizes.keys()
    for name, size in fallen.items():
        most = max(asked.get(name, 0) for asked in requests)
        assert most <= size <= sizes[name] and size <= 1.03 * 1.05 * most + 8
    for asked in requests:  # the same batches again change nothing
        assert grow(fallen, asked) == fallen | {n: s for n, s in grow({}, asked).items() if n not in fallen}
