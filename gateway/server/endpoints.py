"""What the gateway answers by itself, whatever engine is active and while none is; and for which
model of a pool a request is.

`/health`, `/ping`, `/version` and `/metrics` are as in vLLM; a pool adds `/v1/models` and
`/m/<model>/status`. No engine is woken for them, and they count as no requests. What may be
done with any other request `gateway.core.lanes` decides.

The model of a request is named in its body, else in its path (`/m/<model>/…`), else in a header;
where there is only one, it need not be named. A wish that cannot be read is refused; all else in a
body is the engine's to judge, and the gateway changes nothing in it.

An engine's own page of `/metrics` goes through. Requests that wait in the gateway are added to its
`vllm:num_requests_waiting`, and the three gauges that endpoint pickers read are written here if the
engine lacks them. The pages of several engines become one, since Prometheus's format has each name
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from gateway.core.answers import RETRY_AFTER_S, Failure, failure
from gateway.core.fleet import Fleet
from gateway.core.lanes import Lanes
from gateway.core.machine import NEVER_MS
from gateway.server.requests import (
    INFERENCE_PATHS,
    HttpRequest,
    is_endpoint,
    is_hop_path,
    model_in_path,
    path_of,
    value_of,
)
from gateway.server.responses import OwnAnswer, fetch
from gateway.server.settings import GatewaySettings
from plumbing import __version__
from plumbing.pod.paths import engine_http_socket
from plumbing.service.clock import rfc3339
from plumbing.service.config import duration_s
from plumbing.service.http import Probe
from plumbing.text import duration, to_json
from pool.core.events import ModelDemand, RefusedDoor, ShutDoor, TicketKind
from pool.messages import PooledModel

PAGE_S = 1.0  # an engine that does not give its page in this time is left out of it
PAGE_BYTES_MAX = 8 << 20  # vLLM's has some 200 KiB
UNHEARD = "unknown"  # the state of a model that no pool has spoken of
QUOTED_CHARS_MAX = 64  # of a name that a client has sent


# ------------------------------------------------------- for which model it is, and what it wants

T = TypeVar("T")
PRIORITY_MAX = 1000  # either way
FOREVER_S = 10**12


class BadWish(ValueError):
    """A client's wish cannot be read. `must_be`: what can."""

    def __init__(self, field: str, must_be: str) -> None:
        super().__init__(field, must_be)
        self.field, self.must_be = field, must_be
        self.header = f"X-Understudy-{field.replace('_', '-').title()}"


class Wishes(Struct, frozen=True):
    """For which model, how soon, and for how long to keep it awake afterwards."""

    model: str
    priority: int | None = None
    keep_alive_ms: float | None = None


class Router:
    """`aliases` of each model's name."""

    def __init__(self, aliases: Mapping[str, Sequence[str]]) -> None:
        self.known = ", ".join(aliases)
        self._models = {alias: name for name, names in aliases.items() for alias in names}
        self._models.update((name, name) for name in aliases)
        self._only = next(iter(aliases)) if len(aliases) == 1 else ""

    def find(self, *names: object) -> tuple[str, str]:
        """The model and the name that the client gave. The first of `names` that is not empty
        counts. The model is "" if the pod does not know the name."""
        named = next((each for each in names if isinstance(each, str) and each), "")
        return (self._models.get(named, "") if named else self._only), named


def first_of(read: Callable[[object], T | None], *said: object) -> T | None:
    """The first of `said` that is there, as `read` reads it. None: none was said. Raises
    `BadWish` if any of them cannot be read."""
    return next((each for each in [*map(read, said)] if each is not None), None)


def priority(said: object) -> int | None:
    """Within limits."""
    if said is None:
        return None
    if isinstance(said, int | str) and not isinstance(said, bool):
        with contextlib.suppress(ValueError):
            return max(-PRIORITY_MAX, min(PRIORITY_MAX, int(said)))
    raise BadWish("priority", "a whole number, and lower is sooner")


def keep_alive_ms(said: object) -> float | None:
    """A number is in seconds, as for Ollama, and less than nothing is for ever."""
    if said is None:
        return None
    if isinstance(said, str):
        with contextlib.suppress(ValueError):
            text = said.strip()
            said = duration_s(text.removeprefix("-")) * (-1 if text.startswith("-") else 1)
    if isinstance(said, int | float) and not isinstance(said, bool):
        return math.inf if said < 0 else min(said, FOREVER_S) * 1000.0
    raise BadWish("keep_alive", 'seconds, a duration such as "5m", 0, or -1 for ever')


NO_WISHES = Wishes("")


# ------------------------------------------------------------------------------ what it answers


