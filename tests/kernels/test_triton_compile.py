from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# What a block may have on the devices of capability 8.6 and 8.9, the smallest that the kernels run on.
SHARED_LIMIT = 99 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles_within_the_resources_of_the_device(capability, tmp_path, repository):
    """In a process without the interpreter; no GPU is needed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton_compile", capability]
    done = subprocess.run(
        command,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {result["kernel"] for result in results} >= {"gate_up_kernel", "rows_kernel", "statistic_kernel"}
    assert [r for r in results if r["shared"] > SHARED_LIMIT] == []
    # Widths that are no multiple of 16 are for correctness, not for speed.
    assert [r for r in results if r["spills"] and r["aligned"]] == []
