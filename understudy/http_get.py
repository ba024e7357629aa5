"""A GET for probes and status pages on this machine, by `http.client` in a thread.

aiohttp would cost 20 MiB and half a second of imports for a command that prints ten lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

BODY_MAX_BYTES = 4 * 1024 * 1024  # a status page is a few KiB; /metrics some dozens


@dataclass(frozen=True, slots=True)
class HttpReply:
    """`status` is 0 if there was no reply; `reason` then says why."""

    status: int
    body: bytes = b""
    reason: str = ""

    def json(self) -> dict[str, Any]:
        """The body as a JSON object, or an empty one if it is something else."""
        try:
            document = json.loads(self.body)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    def said(self) -> str:
        """What the server says about itself, for users; or why there is no reply."""
        body = self.json()
        words = self.reason if self.status == 0 else body.get("message") or body.get("reason")
        return str(words or f"it answers with HTTP {self.status}")


async def get(url: str, timeout_s: float = 2.0) -> HttpReply:
    """GET `url` (http only); never raises: status 0 if the server is unreachable."""
    return await asyncio.to_thread(_get, url, timeout_s)


def _get(url: str, timeout_s: float) -> HttpReply:
    address = urlsplit(url)
    connection = HTTPConnection(address.netloc, timeout=timeout_s)
    with contextlib.closing(connection):
        try:
            connection.request("GET", address._replace(scheme="", netloc="").geturl() or "/")
            answer = connection.getresponse()
            return HttpReply(answer.status, answer.read(BODY_MAX_BYTES))
        except TimeoutError:
            why = f"{url} did not reply within {timeout_s:g} s"
        except (OSError, HTTPException) as error:
            why = f"cannot reach {url} ({error})"
    return HttpReply(0, reason=why)
