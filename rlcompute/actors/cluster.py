"""Joins a running Ray cluster, or starts a private one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rlcompute.config import Config
from rlcompute.errors import ConfigError

LOCALHOST = "127.0.0.1"
PRIVATE_SYSTEM_CONFIG = {"worker_niceness": 0}
"""On a machine of its own a run's workers are the main job. Ray's default niceness of 15 is for nodes whose raylet must
stay responsive to others, and lets any other load on the machine starve them."""
CHATTY_LOGGERS = ("ray.rllib", "ray.tune", "ray._common.deprecation", "ray._private.authentication")
"""Loggers that warn about RLlib's own deprecated calls and about options that are not used here."""


def quieten_ray() -> None:
    """Lets only errors of :data:`CHATTY_LOGGERS` through, in this process."""
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def head_address(config: Config) -> str | None:
    """Address of the Ray head to join: ``ray.address``, else ``RAY_ADDRESS``; None to start a private cluster."""
    return config.ray.address or os.environ.get("RAY_ADDRESS") or None


def check_port(config: Config) -> None:
    """Checks that the dashboard of a private cluster would find its port free.

    Raises:
        ConfigError: another process listens there.
    """
    if head_address(config) is not None or not config.ray.dashboard or ray.is_initialized():
        return
    port = config.ray.dashboard_port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except OSError as error:
            raise ConfigError(
                f"ray.dashboard_port={port} is already in use ({error.strerror}): choose another port, set "
                "ray.dashboard=false, or join the Ray cluster that listens there with ray.address=auto"
            ) from error


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Ray, connected; disconnected at the end, and a private cluster stopped, unless it was connected before.

    Raises:
        ConfigError: the given head does not answer, or the cluster is too small for the workers.
    """
    quieten_ray()
    if ray.is_initialized():
        _check_size(config)
        yield
        return
    address = head_address(config)
    if address is None:
        _start_private(config)
    else:
        _join(address)
    try:
        _check_size(config)
        yield
    finally:
        ray.shutdown()


def _start_private(config: Config) -> None:
    ray.init(
        address="local",
        num_cpus=config.ray.num_workers,
        include_dashboard=config.ray.dashboard,
        dashboard_host=LOCALHOST,
        dashboard_port=config.ray.dashboard_port if config.ray.dashboard else None,
        _node_ip_address=LOCALHOST,
        logging_level=logging.WARNING,
        _system_config=PRIVATE_SYSTEM_CONFIG,
    )


def _join(address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray head answers at {address!r} (from ray.address or RAY_ADDRESS): {error}. Start one with "
            "`ray start --head`, or unset both to use a private local cluster"
        ) from error


def _check_size(config: Config) -> None:
    resources = ray.cluster_resources()
    needs = {"CPU": config.ray.num_workers}
    if config.backbone.device == "cuda":
        needs["GPU"] = config.ray.num_workers
    for kind, needed in needs.items():
        if resources.get(kind, 0) < needed:
            raise ConfigError(
                f"ray.num_workers={config.ray.num_workers} needs {needed} {kind}s, but the Ray cluster has "
                f"{resources.get(kind, 0):g}: lower ray.num_workers or add nodes"
            )
