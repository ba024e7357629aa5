"""The TCP ports of a pod: which they are, whether they can be bound, and ports that are free.

Ports are checked before the start: a second pod's probes would otherwise be answered by the first
one's servers, and the start would look fine. Free ports do not come from the kernel: a port of its
ephemeral range may go to the next client that connects while the server for it still starts.
"""

from __future__ import annotations

import errno
import random
import socket
from dataclasses import dataclass

from plumbing.errors import UnderstudyError

SERVICE_PORT = 8000  # DESIGN §9
LOCKSERVER_PORT = 9400
GMS_PORT = 9401
ENGINE_PORT = 9410  # engine n: this plus n

OURS = range(15_000, 32_000)  # below what the kernel gives away
TRIES = 100
ANYWHERE = "0.0.0.0"  # a port that somebody has at any address of this machine is taken


@dataclass(frozen=True, slots=True)
class Ports:
    """Every TCP port of a pod. `engines[n]` is engine n's probe port."""

    service: int = SERVICE_PORT
    lockserver: int = LOCKSERVER_PORT
    gms: int = GMS_PORT
    engines: tuple[int, ...] = (ENGINE_PORT, ENGINE_PORT + 1)

    def by_flag(self) -> list[tuple[str, int]]:
        """Every port with the flag of `understudy up` that moves it."""
        return [
            ("--service-port", self.service),
            ("--lockserver-port", self.lockserver),
            ("--gms-port", self.gms),
            *(("--engine-port", port) for port in self.engines),
        ]

    def by_name(self) -> dict[str, int]:
        """Every port by its name in the pod's manifest."""
        engines = {f"engine-{number}": port for number, port in enumerate(self.engines)}
        return {"http": self.service, "lockserver": self.lockserver, "gms": self.gms, **engines}

    def all(self) -> tuple[int, ...]:
        return tuple(port for _, port in self.by_flag())


def check_port(port: int, address: str, flag: str) -> None:
    """Raise if nobody could listen at `address`, `port` now; `flag` is what moves it.

    Raises:
        UnderstudyError: `pod.port_in_use`, with the number and the way out.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no owner
        try:
            sock.bind((address, port))
        except OSError as error:
            raise UnderstudyError(
                "pod.port_in_use",
                f"port {port} on {address} cannot be used: {error.strerror}; "
                f"{_way_out(error, flag)}",
                port=port,
            ) from error


def _way_out(error: OSError, flag: str) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "name an IPv4 address of this machine with --host or --http-host"
    if error.errno == errno.EACCES:
        return f"choose a port from 1024 on with {flag}, or be root"
    return f"is another pod running? Stop it, or choose another port with {flag}"


def free_ports(count: int) -> range:
    """`count` ports in a row that nobody listens on now: for pods that must not meet another one.

    Raises:
        UnderstudyError: `pod.no_free_ports`.
    """
    for _ in range(TRIES):
        first = random.choice(OURS[:-count])
        try:
            for port in range(first, first + count):
                check_port(port, ANYWHERE, "")
        except UnderstudyError:
            continue
        return range(first, first + count)
    raise UnderstudyError(
        "pod.no_free_ports",
        f"of the ports from {OURS.start} to {OURS.stop} no {count} in a row were found free; stop"
        " what has them",
    )


def free_pod_ports(engines: int = 2) -> Ports:
    """Ports for a whole pod."""
    service, lockserver, gms, *rest = free_ports(3 + engines)
    return Ports(service, lockserver, gms, tuple(rest))


def check_ports(ports: Ports, host: str = "127.0.0.1", http_host: str = "127.0.0.1") -> None:
    """Raise if somebody already has one of `ports`; `host` is where the service will listen,
    `http_host` where the probes will.

    Raises:
        UnderstudyError: `pod.port_in_use`, with the number and the way out.
    """
    for flag, port in ports.by_flag():
        check_port(port, host if port == ports.service else http_host, flag)
