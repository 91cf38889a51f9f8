"""Kernels that are compiled by several threads, and which of them are left out where that takes too long."""

import math
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from recjax.lab.calibrate import compile_cases
from recjax.lab.calibrate.cases import Case
from recjax.lab.calibrate.compile_cases import compiled


def of_class(kernel, make, count, held_out=False):
    """As many cases; `make` is given the kernel and the case's number."""

    def case(number):
        return Case(kernel, {"bytes": float(number)}, lambda: make(kernel, number), held_out)

    return [case(number) for number in range(count)]


def threads(monkeypatch, count):
    monkeypatch.setattr(compile_cases, "processor", SimpleNamespace(cores=lambda: count))


def nothing(*_):
    return None


def test_all_are_compiled_at_a_time_and_come_in_their_order(monkeypatch):
    """Each waits until two are being compiled, with the caller's device; later ones are ready first."""
    threads(monkeypatch, 2)
    both, makers, runners, devices, counted = threading.Barrier(2), set(), [], set(), []

    def make(kernel, number):
        both.wait(30)
        time.sleep(0.01 * (6 - number))
        makers.add(threading.get_ident())
        devices.add(jax.config.jax_default_device)
        return lambda: runners.append(threading.get_ident()) or (kernel, number)

    cases = [*of_class("copy", make, 4), *of_class("sort", make, 2)]
    device = jax.devices()[3]
    runs = compiled(cases, device, math.inf, counted.append)
    here = threading.get_ident()
    assert len(makers) == 2 and here not in makers and devices == {device}
    assert runners == [here] * 6 and counted == [1, 2, 3, 4, 5, 6]  # each was run once, by the caller
    assert [run() for run in runs] == [("copy", 0), ("copy", 1), ("copy", 2), ("copy", 3), ("sort", 0), ("sort", 1)]


@pytest.mark.parametrize("where", ["make", "run"])
def test_an_error_reaches_the_caller_and_ends_it_soon(monkeypatch, where):
    """As Ctrl-C does: of a hundred cases few are begun."""
    threads(monkeypatch, 2)
    begun = []

    def broken():
        raise KeyboardInterrupt("the first")

    def make(_, number):
        begun.append(number)
        if number == 0:
            return broken() if where == "make" else broken
        time.sleep(0.05)
        return nothing

    with pytest.raises(KeyboardInterrupt, match="the first"):
        compiled(of_class("copy", make, 100), jax.devices()[0], math.inf, nothing)
    assert len(begun) < 50


def test_where_time_is_up_the_first_middle_and_last_sizes_are_compiled():
    def make(kernel, number):
        return lambda: (kernel, number)

    cases = [
        *of_class("copy", make, 6),
        *of_class("copy", make, 2, held_out=True),
        *of_class("sort", make, 5),
        *of_class("convert", make, 3),
        *of_class("reduce", make, 1),
    ]
    runs = compiled(cases, jax.devices()[0], time.monotonic() - 1, nothing)
    there = [run is not None for run in runs]
    assert there[:6] == [True, False, True, False, False, True]
    assert there[6:8] == [True, True]
    assert there[8:13] == [True, False, True, False, True]
    assert there[13:] == [True] * 4
    assert all(run() == (case.kernel, case.sizes["bytes"]) for case, run in zip(cases, runs, strict=True) if run)


def test_time_that_is_left_is_shared_by_all_classes(monkeypatch):
    """By a clock that each of them moves on by a second, 7.5 s are enough for the first eight cases."""
    threads(monkeypatch, 1)
    made = []
    monkeypatch.setattr(compile_cases, "time", SimpleNamespace(monotonic=lambda: float(len(made))))

    def make(kernel, number):
        made.append((kernel, number))
        return nothing

    cases = [*of_class("copy", make, 9), *of_class("sort", make, 9)]
    compiled(cases, jax.devices()[0], 7.5, nothing)
    assert made == [(kernel, number) for number in (0, 8, 4, 2) for kernel in ("copy", "sort")]
