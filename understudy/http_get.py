"""A small HTTP GET for probes and status pages on this machine.

aiohttp would cost 20 MiB and half a second of imports for a command that prints ten lines. HTTP/1.0
on purpose: the reply ends with the connection, so there is no chunked encoding to decode.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

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
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(urlsplit(url))
    except TimeoutError:
        why = f"{url} did not reply within {timeout_s:g} s"
    except OSError as error:
        why = f"cannot reach {url} ({error})"
    except (ValueError, IndexError) as error:
        why = f"invalid reply from {url} ({error})"
    return HttpReply(0, reason=why)


async def _exchange(url: SplitResult) -> HttpReply:
    host, port = url.hostname or "127.0.0.1", url.port or 80
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
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
