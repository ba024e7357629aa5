"""TCP ports of this machine: whether one can be had, and some that nobody has.

The surprising thing: free ones are not asked of the kernel. What it gives to whoever asks for any
port (ip_local_port_range) it may give to the next client that connects, while the server that the
port was meant for still starts, or is dead for a moment.
"""

from __future__ import annotations

import errno
import random
import socket

from plumbing.errors import UnderstudyError

OURS = range(15_000, 32_000)  # below what the kernel gives away
TRIES = 100
ANYWHERE = "0.0.0.0"  # a port that somebody has at any address of this machine is taken


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
