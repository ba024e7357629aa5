"""The address of a server over TCP: `tcp://HOST:PORT`, with an IPv6 address in brackets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from plumbing.errors import UsageError
from plumbing.text import join_address

SCHEME = "tcp://"
_HOST = re.compile(r"[a-z0-9._:%-]+")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host name or address (without brackets) and a port; with port 0 the kernel chooses one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        """Parse `tcp://HOST:PORT`. Whether the host exists is seen when it is looked up.

        Raises:
            UsageError: `wire.bad_address`.
        """
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
            if host and port is not None and _HOST.fullmatch(host) and host.encode("idna"):
                address = cls(host, port)
                if str(address) == text.lower():  # nothing else is in it
                    return address
        except ValueError:
            pass
        raise UsageError(
            "wire.bad_address",
            f"{text[:300]!r} is not an address; write tcp://HOST:PORT, with an IPv6 address in"
            " brackets and a port from 0 to 65535",
        )

    def __str__(self) -> str:
        return SCHEME + join_address(self.host, self.port)
