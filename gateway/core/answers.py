"""What a client is told when the gateway cannot give it an answer, and what the log calls it: of
every refusal here, and of `Failure`s that the shell makes while it reads a request.

Codes are stable. No text of a user is in a message. The form of an event fits the API of the path,
since a client that does not understand the error takes a stream that ends for a whole answer.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pool.core.events import RefusedDoor

RETRY_AFTER_S = 1  # as the lock server's own 503
BUSY = (429, 503)  # of answers after which a retry helps
KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}


class Failure(NamedTuple):
    """Why a request ends without its answer."""

    status: int
    code: str
    message: str
    retry_s: int | None = RETRY_AFTER_S  # None: a retry does not help

    @property
    def retry_after_s(self) -> int | None:
        return self.retry_s if self.status in BUSY else None


# By its code: the status, and what the client is told.
FAILURES = {
    "no_active_engine": (503, "{why}"),
    "gateway.stopping": (503, "this pod is shutting down; send the request to another pod"),
    "gateway.resting": (503, "{why}; retry"),
    "gateway.not_found": (404, "there is no such path"),
    "model_not_found": (404, "there is no model {name!r} here; there are {known}"),
    "gateway.no_model": (400, "the request names no model; set `model` to one of {known}"),
    "gateway.bad_json": (
        400,
        "the body is not a JSON object that names its model ({why}); correct it, or name the model"
        " as /m/MODEL/… in the path or in X-Understudy-Model",
    ),
    **dict.fromkeys(
        ("gateway.bad_priority", "gateway.bad_keep_alive"),
        (400, "`{field}`, or {header}, must be {must_be}; correct it, or leave it out"),
    ),
    "pool.queue_full": (429, "{why}; retry later"),
    "pool.not_awake": (
        503,
        "{model} did not wake before this request's deadline: {why}; retry",
    ),
    "pool.busy": (
        503,
        "{model} has {in_flight} requests in flight, its limit, and others wait in front; retry",
    ),
    "pool.cut": (
        503,
        "{model} was evicted for another model before this answer was complete ({why}); retry",
    ),
    "gateway.body_too_large": (413, "the body has {size} bytes; the engine takes {limit}"),
    "gateway.park_timeout": (
        503,
        "the stream waited {park_s:.0f} s for an engine that can continue it ({why}); retry",
    ),
    "gateway.suspect": (
        500,
        "{deaths} engines died while processing this request, the last one with no other suspect"
        " in flight; the gateway sends it to no other engine",
    ),
    "gateway.resume_refused": (
        502,
        "{engine} refused to continue the stream (status {status}); retry",
    ),
    "gateway.replay_mismatch": (
        502,
        "{engine}'s replay differs from what the client received ({why}); retry",
    ),
    "gateway.keeps_breaking": (
        502,
        "the engine aborted this answer each time, and no other engine took over; retry",
    ),
    "gateway.memory": (
        503,
        "the gateway has reached its memory limit for requests (`--memory-bytes`); retry",
    ),
    "gateway.broken": (502, "the engine was lost in the middle of this answer; retry"),
    "gateway.other_continuation": (
        502,
        "the next engine has other weights or settings, so it cannot continue this answer; retry",
    ),
    "gateway.fronts": (503, "as many fronts as a pod takes are connected to this one"),
    "gateway.other_pod": (409, "this pod has another model or other settings"),
    "gateway.cannot_continue": (
        502,
        "the next engine cannot continue streams; `understudy status` says why; retry",
    ),
}


def failure(code: str, *, retry_s: int = RETRY_AFTER_S, **words: object) -> Failure:
    """The failure of this code; `words` are those of its sentence."""
    status, sentence = FAILURES[code]
    return Failure(status, code, sentence.format(**words), retry_s)


def refused_door(door: RefusedDoor) -> Failure:
    """What the pool says of its model."""
    status = FAILURES.get(door.code, (503, ""))[0]
    return Failure(status, door.code, door.sentence, door.retry_after_s)


def error_body(failure: Failure, path: str) -> bytes:
    """The whole answer to a request of which nothing was sent."""
    return msgspec.json.encode(_error(failure, path)) + b"\n"


def error_event(failure: Failure, path: str) -> bytes:
    """The last event of a stream that does not end as it should."""
    if _is_anthropic(path):
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(_error(failure, path))
    if path.endswith("/responses"):
        said = {"type": "error", "code": failure.code, "message": failure.message, "param": None}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(said)
    return b"data: %b\n\n" % msgspec.json.encode(_error(failure, path))


def _error(failure: Failure, path: str) -> dict[str, object]:
    other = "invalid_request_error" if failure.status < 500 else "gateway_error"
    kind = KINDS.get(failure.status, other)
    if _is_anthropic(path):
        text = f"{failure.message} [{failure.code}]"
        return {"type": "error", "error": {"type": kind, "message": text}}
    said = {"message": failure.message, "type": kind, "param": None, "code": failure.code}
    return {"error": said}


def _is_anthropic(path: str) -> bool:
    return path.endswith("/messages")
