"""Joins a running Ray cluster, or starts a private one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address

import ray
from ray._private import ray_constants
from ray.util.placement_group import placement_group, remove_placement_group

from rlcompute.config import Config
from rlcompute.errors import ConfigError, StageTimeoutError

LOCALHOST = "127.0.0.1"
CONNECT_TIMEOUT_S = 5.0
PRIVATE_SYSTEM_CONFIG = {"worker_niceness": 0}
"""On a machine of its own a run's workers are the main job. Ray's default niceness of 15 is for nodes whose raylet must
stay responsive to others, and lets any other load on the machine starve them."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where Gloo and NCCL are told which network interface to use."""
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
        StageTimeoutError: the cluster is large enough, but others use it.
    """
    quieten_ray()
    if ray.is_initialized():
        _reserve_workers(config)
        yield
        return
    address = head_address(config)
    dashboard_port = config.ray.dashboard_port if config.ray.dashboard else None
    with private_cluster(config.ray.num_workers, dashboard_port) if address is None else _joined(address):
        _reserve_workers(config)
        yield


@contextmanager
def private_cluster(num_cpus: int, dashboard_port: int | None = None) -> Iterator[None]:
    """Ray with so many CPUs on this machine, which nothing but this machine can reach; stopped at the end.

    Args:
        num_cpus: of the cluster.
        dashboard_port: None: no dashboard.

    Raises:
        ConfigError: the machine has no loopback interface.
    """
    # Ray gives all its ports to the network, unless it believes to be on a system where it forms no clusters.
    environment = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
    # Gloo and NCCL, over which training workers add up, look for an interface that other machines can reach.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is None:
        raise ConfigError("this machine has no loopback interface: join a Ray cluster with ray.address")
    environment |= dict.fromkeys(INTERFACE_VARIABLES, loopback)
    forms_clusters = ray_constants.ENABLE_RAY_CLUSTER  # read from the environment when Ray was imported
    with environment_variables(environment):
        try:
            ray_constants.ENABLE_RAY_CLUSTER = False
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=dashboard_port is not None,
                dashboard_host=LOCALHOST,
                dashboard_port=dashboard_port,
                logging_level=logging.WARNING,
                _system_config=PRIVATE_SYSTEM_CONFIG,
            )
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = forms_clusters
            ray.shutdown()


def is_on_loopback() -> bool:
    """Whether all of the connected cluster is on this machine and known to it alone."""
    return all(ip_address(node["NodeManagerAddress"]).is_loopback for node in ray.nodes())


@contextmanager
def environment_variables(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, for this process and those that it starts, and restores them at the end."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _joined(address: str) -> Iterator[None]:
    try:
        _check_listening(address)
        ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray head answers at {address!r} (from ray.address or RAY_ADDRESS): {error}. Start one with "
            "`ray start --head`, or unset both to use a private local cluster"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Raises OSError if nothing listens at ``host:port``, which Ray would find out only after ten minutes of trying."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():  # not "auto", which Ray resolves itself
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _reserve_workers(config: Config) -> None:
    """Checks that the workers fit, and waits until they do: RLlib would wait for room without a deadline."""
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if config.backbone.device == "cuda" else {})
    workers, resources = config.ray.num_workers, ray.cluster_resources()
    for kind, each in bundle.items():
        if resources.get(kind, 0) < each * workers:
            raise ConfigError(
                f"ray.num_workers={workers} needs {each * workers:g} {kind}s, but the Ray cluster has "
                f"{resources.get(kind, 0):g}: lower ray.num_workers or add nodes"
            )
    group = placement_group([bundle] * workers)
    try:
        if not group.wait(timeout_seconds=config.ray.stage_timeout_s):
            raise StageTimeoutError(
                f"stage 'placement': {workers} workers found no room for {config.ray.stage_timeout_s:g} s; others use "
                f"the cluster's {resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs. Wait for them, "
                "lower ray.num_workers, or raise ray.stage_timeout_s"
            )
    finally:
        remove_placement_group(group)
