"""The `--json` documents of lockserver, from which docs/cli_json.md is generated."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, UnsetType, field

from plumbing.service.schema import EventRecord, Schema, Time


class LockServerFields(Schema, kw_only=True):
    pid: Annotated[int | None, "null offline"]
    restarts: Annotated[int | UnsetType, "only when online: restarts by the container's init"] = (
        UNSET
    )
    since: Annotated[Time | None, "when it started; null offline"]
    dir: Annotated[str, "its directory"]
    online: Annotated[bool, "false: read from the state file"]


class LockHolder(Schema, kw_only=True):
    engine: Annotated[str, "the engine's id"]
    incarnation: Annotated[str, "the engine's launch, a name that is never reused"]
    token: Annotated[int, "token of its grant"]
    since: Annotated[Time, "when it was granted the lock"]
    for_ms: Annotated[float, "time since then"]
    since_mono_ms: Annotated[float, "when it was granted the lock"]
    connected: Annotated[bool | UnsetType, "only when online: its supervisor is connected"] = UNSET
    unresponsive: Annotated[bool | UnsetType, "only when online: it sends no heartbeats"] = UNSET
    pid: Annotated[int | UnsetType | None, "only when online: its supervisor; null: unknown"] = (
        UNSET
    )
    evidence: Annotated[
        str | UnsetType, "only when online: `pidfd+witness`, `witness` or `lease`"
    ] = UNSET
    pidfd_source: Annotated[
        str | UnsetType, "only when online: `SO_PEERPIDFD`, `pidfd_open`, `none`, `lease`"
    ] = UNSET
    witness: Annotated[
        str | UnsetType, "only when offline: `held`, `free`, `unproven`, `unseen`"
    ] = UNSET


class LockWaiter(Schema):
    engine: Annotated[str, "the first 100 waiters, in the order of their grants"]
    incarnation: Annotated[str, "the engine's launch"]
    silent: Annotated[bool, "true: skipped until it sends heartbeats again"]
    since: Annotated[Time, "when it began to wait"]
    for_ms: Annotated[float, "time since then"]
    since_mono_ms: Annotated[float, "when it began to wait"]


class LockWaitingFor(Schema):
    pid: Annotated[int, "one that is still alive"]
    name: Annotated[str, "its name"]
    halted: Annotated[
        str | None, "what stops it: `stopped`, `frozen`, `uninterruptible`; null: it runs"
    ]


class LockWaitFields(Schema):
    reason: Annotated[str, "a stable word of [the list](reference.md#why-a-lock-is-waiting)"]
    message: Annotated[str, "for operators"]
    engine: Annotated[str | None, "the engine concerned; null if there is no particular one"]
    incarnation: Annotated[str | None, "the engine's launch"]
    token: Annotated[int | None, "token of its grant; null if it holds nothing"]
    pid: Annotated[int | None, "its supervisor; 0 if not visible to the server, null if unknown"]
    since: Annotated[Time, "when the wait began"]
    for_ms: Annotated[float, "time since then"]
    evidence: Annotated[list[str], "what still has to end, and whose processes"]
    fix: Annotated[str, "what to do, with the command"]
    is_fault: Annotated[bool, "false: normal, such as a queue behind a live holder"]


class LockWindow(Schema):
    ms: Annotated[float, "how long a restarted server waits for the holder to reconnect"]
    left_ms: Annotated[float, "time left until then"]


class LockSwitchover(Schema):
    from_: Annotated[str, "the engine that must hand over"] = field(name="from")
    to: Annotated[str, "the engine that takes over"]
    pid: Annotated[int, "the process that requested it"]
    since: Annotated[Time, "when it was requested"]
    for_ms: Annotated[float, "time since then"]
    since_mono_ms: Annotated[float, "when it was requested"]
    deadline_mono_ms: Annotated[float, "deadline of the request"]
    left_ms: Annotated[float, "time left until the deadline; 0 once it has passed"]
    overdue: Annotated[bool, "the deadline has passed; the handover continues"]


class LockLock(Schema, kw_only=True):
    kind: Annotated[str, "`fenced`: the old holder's processes must be gone"]
    state: Annotated[str, "`free`, `held`, `releasing`, `recovering`; `unknown` offline"]
    since: Annotated[Time, "when it entered this state; offline: the last known change"]
    for_ms: Annotated[float, "time since then"]
    cause: Annotated[
        str | UnsetType | None, "only when online: why it is `releasing` or `recovering`"
    ] = UNSET
    holder: Annotated[LockHolder | None, "null if the lock has no holder"]
    waiters: list[LockWaiter] = field(default_factory=list)
    waiters_total: Annotated[int, "number of all waiters, listed or not"] = 0
    waiting_for: list[LockWaitingFor]
    waits: list[LockWaitFields]
    problem: Annotated[str | None, "the most serious fault among the waits; null: none"]
    window: Annotated[LockWindow | UnsetType, "only when online"] = UNSET
    switchover: Annotated[
        LockSwitchover | UnsetType | None, "only when online: the switchover under way; null: none"
    ] = UNSET


class LockTcp(Schema):
    address: Annotated[str, "`tcp://HOST:PORT`"]
    secured: Annotated[bool, "true, secured by certificates"]
    lease_ms: Annotated[float, "how long an engine may rely on the server's last answer"]
    lease_margin_ms: Annotated[float, "how much longer than the lease the server waits"]
    connections: Annotated[int, "number of open connections"]
    refused: Annotated[int, "number of connections that failed to authenticate"]
    last_refusal: Annotated[str | None, "the last refused peer, and the reason"]


class LockSupervisor(Schema):
    engine: Annotated[str, "the first 100 engines that the server knows"]
    supervisor: Annotated[str, "id of its supervisor, new at each start"]
    incarnation: Annotated[str | None, "the engine's launch; null if none is running"]
    pid: Annotated[int, "the supervisor"]
    pidfd_source: Annotated[str, "`SO_PEERPIDFD`, `pidfd_open`, `none`, or over TCP `lease`"]
    connected: Annotated[bool, "whether it is connected"]
    silent: Annotated[bool, "no heartbeat for `--silent-ms`"]
    heard_ms_ago: Annotated[float, "time since its last heartbeat"]
    wants: Annotated[list[str], "locks that it holds or wants"]
    peer: Annotated[str | None, "over TCP: the name in its certificate, or its address"]
    lease_left_ms: Annotated[
        float | None, "over TCP: time until its processes count as dead; null: it has no lease"
    ]


class LockService(Schema):
    address: Annotated[str, "by lock: the address to which clients send requests"]
    state: Annotated[
        str,
        "`lent` to a gateway; `waiting` for one, as connections do; `closed`: clients are refused;"
        " `waiting_for_hand_back`",
    ]
    since: Annotated[Time, "since when a gateway has the listening socket, or none has"]
    for_ms: Annotated[float, "time since then"]
    problem: Annotated[str | None, "the process that occupies the port; null if the port is ours"]


class LockAccepting(Schema):
    since: Annotated[Time, "since when it accepts"]
    for_ms: Annotated[float, "time since then"]


class LockGateway(Schema):
    gateway: Annotated[str, "its id, new at each start"]
    lock: Annotated[str, "the lock whose service socket it borrows"]
    pid: Annotated[int, "its process"]
    since: Annotated[Time, "when it connected"]
    for_ms: Annotated[float, "time since then"]
    accepting: Annotated[LockAccepting | None, "null while it does not accept connections"]
    stage: Annotated[
        str,
        "`asks` for the socket; `accepts`; `yields`: it finishes its requests beside a successor;"
        " `ends`: it finishes them and exits",
    ]


class LockLastGrant(Schema):
    lock: Annotated[str, "the last 20 grants since the server started"]
    engine: Annotated[str, "the engine that was granted the lock"]
    incarnation: Annotated[str, "the engine's launch"]
    token: Annotated[int, "token of the grant"]
    ts: Annotated[Time, "when the lock was granted"]
    contended: Annotated[bool, "another engine held it before: a failover or a switchover"]
    previous: Annotated[str | None, "incarnation of the previous holder; null for the first grant"]
    lost_mono_ms: Annotated[float | None, "when the previous holder was lost or released the lock"]
    fenced_mono_ms: Annotated[
        float | None, "when its processes were gone; null for the first grant"
    ]
    waited_ms: Annotated[float, "how long the new holder had waited"]


class LockserverStatus(Schema, kw_only=True):
    """Who holds each lock, who is waiting, and for what?

    Without a server the document is read from the state file ("offline"). If there is no state
    file either, `--watch` prints [errors](#errors).
    """

    schema: Annotated[int, "1"]
    as_of_event_id: Annotated[int, "the newest event that the document includes; 0 offline"] = 0
    last_event: Annotated[EventRecord | None, "the newest event"] = None
    server: LockServerFields
    models: Annotated[list[str], "only in a pool: the models whose locks the server has"]
    mode: Annotated[
        str | None,
        "who accepts connections: `gateway`, or over TCP `direct` (the engine); null offline",
    ] = None
    era: Annotated[str, "the series of tokens; [lock.md](lock.md#eras)"]
    token: Annotated[int, "the last token granted"]
    problem: Annotated[str | None, "what does not work, for operators"]
    locks: dict[str, LockLock]
    tcp: Annotated[LockTcp | None, "the listener [over TCP](lock.md#over-tcp); null: none"] = None
    supervisors: list[LockSupervisor] = field(default_factory=list)
    supervisors_total: Annotated[int, "number of all known supervisors, listed or not"] = 0
    service: dict[str, LockService] = field(default_factory=dict)
    gateways: list[LockGateway] = field(default_factory=list)
    last_grants: list[LockLastGrant] = field(default_factory=list)


class SwitchoverDocument(Schema):
    """Who holds the lock after a [planned switchover](operations.md#planned-switchover)?

    A switchover that fails or is refused prints an [error](#errors): `lock.no_standby`,
    `lock.not_held`, `lock.unknown_engine`, `lock.unknown_lock`, `lock.switchover_busy`,
    `lock.switchover_failed` (exit code 5 and `details.reason` `timeout` if it is merely late),
    `lock.switchover_forgotten` (exit code 3).
    """

    schema: Annotated[int, "1"]
    result: Annotated[str, "`switched`, or `already_active`: the engine of `--to` held the lock"]
    lock: Annotated[str, "name of the lock"]
    from_: Annotated[str, "the engine that held it before"] = field(name="from")
    engine: Annotated[str, "the engine that holds it now"]
    token: Annotated[int, "token of its grant"]
    took_ms: Annotated[float, "from the request to the grant"]


class NoEngineError(Schema):
    message: Annotated[str, "the state of the lock"]
    type: Annotated[str, "`service_unavailable`"]
    param: Annotated[None, "always null, as in OpenAI's errors"]
    code: Annotated[str, "`no_active_engine`"]


class NoEngineDocument(Schema):
    """The answer of the service port, with status 503 and `Retry-After`.

    It comes once no engine has been active for ten seconds. All other answers on that port are the
    backend's.
    """

    error: NoEngineError
