"""The gateway's own answers to clients: errors in OpenAI's form, and the heads of responses."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from plumbing.text import to_json

STATUS_LINES = {int(each): b"HTTP/1.1 %d %b" % (each, each.phrase.encode()) for each in HTTPStatus}
KINDS = {401: "authentication_error", 503: "service_unavailable"}


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request reaches no engine."""

    status: int
    code: str
    message: str

    def body(self) -> bytes:
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return to_json({"error": error}).encode() + b"\n"


def error_response(
    status: int,
    body: bytes,
    request_id: bytes,
    *,
    keeps_alive: bool,
    retry_after_s: int | None = None,
    is_to_head: bool = False,
    content_type: bytes = b"application/json",
) -> bytes:
    """A whole response."""
    lines = [
        status_line(status),
        b"content-type: " + content_type,
        b"content-length: %d" % len(body),
        b"x-request-id: " + request_id,
    ]
    if status == HTTPStatus.UNAUTHORIZED:
        lines.append(b'www-authenticate: Bearer realm="gateway"')
    if retry_after_s is not None:
        lines.append(b"retry-after: %d" % retry_after_s)
    if not keeps_alive:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if is_to_head else body)


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status
