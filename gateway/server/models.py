"""The models of a pool as clients see them: which one a request is for, and what the gateway
answers by itself: `/v1/models`, `/running`, `/m/<model>/status`.

Owns what the pool has said of each model, for show. What may be done with requests is decided by
`gateway.core.lanes`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from gateway.core import answers
from gateway.core.answers import RETRY_AFTER_S, Failure
from gateway.core.lane_events import LaneDoorSet
from gateway.core.lanes import Lanes
from gateway.core.router import (
    BadWish,
    Router,
    Wishes,
    keep_alive_ms,
    model_in_path,
    priority_of,
    wait_ms,
)
from gateway.server.outline import value_of
from gateway.server.refusals import error_response
from gateway.server.requests import HttpRequest, is_endpoint, is_hop_path, path_of
from plumbing.service.clock import rfc3339
from plumbing.text import to_json
from pool.core.states import ModelState
from pool.messages import PooledModel

UNHEARD = "unknown"  # the state of a model that no pool has spoken of
# The words of llama-swap's `/running`, by which pages of others know what they show.
RUNNING = {
    ModelState.AWAKE: "ready",
    ModelState.LOADING: "starting",
    ModelState.WAKING: "starting",
    ModelState.DRAINING: "stopping",
    ModelState.RELEASING: "stopping",
    ModelState.UNLOADING: "stopping",
}


class OwnAnswer(NamedTuple):
    """An answer of the gateway itself, as JSON. `code`: of a refusal."""

    status: int
    body: bytes
    code: str = ""

    def response(self, http: HttpRequest, content_type: bytes = b"application/json") -> bytes:
        return error_response(
            self.status,
            self.body,
            http.request_id,
            keeps_alive=http.keeps_alive,
            is_to_head=http.is_to_head,
            retry_after_s=RETRY_AFTER_S if self.status == 503 else None,
            content_type=content_type,
        )


class ModelService:
    """All models of one child."""

    def __init__(self, lanes: Lanes, aliases: Mapping[str, Sequence[str]]) -> None:
        self.lanes = lanes
        self._aliases = {model: tuple(aliases.get(model, ())) for model in lanes.by_model}
        self._router = Router(self._aliases)
        self._said: dict[str, PooledModel] = {}
        self._created = int(time.time())

    @property
    def is_heard(self) -> bool:
        """Whether the pool has spoken."""
        return bool(self._said)

    def set_doors(self, models: Mapping[str, PooledModel]) -> Iterable[LaneDoorSet]:
        """What the pool says of each model, and what follows for its lane."""
        self._said = dict(models)
        for model, said in models.items():
            if said.door is not None:
                yield LaneDoorSet(model, said.number, said.door, said.rules)

    def find(self, http: HttpRequest) -> Wishes | OwnAnswer:
        """For which model it is, with its path behind `/m/<model>`; or the gateway's own answer.
        Where the path or a header names the model, a broken body is the engine's to refuse."""
        in_path = self._strip(http)
        if is_endpoint(http.method, http.path):
            return self._whose(unquote(in_path), http.path)
        if http.method in (b"GET", b"HEAD"):
            own = self._own(http.path, unquote(in_path))
            if own is not None:
                return own
        if is_hop_path(http.path):
            return _refusal(answers.NOT_FOUND, http.path)
        said = dict(http.wishes)
        asked, fault = http.members
        try:
            in_body = value_of(asked.model)
        except ValueError as error:
            in_body, fault = None, str(error)
        named = said.get(b"x-understudy-model", b"").decode(errors="replace")
        model, name = self._router.find(in_body, unquote(in_path), named)
        if not model:
            return _refusal(self._objection(name, fault, http), http.path)
        try:
            return Wishes(
                model,
                priority_of(_wish(asked.priority), _text(said.get(b"x-understudy-priority"))),
                wait_ms(said.get(b"prefer", b"").decode(errors="replace")),
                keep_alive_ms(_wish(asked.keep_alive), _text(said.get(b"x-understudy-keep-alive"))),
            )
        except BadWish as bad:
            return _refusal(answers.bad_wish(bad.field, bad.header, bad.must_be), http.path)

    def describe(self, model: str) -> dict[str, Any]:
        """One entry of `/v1/models`."""
        lane, said = self.lanes.by_model[model], self._said.get(model)
        now_ms = time.monotonic() * 1000
        demand = lane.demand(now_ms)
        expected_ms = lane.expected_wait_ms(now_ms)
        return {
            "id": model,
            "object": "model",
            "created": self._created,
            "owned_by": "understudy",
            "status": {
                "value": UNHEARD if said is None else said.state,
                "since": None if said is None else _wall(said.since_ms, now_ms),
                "reason": "" if said is None else said.reason,
            },
            "meta": {
                "understudy": {
                    "aliases": list(self._aliases[model]),
                    "tier": None if said is None else said.tier,
                    "door": None if lane.door is None else _word(lane.door),
                    "in_flight": demand.in_flight,
                    "waiting": len(demand.tickets) - lane.parked,
                    "parked": lane.parked,
                    "expected_wait_ms": None if expected_ms is None else round(expected_ms),
                    "memory": {} if said is None else dict(said.memory),
                }
            },
        }

    # ------------------------------------------------------------------ inside

    def _strip(self, http: HttpRequest) -> str:
        """The model that the path names; from now on `http` is what its engine gets."""
        method, target, rest = http.head.split(b" ", 2)
        model, path = model_in_path(target.decode("latin-1"))
        if model:
            stripped = path.encode("latin-1")
            http.head = b"%b %b %b" % (method, stripped, rest)
            http.path = path_of(stripped)
        return model

    def _own(self, path: str, in_path: str) -> OwnAnswer | None:
        if in_path:
            if path != "/status":
                return None
            return self._one(in_path, path)
        if path == "/v1/models":
            models = [self.describe(model) for model in self.lanes.by_model]
            return _ok({"object": "list", "data": models})
        if path.startswith("/v1/models/"):
            return self._one(path.removeprefix("/v1/models/"), path)
        if path == "/running":
            states = [(model, said.state) for model, said in self._said.items()]
            running = [
                {"model": model, "state": RUNNING[state]}
                for model, state in states
                if state in RUNNING
            ]
            return _ok({"running": running})
        return None

    def _whose(self, in_path: str, path: str) -> Wishes | OwnAnswer:
        """Of which model an answer of the gateway itself is: "" for all of them."""
        model = self._router.find(in_path)[0] if in_path else ""
        if in_path and not model:
            return _refusal(answers.unknown_model(in_path, self._router.known), path)
        return Wishes(model)

    def _one(self, name: str, path: str) -> OwnAnswer:
        model, _ = self._router.find(name)
        if model:
            return _ok(self.describe(model))
        return _refusal(answers.unknown_model(name, self._router.known), path)

    def _objection(self, name: str, fault: str, http: HttpRequest) -> Failure:
        """Why a request is for none of the models: it names `name`, or nothing."""
        if name:
            return answers.unknown_model(name, self._router.known)
        if http.method in (b"GET", b"HEAD"):
            return answers.NOT_FOUND
        return answers.bad_json(fault) if fault else answers.no_model(self._router.known)


def _refusal(failure: Failure, path: str) -> OwnAnswer:
    return OwnAnswer(failure.status, answers.error_body(failure, path), failure.code)


def _ok(document: dict[str, Any]) -> OwnAnswer:
    return OwnAnswer(HTTPStatus.OK, to_json(document).encode() + b"\n")


def _wish(raw: msgspec.Raw) -> object:
    """A member of the body. One that cannot be read is no number and no text."""
    try:
        return value_of(raw)
    except ValueError:
        return ()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def _word(door: msgspec.Struct) -> str:
    """Such as `shut`."""
    return str(door.__struct_config__.tag)


def _wall(at_ms: float, now_ms: float) -> str:
    return rfc3339(datetime.fromtimestamp(time.time() - (now_ms - at_ms) / 1000, UTC))
