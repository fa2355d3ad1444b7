"""Inputs and one Ray cluster for all tests of this folder; starting Ray takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcompute.actors.cluster import private_cluster
from rlcompute.actors.engine import RolloutEngine
from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from tests.actors.tiny_run import make_config, write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tiny checkpoint, training and test pairs."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def backbone(inputs: Path) -> Backbone:
    return load_backbone(inputs / "checkpoint")


@pytest.fixture
def engine(backbone: Backbone, inputs: Path, tmp_path: Path) -> RolloutEngine:
    return RolloutEngine(backbone, make_config(inputs, tmp_path, "engine"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A private Ray cluster with two CPUs; runs use it because Ray is connected already."""
    with private_cluster(num_cpus=2):
        yield
