from __future__ import annotations

import socket
from pathlib import Path

import pytest
import ray

from rlcompute.actors import cluster, train
from rlcompute.errors import ConfigError, StageTimeoutError
from tests.actors.tiny_run import make_config


@pytest.fixture
def disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no Ray were connected to this process or known to its environment."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("disconnected")
def test_a_dashboard_port_in_use_is_refused_before_anything_is_written(inputs: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = make_config(inputs, tmp_path, "taken", ray={"dashboard": True, "dashboard_port": port})
        with pytest.raises(ConfigError, match=f"ray.dashboard_port={port} is already in use"):
            train.run(config, resume=False)
        assert not list(tmp_path.iterdir())
        cluster.check_port(make_config(inputs, tmp_path, "off", ray={"dashboard_port": port}))
    cluster.check_port(config)


@pytest.mark.usefixtures("disconnected")
def test_the_given_head_comes_before_the_environments(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(inputs, tmp_path, "head")
    assert cluster.head_address(config) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster.head_address(config) == "10.0.0.1:6379"
    given = make_config(inputs, tmp_path, "head", ray={"address": "10.0.0.2:6379"})
    assert cluster.head_address(given) == "10.0.0.2:6379"


@pytest.mark.usefixtures("disconnected")
def test_a_head_that_does_not_answer_is_named(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("no GCS there")

    monkeypatch.setattr(ray, "init", refuse)
    config = make_config(inputs, tmp_path, "head", ray={"address": "auto"})
    with pytest.raises(ConfigError, match=r"no Ray head answers at 'auto'.*no GCS there"):
        train.run(config, resume=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("disconnected")
def test_a_port_where_nothing_listens_is_refused_at_once(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise AssertionError("ray.init would try for ten minutes")

    monkeypatch.setattr(ray, "init", init)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # ours, and not listening
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        config = make_config(inputs, tmp_path, "head", ray={"address": address})
        with pytest.raises(ConfigError, match=f"no Ray head answers at '{address}'"):
            train.run(config, resume=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_more_workers_than_the_cluster_has_cpus_are_refused(inputs: Path, tmp_path: Path) -> None:
    config = make_config(
        inputs,
        tmp_path,
        "large",
        ray={"num_workers": 3},
        grpo={"micro_batch_pairs": 1},
    )
    with pytest.raises(ConfigError, match="needs 3 CPUs, but the Ray cluster has 2"):
        train.run(config, resume=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_others_use_is_a_timeout(inputs: Path, tmp_path: Path) -> None:
    @ray.remote(num_cpus=1)
    class Other:
        def ready(self) -> bool:
            return True

    other = Other.remote()  # type: ignore[attr-defined]
    ray.get(other.ready.remote())
    config = make_config(inputs, tmp_path, "busy", ray={"num_workers": 2, "stage_timeout_s": 1.0})
    with pytest.raises(StageTimeoutError, match="stage 'placement': 2 workers found no room"):
        train.run(config, resume=False)
    ray.kill(other)
    assert not list(tmp_path.iterdir())
