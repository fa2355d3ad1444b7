"""Which ports this process and all that it started listen at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address

import psutil


@contextmanager
def watched_ports() -> Iterator[set[str]]:
    """Addresses at which anything listens while the context lasts, looked at five times a second."""
    seen: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            seen.update(_listening())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _listening() -> Iterator[str]:
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    yield connection.laddr.ip
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has just ended


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback
