"""The `--json` documents of gateway, from which docs/cli_json.md is generated."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from plumbing.service.schema import EventRecord, Schema, Time


class GatewayStop(Schema):
    drain_ms: Annotated[float, "how long streams get once it is told to end (`--drain-timeout`)"]
    class_: Annotated[
        str | None, "what a failover does to the active engine's streams; null: unknown"
    ] = field(name="class")


class GatewayService(Schema):
    address: Annotated[
        str | None, "that it accepts on; null until the lock server has lent its socket"
    ]
    tls: Annotated[bool, "clients speak HTTPS"]


class GatewayUpstream(Schema):
    engine: Annotated[str, "its id"]
    token: Annotated[int, "the token of its grant"]
    since: Annotated[Time, "when the gateway heard of it"]
    for_ms: Annotated[float, "time since then"]
    is_connected: Annotated[bool, "whether it has answered under that grant"]
    continuation_id: Annotated[
        str, "equal in engines that continue each other's streams; empty: unknown"
    ]
    continuation: Annotated[
        str | None, "best class of its streams: `exact`, `state`, `none`; null: unknown"
    ]
    problem: Annotated[
        str | None, "why it cannot be reached, or why its streams cannot be continued"
    ]


class GatewayLockServer(Schema):
    connected: Annotated[bool, "the lock server is connected and serves this gateway"]
    since: Annotated[Time, "since when it is, or is not"]
    problem: Annotated[str | None, "why it is not"]


class GatewayIdle(Schema):
    reason: Annotated[str, "for operators"]
    since: Annotated[Time, "since when"]
    for_ms: Annotated[float, "time since then"]


class GatewayEngine(Schema):
    state: Annotated[str, "its state"]
    since: Annotated[Time, "since when"]
    for_ms: Annotated[float, "time since then"]
    goal: Annotated[str, "the tier of its newest goal"]
    goal_by: Annotated[str | None, "who told it last"]


class GatewayRest(Schema):
    sleep_after_ms: Annotated[float, "idle time before the engine is put to sleep; 0: never"]
    wake: Annotated[str, "who wakes it, `on-request` or `manual`"]
    door: Annotated[str, "`open`, or `shut`: requests wait"]
    engine: Annotated[GatewayEngine | None, "the lock holder's own report; null: unreachable"]
    problem: Annotated[str | None, "why it does not report, or its fault"]


class GatewayModel(Schema):
    state: Annotated[str | None, "its [state](states.md); null until the pool has said it"]
    reason: Annotated[str, "why it is in that state"]
    door: Annotated[
        str | None, "its requests are sent (`open`), wait (`shut`) or `refused`; null: not known"
    ]
    engine: Annotated[str | None, "the engine that serves it"]
    in_flight: Annotated[int, "requests that an engine has"]
    waiting: Annotated[int, "requests that wait, of which nothing was answered"]
    parked: Annotated[int, "streams that wait for the model's next turn"]


class GatewayPool(Schema):
    connected: Annotated[bool, "false: its last message counts"]
    since: Annotated[Time, "since when it is, or is not"]
    for_ms: Annotated[float, "time since then"]
    problem: Annotated[str | None, "why the pool cannot be used"]
    models: dict[str, GatewayModel]


class GatewayLoad(Schema):
    connections: Annotated[int, "connections of clients"]
    in_flight: Annotated[int, "requests, those below included"]
    waiting: Annotated[int, "requests that wait for an engine, of which nothing was answered"]
    parked: Annotated[int, "streams that wait to be resumed"]
    parked_oldest_ms: Annotated[float, "how long the oldest of them has waited; 0 if there is none"]
    replaying: Annotated[int, "streams that an engine plays again, up to where their clients are"]
    suspects: Annotated[int, "requests in flight at two engine deaths without progress between"]
    memory_bytes: Annotated[int, "memory of journals, bodies and held answers"]


class GatewayRequest(Schema):
    ending: Annotated[str, "`whole`, `refused`, `broken` (after its first byte), `client_gone`"]
    continuation: Annotated[str, "its class, `exact`, `state`, `retry` or `none`"]
    count: Annotated[int, "requests that ended so since it started"]


class GatewayTotal(Schema):
    requests: list[GatewayRequest]
    replayed_tokens: Annotated[int, "tokens that engines were given to resume streams"]
    pauses: Annotated[int, "how often a stream was interrupted"]
    pause_ms: Annotated[float, "for how long, in all"]
    resumes: Annotated[int, "how often one went on"]


class OfflineGateway(Schema):
    """In place of the gateway's document, while it does not answer."""

    schema: Annotated[int, "1"]
    online: Annotated[bool, "false"]
    pid: Annotated[int | None, "a process that runs and does not answer"]
    dir: Annotated[str, "its directory"]
    accepting: Annotated[None, "unknown"]
    problems: Annotated[list[str], "what follows, and what to do"]


