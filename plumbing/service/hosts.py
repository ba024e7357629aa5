"""The address at which a port listens, and the names by which clients may ask it.

A web page of attacker.example whose DNS name is changed to a pod's address has the same host as its
requests (DNS rebinding), and plain HTTP shows no other sign of it. So names are known or refused;
what an attacker cannot register is known.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterable
from typing import Any

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service import procfs
from plumbing.service.config import Option
from plumbing.text import join_address

PORT_MAX = 65535
BACKLOG = 1024  # a burst of strangers; above it SYNs are dropped, and repeated after a second
_AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")

# Top-level names that no registry sells: this machine's, and those of a cluster's Services.
PRIVATE_DOMAINS = (".localhost", ".svc", ".cluster.local")

ALLOWED_HOST = Option(
    "http_allowed_host",
    str,
    (),
    "A DNS name by which clients reach the HTTP port, such as an Ingress's. Repeatable.",
    many=True,
)


def http_options(port: int) -> tuple[Option, ...]:
    """The flags of a program's HTTP server, which has this port unless told otherwise."""
    what = "of probes, status and metrics."
    return (
        Option("http_host", str, "127.0.0.1", f"Address {what}"),
        Option("http_port", int, port, f"Port {what}", minimum=0, maximum=PORT_MAX),
        ALLOWED_HOST,
    )


class KnownHosts:
    """The names by which clients may ask for more than probes."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        """`allowed` are names beside those that no other host can have."""
        self._allowed = {_plain(each) for each in (*allowed, socket.gethostname())}

    def refusal(self, authority: str | None) -> UnderstudyError | None:
        """The error for a request whose `Host` is neither an address, a private name nor an allowed
        one: `service.unknown_host`. Without a `Host` (HTTP/1.0) it is no browser's."""
        found = _AUTHORITY.fullmatch(authority or "")
        name = _plain(found[1] if found else "")
        # The last label of a public name is never a number (127.0.0.1, and 127.1 of curl), and a
        # single label is resolved on this machine or in its own domain.
        is_address = name.startswith("[") or name.rpartition(".")[2].isdigit()
        is_private = "." not in name or name.endswith(PRIVATE_DOMAINS)
        is_known = is_address or is_private or name in self._allowed
        if authority is None or (found and is_known):
            return None
        message = (
            f"{authority!r} is not known to be a name of this server; use its address, or start it"
            " with --http-allowed-host NAME"
        )
        return UnderstudyError("service.unknown_host", message)


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def bind(
    host: str, port: int, flag: str = "--http-host or --http-port", backlog: int = BACKLOG
) -> socket.socket:
    """A socket that listens at `host`, of a name with several addresses at one, an IPv4 address if
    there is any. The kernel chooses port 0. `flag`: what chooses another address.

    Raises:
        UnderstudyError: `service.port_in_use`, with the port and the process that has it.
        UsageError: `service.cannot_bind`, not an address of this machine, or no permission.
    """
    try:
        if not host or not 0 <= port <= PORT_MAX:  # "" would bind every interface
            raise OSError(errno.EINVAL, "this is not an address and port")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = min(found)
        is_both = host == "::" and socket.has_dualstack_ipv6()
        options: dict[str, Any] = {"family": family, "backlog": backlog}
        sock = socket.create_server(address[:2], dualstack_ipv6=is_both, **options)
    except OSError as error:
        where = join_address(host, port)
        if error.errno != errno.EADDRINUSE:
            raise UsageError(
                "service.cannot_bind",
                f"cannot listen on {where}: {error.strerror}; use another {flag}",
                host=host,
                port=port,
            ) from error
        pid = procfs.listener_pid(port)
        holder = f"pid {pid} ({procfs.name(pid)})" if pid else "a process not visible here"
        raise UnderstudyError(
            "service.port_in_use",
            f"{where} is in use by {holder}; stop it, or use another {flag}",
            host=host,
            port=port,
            pid=pid,
        ) from error
    sock.setblocking(False)
    return sock
