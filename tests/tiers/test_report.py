"""The paragraph on what a training with rows on the host did."""

from recjax.train.run.summary import in_short
from recjax.utils.host_memory import peak_bytes

FIGURES = {
    "hits": 70,
    "misses": 30,
    "written_rows": 1000,
    "disk_rows": 600,
    "records_read": 900,
    "records_read_aside": 400,
    "records_written": 700,
    "disk_bytes": 1_100 * 1024,
    "padded_bytes": 1_000 * 1024,
    "row_bytes": 2**30,
    "directory_bytes": 2**29,
}


def test_it_counts_for_each_step_and_takes_memory_apart():
    assert in_short(FIGURES, 10, 2**31) == (
        "rows that are not all on the devices: 1,000 were touched, 60% of them have a record on the disk, whose files "
        "take 1.1 MiB (1.10 times all padded records); a step read 50 records there and wrote 70. The process took 2.0 "
        "GiB of memory at most: 1.0 GiB for rows, 512.0 MiB to find them, 512.0 MiB for all else"
    )
    without = dict.fromkeys(FIGURES, 0) | {"written_rows": 1000, "row_bytes": 2**30}
    assert in_short(without, 10, 2**30).startswith("rows that are not all on the devices: 1,000 were touched. The proc")


def test_the_peak_is_no_less_than_what_a_process_holds(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tpython\nVmHWM:\t  12345 kB\nVmRSS:\t 999 kB\n")
    assert peak_bytes(tmp_path) == 12345 * 1024
    assert peak_bytes(tmp_path / "nowhere") > 2**20
