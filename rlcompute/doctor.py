"""`rlcompute doctor`: what this machine has, which kernels would run here, and what is missing."""

from __future__ import annotations

from pathlib import Path

import torch

from rlcompute import demo, environment
from rlcompute.environment import GIB
from rlcompute.errors import BackendError
from rlcompute.kernels import registry

LOW_MEMORY_GIB = 4.0
LOW_DISK_GIB = 5.0


def report(run_dir: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Collects the facts.

    Args:
        run_dir: Folder whose disk is checked for free space.

    Returns:
        Rows of (what, fact), and the problems that would stop or hamper the quick start, each with its remedy.
    """
    rows = [("python", str(environment.machine()["python"]))]
    rows += [(name, version or "not installed") for name, version in environment.package_versions().items()]
    problems: list[str] = []
    for section in (_hardware, _kernels, _demo):
        more, wrong = section()
        rows += more
        problems += wrong
    disk = environment.free_disk_bytes(run_dir) / GIB
    rows.append((f"free disk at {run_dir}", f"{disk:.1f} GiB"))
    if disk < LOW_DISK_GIB:
        problems.append(f"only {disk:.1f} GiB free at {run_dir}: free some, or set run.dir")
    return rows, problems


def _hardware() -> tuple[list[tuple[str, str]], list[str]]:
    facts, memory = environment.machine(), environment.memory_bytes()
    rows = [(name, str(facts[name])) for name in ("system", "processor", "cores")]
    rows += [(f"memory, {kind}", f"{size / GIB:.1f} GiB") for kind, size in memory.items()]
    available = memory.get("available", memory.get("total", 0)) / GIB
    problems = []
    if memory and available < LOW_MEMORY_GIB:
        problems.append(
            f"only {available:.1f} GiB of memory available: the quick start wants {LOW_MEMORY_GIB:g} GiB"
        )
    count = torch.cuda.device_count()
    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    rows.append(("GPUs", gpus or "none (everything runs on the CPU)"))
    return rows, problems


def _kernels() -> tuple[list[tuple[str, str]], list[str]]:
    """One row an operation: the backend that a run would choose, and why each of the others cannot be."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    rows, problems = [], []
    for operation in registry.PROVIDERS:
        try:
            chosen = registry.choose(operation, device, dtype)
        except BackendError as error:
            problems.append(str(error))
            continue
        others = [
            f"{name}: {reason or 'also runs here'}"
            for name, reason in registry.refusals(operation, device, dtype).items()
            if name != chosen
        ]
        fact = f"{chosen} ({'; '.join(others)})" if others else chosen
        rows.append((f"kernel {operation} on {device}, {str(dtype).removeprefix('torch.')}", fact))
    return rows, problems


def _demo() -> tuple[list[tuple[str, str]], list[str]]:
    versions = environment.package_versions(environment.DEMO_PACKAGES)
    rows = [(name, version or "not installed") for name, version in versions.items()]
    missing = [name for name, version in versions.items() if version is None]
    problems = [f"{', '.join(missing)} not installed: pip install 'rlcompute[demo]'"] if missing else []
    weights = sorted(demo.CHECKPOINT.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in weights) / 2**20
    rows.append(("demo embedder", f"{demo.CHECKPOINT} ({size:.1f} MiB of weights)" if weights else "missing"))
    if not weights:
        problems.append(
            f"no demo embedder in {demo.CHECKPOINT}: reinstall the package or run `make demo-model`"
        )
    return rows, problems
