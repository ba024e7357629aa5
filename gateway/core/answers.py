"""What a client is told when the gateway cannot give it an answer, and what the log calls it: of
every refusal here, and of `Failure`s that the shell makes while it reads a request.

Codes are stable. No text of a user is in a message. The form of an event fits the API of the path,
since a client that does not understand the error takes a stream that ends for a whole answer.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from pool.core.events import RefusedDoor

QUOTED_CHARS_MAX = 64  # of a name that a client has sent
RETRY_AFTER_S = 1  # as the lock server's own 503
BUSY = (429, 503)  # of answers after which a retry helps
STATUS_OF = {"model_not_found": 404}  # of what the pool refuses
KINDS = {
    **dict.fromkeys((400, 404, 405, 408, 413, 431, 501, 505), "invalid_request_error"),
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    404: "not_found_error",
    429: "overloaded_error",
    503: "overloaded_error",
}


class Failure(NamedTuple):
    """Why a request ends without its answer."""

    status: int
    code: str
    message: str
    retry_s: int | None = RETRY_AFTER_S  # None: a retry does not help

    @property
    def retry_after_s(self) -> int | None:
        return self.retry_s if self.status in BUSY else None


def no_engine(waits_for: str) -> Failure:
    return Failure(503, "no_active_engine", waits_for or "the engine does not answer; retry")


def ending() -> Failure:
    what = "this pod is shutting down; send the request to another pod"
    return Failure(503, "gateway.stopping", what)


def resting(why: str) -> Failure:
    return Failure(503, "gateway.resting", f"{why}; retry")


def unknown_model(name: str, known: str) -> Failure:
    quoted = name if len(name) <= QUOTED_CHARS_MAX else name[:QUOTED_CHARS_MAX] + "…"
    what = f"there is no model {quoted!r} here; there are {known}"
    return Failure(404, "model_not_found", what)


def no_model(known: str) -> Failure:
    what = f"the request names no model; set `model` to one of {known}"
    return Failure(400, "gateway.no_model", what)


def bad_json(why: str) -> Failure:
    what = (
        f"the body is not a JSON object that names its model ({why}); correct it, or name the model"
        " as /m/MODEL/… in the path or in X-Understudy-Model"
    )
    return Failure(400, "gateway.bad_json", what)


def bad_wish(field: str, header: str, must_be: str) -> Failure:
    what = f"`{field}`, or {header}, must be {must_be}; correct it, or leave it out"
    return Failure(400, f"gateway.bad_{field}", what)


def refused_door(door: RefusedDoor) -> Failure:
    status = STATUS_OF.get(door.code, 503)
    return Failure(status, door.code, door.sentence, door.retry_after_s)


def queue_full(why: str) -> Failure:
    return Failure(429, "pool.queue_full", f"{why}; retry later")


def not_awake(model: str, waits_for: str, retry_s: int) -> Failure:
    what = f"{model} did not wake before this request's deadline: {waits_for}; retry"
    return Failure(503, "pool.not_awake", what, max(RETRY_AFTER_S, retry_s))


def busy(model: str, in_flight: int) -> Failure:
    what = f"{model} has {in_flight} requests in flight, its limit, and others wait in front; retry"
    return Failure(503, "pool.busy", what)


def cut(model: str, why: str) -> Failure:
    because = f" ({why})" if why else ""
    what = f"{model} was evicted for another model{because} before this answer was complete"
    return Failure(503, "pool.cut", f"{what}; retry")


def too_large(body_bytes: int, limit_bytes: int) -> Failure:
    what = f"the body has {body_bytes} bytes; the engine takes {limit_bytes}"
    return Failure(413, "gateway.body_too_large", what)


def park_timeout(park_s: float, waits_for: str) -> Failure:
    why = f": {waits_for}" if waits_for else ""
    message = f"the stream waited {park_s:.0f} s for an engine that can continue it{why}; retry"
    return Failure(503, "gateway.park_timeout", message)


def suspect(deaths: int) -> Failure:
    message = (
        f"{deaths} engines died while processing this request, the last one with no other suspect "
        "in flight; the gateway sends it to no other engine"
    )
    return Failure(500, "gateway.suspect", message)


def refused_resume(engine: str, status: int) -> Failure:
    what = f"{engine} refused to continue the stream (status {status}); retry"
    return Failure(502, "gateway.resume_refused", what)


def mismatch(engine: str, why: str) -> Failure:
    message = f"{engine}'s replay differs from what the client received ({why}); retry"
    return Failure(502, "gateway.replay_mismatch", message)


def keeps_breaking(engine: str) -> Failure:
    message = f"{engine} aborted this answer each time, and no other engine took over; retry"
    return Failure(502, "gateway.keeps_breaking", message)


NOT_FOUND = Failure(404, "gateway.not_found", "there is no such path")
NO_MEMORY = Failure(
    503,
    "gateway.memory",
    "the gateway has reached its memory limit for requests (`--memory-bytes`); retry",
)
BROKEN = Failure(502, "gateway.broken", "the engine was lost in the middle of this answer; retry")
OTHER_MODEL = Failure(
    502,
    "gateway.other_continuation",
    "the next engine has other weights or settings, so it cannot continue this answer; retry",
)
CANNOT_CONTINUE = Failure(
    502,
    "gateway.cannot_continue",
    "the next engine cannot continue streams; `understudy status` says why; retry",
)


def error_body(failure: Failure, path: str) -> bytes:
    """The whole answer to a request of which nothing was sent."""
    return _json(_error(failure, path)) + b"\n"


def error_event(failure: Failure, path: str) -> bytes:
    """The last event of a stream that does not end as it should."""
    if _is_anthropic(path):
        return b"event: error\ndata: %b\n\n" % _json(_error(failure, path))
    if path.endswith("/responses"):
        said = {"type": "error", "code": failure.code, "message": failure.message, "param": None}
        return b"event: error\ndata: %b\n\n" % _json(said)
    return b"data: %b\n\n" % _json(_error(failure, path))


def _error(failure: Failure, path: str) -> dict[str, object]:
    if _is_anthropic(path):
        kind = ANTHROPIC_KINDS.get(failure.status, "api_error")
        text = f"{failure.message} [{failure.code}]"
        return {"type": "error", "error": {"type": kind, "message": text}}
    kind = KINDS.get(failure.status, "gateway_error")
    said = {"message": failure.message, "type": kind, "param": None, "code": failure.code}
    return {"error": said}


def _is_anthropic(path: str) -> bool:
    return path.endswith("/messages")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
