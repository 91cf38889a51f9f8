"""Sums without rounding errors, beside fractions."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from recjax.train.metrics.exact_sum import ExactSum

TERMS = arrays(np.float64, st.integers(0, 30), elements=st.floats(allow_nan=False, allow_infinity=False, width=64))


@given(st.lists(TERMS, min_size=1, max_size=3), st.randoms())
def test_it_is_the_exact_sum_in_any_order_and_by_any_process(of_processes, random):
    sums = []
    for terms in of_processes:
        sums.append(ExactSum())
        order = list(range(len(terms)))
        random.shuffle(order)
        sums[-1].add(terms[order])
    exact = sum((Fraction(term) for terms in of_processes for term in terms.tolist()), Fraction(0))
    try:
        expected = float(exact)
    except OverflowError:
        expected = float("inf") if exact > 0 else float("-inf")
    whole = ExactSum()
    for terms in of_processes:
        whole.add(terms)
    sent = [[] for _ in sums]
    for number, part in enumerate(sums):
        part.join(lambda array, number=number: sent[number].append(array) or [array])
    sums[0].join(lambda array: [sent[number][0 if array.dtype == np.uint8 else 1] for number in range(len(sums))])
    assert float(whole) == float(sums[0]) == expected


def test_terms_that_are_not_finite():
    total = ExactSum()
    total.add([1.0, np.inf])
    assert float(total) == np.inf
    total.add(-np.inf)
    assert np.isnan(float(total))


def test_what_a_plain_sum_loses():
    total = ExactSum()
    total.add([1e300, 1.0, -1e300])
    total.add(np.full(2**10, 2.0**-60))
    assert float(total) == 1 + 2.0**-50
