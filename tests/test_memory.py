from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import random, resource, sys, torch
from rlcompute.memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for mebibytes in random.Random(0).choices(range(33, 80), k=60):
    torch.empty(mebibytes * 2**18).fill_(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=120
    )
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_large_tensors_reuse_pages() -> None:
    assert page_faults("keep") < page_faults("give back") / 3
