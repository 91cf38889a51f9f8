"""Objects that the garbage collector's passes leave out."""

import gc
import weakref

from recjax.utils.garbage import left_alone


class Node:
    """One that keeps itself alive."""

    def __init__(self):
        self.own = self


def test_what_was_there_is_left_out_of_passes_and_what_comes_is_not():
    automatic = gc.isenabled()
    gc.disable()  # a pass of its own accord would hide what is shown
    try:
        before = weakref.ref(Node())
        with left_alone():
            assert before() is None, "rubbish is taken away first"
            old = Node()
            with left_alone():
                during, held = weakref.ref(Node()), weakref.ref(old)
                del old
                seen = len(gc.get_objects())
                gc.collect()
                assert during() is None and held() is not None and seen < 1000
        gc.collect()
        assert held() is None and len(gc.get_objects()) > 10_000
    finally:
        if automatic:
            gc.enable()
