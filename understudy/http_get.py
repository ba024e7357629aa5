"""A small HTTP GET for probes and status pages on this machine.

aiohttp would cost 20 MiB and half a second of imports for a command that prints ten lines. HTTP/1.0
on purpose: the reply ends with the connection, so there is no chunked encoding to decode.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
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

    def summary(self) -> str:
        """The status and why, for logs and errors; or why there is no reply."""
        said = self._said()
        return f"{self.status}: {said}" if said and self.status else said or f"HTTP {self.status}"

    def sentence(self) -> str:
        """What the server says about itself, for users; or why there is no reply."""
        return self._said() or f"it answers with HTTP {self.status}"

    def _said(self) -> str:
        if self.status == 0:
            return self.reason
        body = self.json()
        return str(body.get("message") or body.get("reason") or "")


async def get(url: str, timeout_s: float = 2.0) -> HttpReply:
    """GET `url` (http only); never raises: status 0 if the server is unreachable."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
    except ValueError as error:
        return HttpReply(0, reason=f"{url} is not a valid URL ({error})")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(host, port, path)
    except TimeoutError:
        return HttpReply(0, reason=f"{host}:{port} did not reply within {timeout_s:g} s")
    except OSError as error:
        return HttpReply(0, reason=f"cannot reach {host}:{port} ({error})")
    except (ValueError, IndexError) as error:
        return HttpReply(0, reason=f"invalid reply from {host}:{port} ({error})")


async def _exchange(host: str, port: int, path: str) -> HttpReply:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
        received = bytearray()
        while piece := await reader.read(65536):
            received += piece
            if len(received) > BODY_MAX_BYTES:
                raise ValueError(f"the reply exceeds {BODY_MAX_BYTES} bytes")
    finally:
        writer.close()
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    return HttpReply(int(head.split(maxsplit=2)[1]), body)
