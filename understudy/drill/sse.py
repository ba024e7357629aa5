"""The receiving half of a streamed completion: bytes in, text out. Sans IO.

Just enough HTTP/1.1 for an inference server: status line, headers, a body that is chunked, of known
length, or until the connection closes, and server-sent events in it. A drill must timestamp text in
the callback that received it, which no HTTP library offers, and must tell a stream that ended from
one that was cut.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from plumbing.errors import ProtocolError

PENDING_MAX_BYTES = 1024 * 1024  # of headers or one event
DIGITS_MAX = 19  # of a number with 64 bits
OK = 200


def whole_number(text: str) -> int | None:
    """The number in a header, or None. `int` accepts more than digits, and limits their number."""
    is_one = text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX
    return int(text) if is_one else None


@dataclass(slots=True)
class Delta:
    """One event of the stream: its new text, why generation ended if it did, and the number of
    tokens of the answer if the event has the usage."""

    text: str
    finish_reason: str | None = None
    tokens: int | None = None


@dataclass
class StreamedAnswer:
    """Feed it received bytes; `is_done` once the answer is whole: a stream with its end marker."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    is_done: bool = False
    body: bytes = b""  # of an answer that is not a stream
    _raw: bytes = b""
    _chunk_left: int = 0
    _length_left: int | None = None
    _is_chunked: bool = False
    _events: bytes = b""

    def feed(self, data: bytes) -> list[Delta]:
        """Parse `data`; returns the deltas that it completed.

        Raises:
            ProtocolError: this is not an HTTP answer, or its events are not JSON.
        """
        self._raw += data
        if not self.status and not self._read_head():
            self._check_size(self._raw)
            return []
        body = self._read_chunks() if self._is_chunked else self._read_plain()
        if self._is_stream:
            return self._read_events(body)
        self.body = (self.body + body)[:PENDING_MAX_BYTES]
        return [_delta(self.body)] if self.is_done and self.status == OK else []

    def _read_head(self) -> bool:
        head, separator, rest = self._raw.partition(b"\r\n\r\n")
        if not separator:
            return False
        status_line, *lines = head.decode("latin-1").split("\r\n")
        try:
            version, code, *_ = status_line.split(" ")
            if not version.startswith("HTTP/1."):
                raise ValueError(version)
            self.status = int(code)
        except ValueError as error:
            raise ProtocolError("drill.not_http", f"not HTTP: {status_line[:80]!r}") from error
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._length_left = whole_number(self.headers.get("content-length", ""))
        self._raw = rest
        return True

    def _read_plain(self) -> bytes:
        body, self._raw = self._raw, b""
        if self._length_left is not None:
            self._length_left -= len(body)
            self.is_done = self.is_done or self._length_left <= 0
        return body

    def _read_chunks(self) -> bytes:
        body = b""
        while self._raw:
            if self._chunk_left:
                piece = self._raw[: self._chunk_left]
                self._raw = self._raw[len(piece) :]
                self._chunk_left -= len(piece)
                body += piece[: max(0, len(piece) - max(0, 2 - self._chunk_left))]
                continue
            line, separator, rest = self._raw.partition(b"\r\n")
            if not separator:
                self._check_size(self._raw)
                break
            try:
                size = int(line.split(b";")[0], 16)
                if size < 0:
                    raise ValueError(size)  # would be read forever
            except ValueError as error:
                raise ProtocolError(
                    "drill.bad_chunk", f"invalid chunk size {line[:20]!r}"
                ) from error
            self._raw = rest
            # The CRLF after a chunk counts as two more bytes of it, dropped above.
            self._chunk_left = size + 2
            if size == 0:
                self.is_done = self.is_done or not self._is_stream
                self._raw = b""
        return body

    @property
    def _is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def _read_events(self, body: bytes) -> list[Delta]:
        self._events = (self._events + body).replace(b"\r\n", b"\n")
        *blocks, self._events = self._events.split(b"\n\n")
        self._check_size(self._events)
        deltas = []
        for block in blocks:
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            payload = b"\n".join(lines)
            if payload == b"[DONE]":
                self.is_done = True
            elif payload:
                deltas.append(_delta(payload))
        return deltas

    @staticmethod
    def _check_size(pending: bytes) -> None:
        if len(pending) > PENDING_MAX_BYTES:
            raise ProtocolError("drill.endless", f"no end after {len(pending)} bytes")


def _delta(payload: bytes) -> Delta:
    """The text of one OpenAI event or whole answer, of a completion or of a chat."""
    try:
        event = json.loads(payload)
        if "error" in event:
            raise ProtocolError("drill.error_event", f"error event {payload[:200]!r}")
        choices = event.get("choices") or [{}]
        choice = choices[0]
        said = choice.get("delta") or choice.get("message") or {}
        tokens = (event.get("usage") or {}).get("completion_tokens")
        text = choice.get("text") or said.get("content") or ""
        return Delta(text, choice.get("finish_reason"), tokens)
    except (ValueError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise ProtocolError("drill.bad_event", f"invalid event: {payload[:80]!r}") from error
