"""`ray job submit` to a running head, from the working directory, with the package not installed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 120
JOB_TIMEOUT_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Head:
    """A Ray head in processes of its own; ``environment`` is what its clients need."""

    dashboard: str
    environment: dict[str, str]


def ray_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Started in the foreground (``--block``), so that stopping it touches no other Ray on the machine."""
    folder = tmp_path_factory.mktemp("head")
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GLOO_", "NCCL_"))
    }
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_worker_niceness": "0",
        # Ray Train leaves an actor that a head would wait for when it is stopped.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]]),
    }
    port = free_port()
    command = ray_command("start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="ray") as session, (folder / "head.log").open("w") as log:
        process = subprocess.Popen(
            [
                *command,
                f"--port={free_port()}",
                f"--dashboard-port={port}",
                # Jobs go to the agent, whose default port another cluster on this machine may have.
                f"--dashboard-agent-listen-port={free_port()}",
                # Unix sockets live below it, so its path must be short.
                f"--temp-dir={session}",
            ],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for_port(port, process)
            yield Head(f"http://127.0.0.1:{port}", environment)
        finally:
            process.terminate()
            process.wait(30)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise TimeoutError("the Ray head did not come up")


def submit(head: Head, repository: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Submits and waits for the job; a head answers a little before it can take jobs."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        submitted = subprocess.run(
            [
                *ray_command("job", "submit", f"--address={head.dashboard}", "--working-dir=."),
                *("--runtime-env=configs/runtime_env.yaml", "--", *command),
            ],
            cwd=repository,
            env=head.environment,
            capture_output=True,
            text=True,
            timeout=JOB_TIMEOUT_S,
        )
        if "No available agent" not in submitted.stderr or time.monotonic() > deadline:
            return submitted
        time.sleep(1.0)


METHODS = {
    "grpo": (),
    "ste": (
        "run.method=ste",
        "ste.iterations=3",
        "ste.pairs_per_batch=4",
        "ste.prune_layer=1",
        "ray.num_workers=2",
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_smoke_run_as_a_submitted_job(
    head: Head, inputs: Path, tmp_path: Path, repository: Path, method: str
) -> None:
    overrides = [
        f"run.dir={tmp_path / 'runs'}",
        f"data.train={inputs / 'train.parquet'}",
        f"data.test={inputs / 'test.parquet'}",
        f"backbone.path={inputs / 'checkpoint'}",
    ]
    train = ("python", "-m", "rlcompute", "train", "--config", "configs/smoke.yaml")
    submitted = submit(head, repository, *train, *overrides, *METHODS[method])
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "training 3/3" in submitted.stdout
    assert (tmp_path / "runs" / "smoke" / "export" / "gates.safetensors").is_file()
