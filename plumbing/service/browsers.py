"""What a browser may do with our ports: which names it may use, which pages run and may read.

A page runs only the script and style that it contains (their hashes are in its policy) and connects
only to the host that it came from, on any port, because the parts of a pod are ports of one host.
In turn, a part answers scripts of pages from its own host only.

That alone does not keep others out: a page of attacker.example whose DNS name is changed to the
pod's address has the same host as the request (DNS rebinding), and plain HTTP shows no other sign
of it. So names are known or refused; what an attacker cannot register is known.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from plumbing.service.config import Option

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
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


@dataclass(frozen=True, slots=True)
class Page:
    """One HTML file. `load` it once: the file may change while the process runs."""

    body: bytes
    hashes: Mapping[str, str]  # of its content: "'sha256-…' …" for script and for style

    @classmethod
    def load(cls, path: Path) -> Page:
        """Read the page at `path`, a file of the program."""
        body = path.read_bytes()
        found: dict[str, list[str]] = {"script": [], "style": []}
        for kind, content in _INLINE.findall(body.decode()):
            digest = hashlib.sha256(content.encode()).digest()
            found[kind].append(f"'sha256-{base64.b64encode(digest).decode()}'")
        return cls(body, {kind: " ".join(each) or "'none'" for kind, each in found.items()})

    def headers(self, authority: str) -> dict[str, str]:
        """Its headers for a browser that requested it from `authority` (Host)."""
        host = host_of(authority)
        ports = f" http://{host}:*" if host else ""
        policy = (
            "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            f"script-src {self.hashes['script']}",
            f"style-src {self.hashes['style']}",
            f"connect-src 'self'{ports}",
            "img-src data:",  # an empty icon, or the browser requests one
        )
        return {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": "; ".join(policy),
            "Cache-Control": "no-cache",  # after an upgrade the new page is shown
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }


class KnownHosts:
    """The names by which clients may ask for more than probes."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        """`allowed` are names beside those that nobody else can have."""
        self._allowed = {_plain(each) for each in (*allowed, socket.gethostname())}

    def has(self, authority: str | None) -> bool:
        """Whether the `Host` of a request is an address, a private name or an allowed one.

        Without a `Host` (HTTP/1.0) it is no browser's.
        """
        if authority is None:
            return True
        host = host_of(authority)
        if host is None:
            return False
        name = _plain(host)
        # The last label of a public name is never a number (127.0.0.1, and 127.1 of curl), and a
        # single label is resolved on this machine or in its own domain.
        is_address = name.startswith("[") or name.rpartition(".")[2].isdigit()
        is_private = "." not in name or name.endswith(PRIVATE_DOMAINS)
        return is_address or is_private or name in self._allowed


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def host_of(authority: str) -> str | None:
    """`127.0.0.1` of `127.0.0.1:9400`; None if it is not a host and port."""
    found = _AUTHORITY.fullmatch(authority)
    return found[1].lower() if found else None


def allow_own_pages(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of an answer to a request with `headers`: pages from this host, whatever their port,
    may read it."""
    origin = headers.get("origin", "")
    host = host_of(origin.removeprefix("http://"))
    if host is None or host != host_of(headers.get("host", "")):
        return {}
    return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
