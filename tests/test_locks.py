import os
import threading

from recjax.utils import locks


def test_a_file_is_locked_until_it_is_closed(tmp_path):
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert locks.try_lock(first)
        assert not locks.try_lock(second)
        first.close()
        assert locks.try_lock(second)


def test_the_next_waits_for_the_lock(tmp_path):
    order = []

    def wait():
        with locks.locked(tmp_path / "lock"):
            order.append("second")

    thread = threading.Thread(target=wait)
    with locks.locked(tmp_path / "lock"):
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_folder_that_is_renamed_is_no_longer_in_place_and_the_next_gets_a_new_one(tmp_path):
    folder = tmp_path / "work"
    with locks.locked_folder(folder) as in_place:
        assert in_place()
        folder.rename(tmp_path / "out")
        assert not in_place()
        with locks.locked_folder(folder) as other:
            assert other() and not in_place()


def test_who_waited_for_a_folder_that_was_removed_makes_it_again(tmp_path):
    folder = tmp_path / "work"
    states = []

    def wait():
        with locks.locked_folder(folder) as in_place:
            states.append(in_place())

    thread = threading.Thread(target=wait)
    with locks.locked_folder(folder):
        thread.start()
        thread.join(0.05)
        assert states == []
        folder.rmdir()
    thread.join()
    assert states == [True]


def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with locks.locked(tmp_path / "lock"):
        assert locks.is_locked(tmp_path / "lock") and (tmp_path / "lock").is_file()