class GatewayDocument(Schema):
    """What the documents of a gateway and of a front share."""

    schema: Annotated[int, "1"]
    online: Annotated[bool, "true"]
    pid: Annotated[int, "its process"]
    restarts: Annotated[int, "restarts by the container's init"]
    dir: Annotated[str, "its directory"]
    accepting: Annotated[bool, "it accepts connections"]
    problems: Annotated[list[str], "what does not work, for operators"]
    as_of_event_id: Annotated[int, "the newest event that the document includes"]
    last_event: Annotated[EventRecord | None, "the newest event"]
    since: Annotated[Time, "when it started"]
    for_ms: Annotated[float, "time since then"]
    stopping: Annotated[bool, "it drains before its end, or every engine was told to end"]
    accepting_since: Annotated[Time | None, "since when it does"]
    load: GatewayLoad
    memory_bytes_max: Annotated[
        int,
        "the limit of that, half of `--memory-bytes` beside a predecessor; requests beyond it"
        " cannot be continued",
    ]
    totals: GatewayTotal
    service: GatewayService
    stop: GatewayStop


class GatewayHop(Schema):
    address: Annotated[str, "where fronts connect (`--hop`)"]
    pod: Annotated[str, "the pod's name in reports to fronts"]
    fronts: Annotated[int, "fronts that it reports to"]
    requests: Annotated[int, "their requests"]
    leaving_ms: Annotated[float | None, "time left to a pod that leaves; null: it does not"]


class GatewayStatus(GatewayDocument):
    """What does the gateway accept, where do requests go, and what waits?

    Without its directory: [errors](#errors).
    """

    predecessor: Annotated[
        int | None, "the gateway that this one has replaced and that still finishes its requests"
    ]
    upstream: Annotated[GatewayUpstream | None, "the engine that requests go to; null without one"]
    lock_server: GatewayLockServer
    idle: Annotated[GatewayIdle | None, "no engine is known to serve; null if one is"]
    rest: GatewayRest
    pool: Annotated[
        GatewayPool | None, "the [pool](gateway.md#models-of-a-pool); null without a pool file"
    ]
    hop: Annotated[GatewayHop | None, "of a pod in a fleet; null without `--hop`"]


class FrontPodModel(Schema):
    engine: Annotated[str | None, "the engine that serves it; null: none"]
    tier: Annotated[str, "how near it is to serving, `awake` to `cold`"]
    in_flight: Annotated[int, "requests that the engine has, of all fronts"]
    waiting: Annotated[int, "requests that wait in the pod"]
    room: Annotated[int, "further requests that it takes"]


class FrontPod(Schema):
    address: Annotated[str, "where its gateway serves fronts"]
    name: Annotated[str | None, "its name; null until it has reported"]
    state: Annotated[str, "`unknown`, `ready`, `no_engine`, `leaving`, `silent` or `gone`"]
    since: Annotated[Time, "since when"]
    for_ms: Annotated[float, "time since then"]
    heard_for_ms: Annotated[float | None, "time since its last report; null: none yet"]
    leaving_ms: Annotated[float | None, "time that it had left then; null: it does not leave"]
    is_named: Annotated[bool, "a name leads to it now"]
    resumes: Annotated[bool, "false: a replay differed there, so it resumes no stream for a while"]
    streams: Annotated[int, "requests of this front that it has"]
    models: Annotated[dict[str, FrontPodModel], "by each name that a request may give"]
    problem: Annotated[str | None, "why it cannot be reached"]


class FrontStatus(GatewayDocument):
    """Which pods does the front know, what do they have, and what became of their streams?"""

    pods: list[FrontPod]
    losses: Annotated[dict[str, int], "lost pods, by cause: `gone`, `restarted`, `silent`"]
    moves: Annotated[dict[str, int], "streams that went on at another pod, by cause"]
    choices: Annotated[dict[str, int], "requests by why they got their pod"]


class ReplaceDocument(Schema):
    """The gateway's successor, which reads the certificate and the API keys again.

    The old process finishes its requests. Errors: `gateway.restart_failed` (the old one continues),
    `gateway.restart_busy`, `gateway.no_init`, `gateway.stopping`.
    """

    schema: Annotated[int, "1"]
    old_pid: Annotated[int, "the process that served"]
    new_pid: Annotated[int, "the process that serves now"]
    in_flight: Annotated[int, "requests that the old one had to finish"]


class LeaveDocument(Schema):
    """The pod has left its fleet: no request is left in it.

    Errors: `gateway.still_leaving` (exit code 5), `gateway.no_fleet`.
    """

    schema: Annotated[int, "1"]
    took_ms: Annotated[float, "until no request was left"]
