"""The address of a server over TCP: `tcp://HOST:PORT`, with an IPv6 address in brackets."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from plumbing.errors import UsageError

SCHEME = "tcp://"
_PORT_MAX = 65535
_NAME_CHARS_MAX = 253  # RFC 1035 §2.3.4, as text
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_WHOLE = re.compile(r"tcp://(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^\[\]:/@?#]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host name or address (without brackets) and a port; with port 0 the kernel chooses one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        """Parse `tcp://HOST:PORT`.

        Raises:
            UsageError: `wire.bad_address`.
        """
        match = _WHOLE.fullmatch(text)
        if match is None:
            raise _bad(text)
        host, port = match["six"] or match["host"], int(match["port"])
        is_host = _is_ip(host, 6) if match["six"] else _is_ip(host, 4) or _is_name(host)
        if not is_host or port > _PORT_MAX:
            raise _bad(text)
        return cls(host, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}"


def _is_ip(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _is_name(host: str) -> bool:
    """A name that can be looked up, and not a malformed address (`10.0.0.256`, `127.1`)."""
    is_number = host.rstrip(".").rpartition(".")[2].isdigit()
    return len(host) <= _NAME_CHARS_MAX and not is_number and _NAME.fullmatch(host) is not None


def _bad(text: str) -> UsageError:
    return UsageError(
        "wire.bad_address",
        f"{text[:300]!r} is not an address; write tcp://HOST:PORT, with an IPv6 address in brackets"
        f" and a port from 0 to {_PORT_MAX}",
    )
