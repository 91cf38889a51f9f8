"""How much memory is left, told from files such as Linux shows."""

from recjax.utils.host_memory import available_bytes

MEMINFO = "MemTotal:       24684032 kB\nMemFree:        20455000 kB\nMemAvailable:   22429000 kB\n"


def test_what_the_system_or_the_container_leaves(tmp_path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    assert available_bytes(proc, cgroup) is None, "not Linux"
    (proc / "meminfo").write_text(MEMINFO)
    assert available_bytes(proc, cgroup) == 22_429_000 * 1024, "no container"
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5000000000\n")
    (cgroup / "memory.stat").write_text("anon 1000000000\ninactive_file 2000000000\n")
    assert available_bytes(proc, cgroup) == 22_429_000 * 1024, "a container without a limit"
    (cgroup / "memory.max").write_text("8000000000\n")
    assert available_bytes(proc, cgroup) == 8_000_000_000 - 5_000_000_000 + 2_000_000_000
    (cgroup / "memory.max").write_text("80000000000\n")
    assert available_bytes(proc, cgroup) == 22_429_000 * 1024, "more than there is"
    (cgroup / "memory.max").write_text("1000000000\n")
    assert available_bytes(proc, cgroup) == 0, "a limit lowered below what is in use"


def test_this_machine_has_some():
    left = available_bytes()
    assert left is None or 2**20 < left < 2**60
