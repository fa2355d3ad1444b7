from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from rlcompute.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(32 * 2**20 // 4 * 2).fill_(1.0)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_second_large_tensor_touches_no_new_pages():
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    before, after = map(int, out.stdout.split())
    assert before > 30  # 64 MiB are thousands of pages, or some tens where pages are huge
    assert after < before / 10
