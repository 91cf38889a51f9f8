import subprocess
import sys

PROGRAM = """
import resource
import numpy as np
from recjax.parallel.malloc import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.ones(1 << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fresh = faults()
keep_freed_memory()
faults()
print(fresh, faults())
"""


def test_memory_is_fetched_once():
    """In a process of its own, for other tests have freed large arrays."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    fresh, kept = map(int, done.stdout.split())
    assert kept < 50 and (fresh == 0 or kept < fresh)
