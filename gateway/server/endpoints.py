"""What the gateway answers by itself, whatever engine is active and while none is: `/health`,
`/ping`, `/version` and `/metrics` as vLLM has them, and in a pool what `models.py` says.

Owns what the lock server and the parent have said of engines, for these answers. No engine is woken
for them, and they count as no requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

from gateway.core import events as ev
from gateway.core.lane import Lane
from gateway.core.lanes import Lanes
from gateway.core.machine import Gateway
from gateway.core.router import Wishes
from gateway.core.states import RequestState
from gateway.server import engine_page
from gateway.server.client import ClientConnection
from gateway.server.engine_page import RequestLoad
from gateway.server.greeting import fetch
from gateway.server.models import ModelService, OwnAnswer
from gateway.server.requests import HttpRequest, is_endpoint
from plumbing import __version__
from plumbing.gateway_protocol import Hello
from plumbing.pod.paths import engine_http_socket
from plumbing.text import to_json
from pool.core.events import RefusedDoor

PAGE_S = 1.0  # an engine that does not give its page in this time is left out of it
PAGE_BYTES_MAX = 8 << 20  # vLLM's has some 200 KiB
NO_WISHES = Wishes("")
WAITING = (RequestState.WAITING, RequestState.PARKED)


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
            return "" if is_known else "neither the pool nor an engine was heard yet"
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
            said = engine_page.kv_usage(page)
            if said is not None:
                self._kv_usage[name] = said
        loads = map(self._load, names)
        text = engine_page.page_of(zip(loads, pages, strict=True), is_pool=self._models is not None)
        if client.request is http:  # else the client has left
            client.answer(OwnAnswer(HTTPStatus.OK, text).response(http, engine_page.CONTENT_TYPE))

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
        by_state = self._lanes[model].census(0.0).by_state
        waiting = sum(by_state.get(str(state), 0) for state in WAITING)
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
