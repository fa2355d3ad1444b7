"""Which ports this process and all that it started listen at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address

import psutil


@contextmanager
def watched_ports() -> Iterator[set[tuple[str, str]]]:
    """What listens while the context lasts, looked at once a second: title of the process, address."""
    seen: set[tuple[str, str]] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            seen.update(_listening())

    with ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        try:
            yield seen
        finally:
            done.set()
        watching.result()


def _listening() -> Iterator[tuple[str, str]]:
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    yield " ".join(process.cmdline()), connection.laddr.ip
        except psutil.NoSuchProcess:
            continue  # it has just ended


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback
