"""What the gateway answers by itself, whatever engine is active and while none is.

`/health`, `/ping`, `/version` and `/metrics` are as in vLLM; a pool adds `/v1/models`, `/running`
and `/m/<model>/status`. No engine is woken for them, and they count as no requests. `Endpoints`
keeps what was heard of engines, `ModelService` what the pool has said of each model and which model
a request is for; `gateway.core.lanes` decides what may be done with it.

An engine's own page of `/metrics` goes through. Requests that wait in the gateway are added to its
`vllm:num_requests_waiting`, and the three gauges that endpoint pickers read are written here if the
engine lacks them. The pages of several engines become one, since Prometheus's format has each name
once.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from gateway.core import answers
from gateway.core import events as ev
from gateway.core.answers import RETRY_AFTER_S, Failure
from gateway.core.client_request import RequestState
from gateway.core.events import LaneDoorSet
from gateway.core.lanes import Lane, Lanes
from gateway.core.machine import Gateway
from gateway.core.router import (
    BadWish,
    Router,
    Wishes,
    keep_alive_ms,
    model_in_path,
    priority_of,
    wait_ms,
)
from gateway.server.client import ClientConnection
from gateway.server.requests import HttpRequest, is_endpoint, is_hop_path, path_of, value_of
from gateway.server.responses import error_response, fetch
from plumbing import __version__
from plumbing.gateway_protocol import Hello
from plumbing.pod.paths import engine_http_socket
from plumbing.service.clock import rfc3339
from plumbing.text import to_json
from pool.core.events import RefusedDoor
from pool.core.states import ModelState
from pool.messages import PooledModel

PAGE_S = 1.0  # an engine that does not give its page in this time is left out of it
PAGE_BYTES_MAX = 8 << 20  # vLLM's has some 200 KiB
NO_WISHES = Wishes("")
WAITING_STATES = (RequestState.WAITING, RequestState.PARKED)


class Endpoints:
    """`core`: whose requests are counted. `is_stopping`: whether no more are accepted."""

    def __init__(
        self,
        core: Gateway | Lanes,
        models: ModelService | None,
        directory: str,
        hold_ms: float,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._lanes = core.by_model if isinstance(core, Lanes) else {"": core}
        self._models = models
        self._directory = directory
        self._hold_ms = hold_ms
        self._is_stopping = is_stopping
        self._grants: dict[str, ev.EngineGranted] = {}  # the newest, by model
        self._idle_ms: dict[str, float] = {}  # since when no engine holds the lock
        self._door: ev.DoorSet | None = None  # of the newest grant
        self._hellos: dict[str, Hello] = {}  # the last one of each model's engines
        self._kv_usage: dict[str, float] = {}  # as the last engine said
        self._tasks: set[asyncio.Task[None]] = set()

    def told(self, event: ev.GatewayEvent) -> None:
        """A word about engines, before the core gets it."""
        self._note_hellos()
        match event:
            case ev.EngineGranted():
                self._grants[event.model] = event
                self._idle_ms.pop(event.model, None)
                self._door = None
            case ev.NobodyGranted() if event.model in self._grants:
                self._idle_ms.setdefault(event.model, time.monotonic() * 1000)
            case ev.DoorSet():
                self._door = event

    def route(
        self, client: ClientConnection, http: HttpRequest, refused: Callable[[OwnAnswer], None]
    ) -> Wishes | None:
        """For which model it is; None: it is answered here. `refused`: what to do with a refusal,
        beside sending it."""
        found = NO_WISHES if self._models is None else self._models.find(http)
        if isinstance(found, OwnAnswer):
            if found.code:
                refused(found)
            client.answer(found.response(http))
            return None
        if not is_endpoint(http.method, http.path):
            return found
        self._note_hellos()
        if http.path == "/metrics":
            task = asyncio.get_running_loop().create_task(self._metrics(client, http, found.model))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return None
        answer = self._version if http.path == "/version" else self._health
        client.answer(answer(found.model).response(http))
        return None

    # ------------------------------------------------------------------ answers

    def _health(self, model: str) -> OwnAnswer:
        """Whether a request would be answered: an engine serves, one soon will, or one rests that
        a request wakes. As the gateway's `/ready`."""
        why = self._objection(model)
        if why:
            return _json({"status": "unavailable", "why": why}, HTTPStatus.SERVICE_UNAVAILABLE)
        return _json({"status": "ok"})

    def _objection(self, model: str) -> str:
        if self._is_stopping():
            return "the pod is shutting down"
        if self._models is not None:
            door = self._lane(model).door if model else None
            if isinstance(door, RefusedDoor):
                return door.sentence
            is_known = self._models.is_heard or bool(self._grants)
            return "" if is_known else "neither the pool nor an engine has reported yet"
        grant = self._grants.get("")
        if grant is None:
            return "no engine was active yet"
        idle_ms = self._idle_ms.get("")
        if idle_ms is not None:
            is_late = time.monotonic() * 1000 - idle_ms >= self._hold_ms
            return "no engine is active" if is_late else ""
        door_set = self._door
        if door_set is not None and door_set.token == grant.token and door_set.is_shut:
            return "" if door_set.does_open else door_set.reason
        return ""

    def _version(self, model: str) -> OwnAnswer:
        hellos = {name: hello for name, hello in self._hellos.items() if model in ("", name)}
        versions = {name: hello.backend_version or None for name, hello in hellos.items()}
        first = next(iter(versions.values()), None)
        return _json({"version": first, "understudy": __version__})

    async def _metrics(self, client: ClientConnection, http: HttpRequest, model: str) -> None:
        names = [model] if model else list(self._lanes)
        pages = await asyncio.gather(*map(self._page, names))
        for name, page in zip(names, pages, strict=True):
            said = kv_usage(page)
            if said is not None:
                self._kv_usage[name] = said
        loads = map(self._load, names)
        text = page_of(zip(loads, pages, strict=True), is_pool=self._models is not None)
        if client.request is http:  # else the client has left
            client.answer(OwnAnswer(HTTPStatus.OK, text).response(http, CONTENT_TYPE))

    async def _page(self, model: str) -> bytes:
        """The page of the model's active engine, b"" where there is none."""
        grant = self._grants.get(model)
        if grant is None or model in self._idle_ms or self._lanes[model].hello is None:
            return b""
        path = engine_http_socket(self._directory, grant.engine)
        try:
            async with asyncio.timeout(PAGE_S):
                return await fetch(path, "/metrics", PAGE_BYTES_MAX)
        except (OSError, ValueError):  # it is lost, or has none
            return b""

    def _load(self, model: str) -> RequestLoad:
        by_state = self._lanes[model].stats(0.0).by_state
        waiting = sum(by_state.get(str(state), 0) for state in WAITING_STATES)
        hello = self._hellos.get(model)
        served = next(iter(hello.models), "") if hello is not None else ""
        return RequestLoad(
            model or served,
            running=sum(by_state.values()) - waiting,
            waiting=waiting,
            kv_usage=self._kv_usage.get(model, 0.0),
        )

    # ------------------------------------------------------------------ inside

    def _note_hellos(self) -> None:
        """The core forgets an engine's hello with the engine."""
        for model, lane in self._lanes.items():
            if lane.hello is not None:
                self._hellos[model] = lane.hello

    def _lane(self, model: str) -> Lane:
        assert self._models is not None
        return self._models.lanes.by_model[model]


def _json(document: dict[str, object], status: HTTPStatus = HTTPStatus.OK) -> OwnAnswer:
    return OwnAnswer(status, to_json(document).encode() + b"\n")


UNHEARD = "unknown"  # the state of a model that no pool has spoken of
# The words of llama-swap's `/running`, by which pages of others know what they show.
RUNNING_WORDS = {
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
    """All models of one gateway."""

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
        members, fault = http.members
        try:
            in_body = value_of(members.model)
        except ValueError as error:
            in_body, fault = None, str(error)
        named = said.get(b"x-understudy-model", b"").decode(errors="replace")
        model, name = self._router.find(in_body, unquote(in_path), named)
        if not model:
            return _refusal(self._objection(name, fault, http), http.path)
        try:
            return Wishes(
                model,
                priority_of(_wish(members.priority), _text(said.get(b"x-understudy-priority"))),
                wait_ms(said.get(b"prefer", b"").decode(errors="replace")),
                keep_alive_ms(
                    _wish(members.keep_alive), _text(said.get(b"x-understudy-keep-alive"))
                ),
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
                {"model": model, "state": RUNNING_WORDS[state]}
                for model, state in states
                if state in RUNNING_WORDS
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


CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
RUNNING_GAUGE = b"vllm:num_requests_running"
WAITING_GAUGE = b"vllm:num_requests_waiting"
KV_USAGE = b"vllm:kv_cache_usage_perc"
HELP = {
    RUNNING_GAUGE: b"Number of requests in model execution batches.",
    WAITING_GAUGE: b"Number of requests waiting to be processed.",
    KV_USAGE: b"KV-cache usage. 1 means 100 percent usage.",
}
_START = b"# HELP "
_SAMPLE = re.compile(rb"^([^#\s{]+\{[^\n]*\}) (\S+)", re.MULTILINE)


class RequestLoad(Struct, frozen=True):
    """What the gateway knows of one model. `kv_usage`: what its engine has said last."""

    model: str
    running: int = 0  # requests that an engine has
    waiting: int = 0
    kv_usage: float = 0.0


def page_of(found: Iterable[tuple[RequestLoad, bytes]], *, is_pool: bool) -> bytes:
    """One page out of those of all active engines, b"" where one has none."""
    merged: dict[bytes, bytes] = {}
    for load, page in found:
        for name, block in _with(load, page).items():
            # Numbers of a process name no model: those of two engines could not be told apart.
            if is_pool and not name.startswith(b"vllm:"):
                continue
            known = merged.get(name)
            merged[name] = block if known is None else known + _samples(block)
    return b"".join(merged.values())


def kv_usage(page: bytes) -> float | None:
    """The largest of an engine's caches; None: it does not say."""
    block = _blocks(page).get(KV_USAGE, b"")
    return max((float(value) for _, value in _SAMPLE.findall(block)), default=None)


def _with(load: RequestLoad, page: bytes) -> dict[bytes, bytes]:
    blocks = _blocks(page)
    own = {RUNNING_GAUGE: load.running, WAITING_GAUGE: load.waiting, KV_USAGE: load.kv_usage}
    labels = b'{engine="0",model_name="%b"}' % _escaped(load.model)
    if load.waiting and WAITING_GAUGE in blocks:
        blocks[WAITING_GAUGE] = _SAMPLE.sub(
            lambda sample: b"%b %.1f" % (sample[1], float(sample[2]) + load.waiting),
            blocks[WAITING_GAUGE],
            count=1,
        )
    for name, value in own.items():
        if name not in blocks:
            head = b"# HELP %b %b\n# TYPE %b gauge\n" % (name, HELP[name], name)
            blocks[name] = b"%b%b%b %s\n" % (head, name, labels, repr(float(value)).encode())
    return blocks


def _blocks(page: bytes) -> dict[bytes, bytes]:
    """By name: its comments and samples."""
    if not page.startswith(_START):
        return {}
    parts = page.removesuffix(b"\n").removeprefix(_START).split(b"\n" + _START)
    return {part.partition(b" ")[0]: b"%b%b\n" % (_START, part) for part in parts}


def _samples(block: bytes) -> bytes:
    lines = block.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"#"))


def _escaped(label: str) -> bytes:
    return label.translate({92: r"\\", 34: r"\"", 10: r"\n"}).encode()
