"""Python's search for reference cycles, less often: tests keep all that they have imported, collected and compiled."""

import gc


def collect_seldom() -> None:
    """Exempts what there is now, and looks for cycles once in 50,000 new objects instead of 700 to 2,000.

    Tracing and lowering make objects by the million, few of them garbage. Looking through them takes a seventh of the
    CPU of a test that runs whole commands; JAX runs code of its own after each look, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
