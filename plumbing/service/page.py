"""A static page for a browser, and its security policy.

A page runs only the script and style that it contains (their hashes are in its policy) and connects
only to the host that it came from, on any port, because the parts of a pod are ports of one host.
In turn, a part answers scripts of pages from its own host only, so that a page from elsewhere
cannot read the status of a pod.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


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


def host_of(authority: str) -> str | None:
    """`127.0.0.1` of `127.0.0.1:9400`; None if it is not a host and port."""
    found = _AUTHORITY.fullmatch(authority)
    return found[1].lower() if found else None


async def allow_own_pages(request: web.Request, response: web.StreamResponse) -> None:
    """Allow pages from this host, whatever their port, to read this answer."""
    origin = request.headers.get("Origin", "")
    host = host_of(origin.removeprefix("http://"))
    if host is not None and host == host_of(request.headers.get("Host", "")):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Vary"] = "Origin"