class Endpoints:
    """Of one gateway. `said`: what the pool says of each model."""

    def __init__(
        self, core: Lanes | Fleet, settings: GatewaySettings, is_stopping: Callable[[], bool]
    ) -> None:
        self.said: dict[str, PooledModel] = {}
        self._core = core
        self._aliases = {it: tuple(settings.aliases.get(it, ())) for it in core.lanes}
        self._router = Router(self._aliases)
        self._created = int(time.time())
        self._directory, self._hold_ms = settings.directory, settings.rules.hold_ms
        self._is_stopping = is_stopping
        self._kv_usage: dict[str, float] = {}  # as the last engine said

    def find(self, http: HttpRequest) -> Wishes | OwnAnswer | Awaitable[OwnAnswer]:
        """For which model it is, with its path behind `/m/<model>`; or the gateway's own answer.
        Where the path or a header names the model, a broken body is the engine's to refuse."""
        is_pool = bool(self._core.lanes)
        in_path = unquote(self._strip(http)) if is_pool else ""
        if http.path not in INFERENCE_PATHS and is_hop_path(http.path):
            return OwnAnswer.of(failure("gateway.not_found"), http.path)
        if isinstance(self._core, Fleet):
            return self._to_pods(self._core, http)
        if is_endpoint(http.method, http.path):
            model = self._router.find(in_path)[0] if in_path else ""
            if in_path and not model:
                return OwnAnswer.of(self._unknown(in_path), http.path)
            if http.path == "/metrics":
                return self._metrics(model)
            return self._version(model) if http.path == "/version" else self._health(model)
        if not is_pool:
            return NO_WISHES
        is_read = http.method in (b"GET", b"HEAD")
        own = self._about_models(http.path, in_path) if is_read else None
        return own or self._wishes(http, in_path)

    def _to_pods(self, fleet: Fleet, http: HttpRequest) -> Wishes | OwnAnswer:
        if http.path in ("/health", "/ping") and is_endpoint(http.method, http.path):
            if why := fleet.waits_for:
                return OwnAnswer.of(failure("no_active_engine", why=why), http.path)
            return _json({"status": "ok"})
        in_body, in_header, _ = _names(http)
        return Wishes(in_body if isinstance(in_body, str) else in_header)

    # ------------------------------------------------------------------ health and version

    def serves(self) -> Probe:
        """Whether a request would be answered: an engine serves, one soon will, or one sleeps that
        a request wakes. A model of a pool that has failed takes no others out of service."""
        lane = self._core.alone
        if lane is None:
            if self.said:
                return Probe(True, "pool")
            if any(each.target.grant for each in self._core.lanes.values()):
                return Probe(True, "engine_active")
            why = "neither the pool nor an engine has reported yet"
            return Probe(False, "no_engine", {"why": why})
        target, door = lane.target, lane.door
        if target.grant is None:
            return Probe(False, "no_engine", {"why": target.idle or "no engine was active yet"})
        if target.idle is not None:
            idle_ms = time.monotonic() * 1000 - target.idle_ms
            if idle_ms < self._hold_ms:
                return Probe(True, "takeover", {"why": target.idle})
            return Probe(False, "no_engine", {"why": target.idle, "for": duration(idle_ms)})
        details = {"engine": target.grant.engine, "token": target.grant.token}
        if isinstance(door, ShutDoor):
            will_wake = door.expected_ms != NEVER_MS
            return Probe(will_wake, "resting", {**details, "why": door.reason})
        return Probe(True, "engine_active", details)

    def _health(self, model: str) -> OwnAnswer:
        """As the gateway's `/ready`; of one model, what the pool says."""
        serves, door = self.serves(), self._core.lanes[model].door if model else None
        why = "" if serves.ok else str(serves.details["why"])
        if isinstance(door, RefusedDoor):
            why = door.sentence
        if self._is_stopping():
            why = "the pod is shutting down"
        if why:
            document = {"status": "unavailable", "why": why}
            return _json(document, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_AFTER_S)
        return _json({"status": "ok"})

    def _version(self, model: str) -> OwnAnswer:
        lanes = [self._core.by_model[model]] if model else self._core.by_model.values()
        hellos = [each.target.last_hello for each in lanes]
        first = next((each.backend_version or None for each in hellos if each is not None), None)
        return _json({"version": first, "understudy": __version__})

    # ------------------------------------------------------------------ models of a pool

    def _strip(self, http: HttpRequest) -> str:
        """The model that the path names; from now on `http` is what its engine gets."""
        method, target, rest = http.head.split(b" ", 2)
        model, path = model_in_path(target.decode("latin-1"))
        if model:
            stripped = path.encode("latin-1")
            http.head = b"%b %b %b" % (method, stripped, rest)
            http.path = path_of(stripped)
        return model

    def _about_models(self, path: str, in_path: str) -> OwnAnswer | None:
        """The answer to a GET of this path, if it is the gateway's."""
        if in_path:
            if path == "/status":
                return self._one(in_path, path)
        elif path == "/v1/models":
            models = [self.describe(model) for model in self._core.lanes]
            return _json({"object": "list", "data": models})
        elif path.startswith("/v1/models/"):
            return self._one(path.removeprefix("/v1/models/"), path)
        return None

    def _one(self, name: str, path: str) -> OwnAnswer:
        model, _ = self._router.find(name)
        if model:
            return _json(self.describe(model))
        return OwnAnswer.of(self._unknown(name), path)

    def describe(self, model: str) -> dict[str, Any]:
        """One entry of `/v1/models`."""
        lane, said = self._core.lanes[model], self.said.get(model)
        now_ms = time.monotonic() * 1000
        demand = lane.demand(now_ms)
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
                    "door": lane.door_word,
                    **counts_of(demand),
                }
            },
        }

    def _wishes(self, http: HttpRequest, in_path: str) -> Wishes | OwnAnswer:
        said, members = http.named, http.members[0]
        in_body, in_header, fault = _names(http)
        model, name = self._router.find(in_body, in_path, in_header)
        if not model:
            return OwnAnswer.of(self._no_model(name, fault, http), http.path)
        try:
            return Wishes(
                model,
                first_of(
                    priority,
                    _wish(members.priority),
                    _text(said.get(b"x-understudy-priority")),
                ),
                first_of(
                    keep_alive_ms,
                    _wish(members.keep_alive),
                    _text(said.get(b"x-understudy-keep-alive")),
                ),
            )
        except BadWish as bad:
            return OwnAnswer.of(failure(f"gateway.bad_{bad.field}", **vars(bad)), http.path)

    def _no_model(self, name: str, fault: str, http: HttpRequest) -> Failure:
        """Why a request is for none of the models: it names `name`, or nothing."""
        if name:
            return self._unknown(name)
        if http.method in (b"GET", b"HEAD"):
            return failure("gateway.not_found")
        if fault:
            return failure("gateway.bad_json", why=fault)
        return failure("gateway.no_model", known=self._router.known)

    def _unknown(self, name: str) -> Failure:
        quoted = name if len(name) <= QUOTED_CHARS_MAX else name[:QUOTED_CHARS_MAX] + "…"
        return failure("model_not_found", name=quoted, known=self._router.known)

    # ------------------------------------------------------------------ metrics

    async def _metrics(self, model: str) -> OwnAnswer:
        names = [model] if model else list(self._core.by_model)
        pages = await asyncio.gather(*map(self._page, names))
        for name, page in zip(names, pages, strict=True):
            said = kv_usage(page)
            if said is not None:
                self._kv_usage[name] = said
        loads = map(self._load, names)
        text = page_of(zip(loads, pages, strict=True), is_pool=bool(self._core.lanes))
        return OwnAnswer(HTTPStatus.OK, text, content_type=CONTENT_TYPE)

    async def _page(self, model: str) -> bytes:
        """The page of the model's active engine, b"" where there is none."""
        target = self._core.by_model[model].target
        if target.grant is None or target.idle is not None or target.hello is None:
            return b""
        path = engine_http_socket(self._directory, target.grant.engine)
        try:
            async with asyncio.timeout(PAGE_S):
                return await fetch(path, "/metrics", PAGE_BYTES_MAX)
        except (OSError, ValueError):  # it is lost, or has none
            return b""

    def _load(self, model: str) -> RequestLoad:
        lane = self._core.by_model[model]
        hello, waiting = lane.target.last_hello, len(lane.queue.waiting)
        return RequestLoad(
            model or next(iter(hello.models if hello is not None else ()), ""),
            running=len(lane.requests) - waiting,
            waiting=waiting,
            kv_usage=self._kv_usage.get(model, 0.0),
        )


def counts_of(demand: ModelDemand) -> dict[str, int]:
    parked = sum(each.kind is TicketKind.PARKED for each in demand.tickets)
    waiting = len(demand.tickets) - parked
    return {"in_flight": demand.in_flight, "waiting": waiting, "parked": parked}


def _json(
    document: dict[str, Any],
    status: HTTPStatus = HTTPStatus.OK,
    retry_after_s: int | None = None,
) -> OwnAnswer:
    return OwnAnswer(status, to_json(document).encode() + b"\n", retry_after_s=retry_after_s)


def _names(http: HttpRequest) -> tuple[object, str, str]:
    """The model that the body names, the one that a header names, and what is wrong with the
    body."""
    members, fault = http.members
    in_header = http.named.get(b"x-understudy-model", b"").decode(errors="replace")
    try:
        return value_of(members.model), in_header, fault
    except ValueError as error:
        return None, in_header, str(error)


def _wish(raw: msgspec.Raw) -> object:
    """A member of the body. One that cannot be read is no number and no text."""
    try:
        return value_of(raw)
    except ValueError:
        return ()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


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
