"""Ports for servers: chosen so that servers that start at the same time get different ones. Opens no connection.

SGLang binds its HTTP port only when the weights are loaded, and its process group's port seconds after it was chosen.
Until then anybody may take them. So ports here lie outside the range from which the kernel gives outgoing connections
theirs, and a `Reservation` keeps other starts, in threads and processes, from choosing the same: it is a name among the
abstract sockets of Linux, which belongs to one socket at a time and is free again when its process ends.
Standard library only.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path

# SGLang draws the ports of process groups that it is given none for from 22000 to 29999.
LOW, HIGH = 10_000, 21_999
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortTaken(OSError):
    """Another process listens on the port, or another start has reserved it."""


class Reservation:
    """A port that no other start here chooses until `close`, and that nobody listened on when it was made.

    Raises PortTaken otherwise.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._name = _claimed(port)
        try:
            _probe(port)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Does nothing the second time."""
        self._name.close()


def reserve() -> Reservation:
    """Some port below the kernel's own range. Raises PortTaken where all that were tried are taken."""
    for port in _candidates():
        try:
            return Reservation(port)
        except PortTaken:
            continue
    raise PortTaken(errno.EADDRINUSE, f"no free port from {LOW} to {HIGH}")


def _candidates() -> Iterator[int]:
    """Ports to try, in random order; those of the kernel's range only where it leaves none."""
    try:
        low, high = (int(part) for part in _EPHEMERAL.read_text().split()[:2])
    except (OSError, ValueError):
        low, high = 32_768, 60_999
    outside = [port for port in range(LOW, HIGH + 1) if not low <= port <= high]
    ports = outside or list(range(LOW, HIGH + 1))
    yield from random.SystemRandom().sample(ports, len(ports))


def _claimed(port: int) -> socket.socket:
    """A socket that holds the port's name among the abstract ones."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name.bind(f"\0sglang-dsv4-port-{port}")
    except OSError as error:
        name.close()
        raise PortTaken(error.errno, "another start has reserved it") from None
    return name


def _probe(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # All addresses: SGLang's process group listens on them, and a listener on any one of them counts.
            probe.bind(("", port))
        except OSError as error:
            raise PortTaken(error.errno, error.strerror) from None
