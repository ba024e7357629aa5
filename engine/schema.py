"""The `--json` documents of engine, from which docs/cli_json.md is generated."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, UnsetType

from plumbing.service.schema import EventRecord, Schema, Time


class EngineEngine(Schema):
    id: Annotated[str, "the engine's id"]
    role: Annotated[str, "whether it may write weights: `primary`, `shadow`, `auto`"]
    state: Annotated[
        str, "`init`, `standby`, `waking`, `active`, `draining`, `releasing`, `resting`, `dead`"
    ]
    step: Annotated[str | None, "step of `waking`: `wake`, `canary`; null in other states"]
    since: Annotated[Time, "when it entered this state"]
    reason: Annotated[str, "why it is in this state, and what it is waiting for"]
    incarnation: Annotated[str | None, "name of the (last) launch; null before the first"]
    number: Annotated[int, "number of launches so far, by all supervisors in this directory"]
    model: Annotated[str | None, "the model's name, in a pod with several"]
    pid: Annotated[int, "the supervisor"]
    restarts: Annotated[int, "restarts by the container's init"]
    is_healthy: Annotated[bool, "false: it is active and fails to generate"]
    was_standby: Annotated[bool, "it has reached `standby` at least once in this pod"]


class EngineGoal(Schema):
    tier: Annotated[
        str, "resident now: nothing (`cold`), weights (`warm`), also KV memory (`awake`)"
    ]
    goal: Annotated[str, "its goal, which outlives the supervisor; `cold`: no backend"]
    by: Annotated[str | None, "who asked; null: no request since the supervisor started"]
    generation: Annotated[str | None, "of the pool's newest goal, as ERA.START.NUMBER"]
    can_rest: Annotated[bool, "this launch can sleep and hand over without ending"]


class EngineOther(Schema):
    engine: Annotated[str, "that engine's id"]
    token: Annotated[int, "token of that grant"]


class EngineLease(Schema):
    lease_ms: Annotated[float | None, "the lease; null until the server has answered this launch"]
    valid_for_ms: Annotated[float, "time until it must stop serving (60 % of the lease)"]
    server_heard_ms_ago: Annotated[
        float | None, "time since the server's last message; null before the first"
    ]
    is_held: Annotated[bool, "a lock is held under this lease"]
    is_lost: Annotated[bool, "the server did not answer in time: the launch must end"]


class EngineLock(Schema):
    server: Annotated[str, "the lock server: a socket's path, or `tcp://HOST:PORT`"]
    connected: Annotated[bool, "connected to the lock server"]
    token: Annotated[int, "token of its grant; 0 without one"]
    waiting_since: Annotated[Time | None, "null unless `standby`"]
    other: Annotated[EngineOther | None, "the engine that held the lock before; null if unknown"]
    address: Annotated[str | None, "the service address; null until the lock server has lent it"]
    is_behind_gateway: Annotated[bool, "false: the active engine accepts connections at `address`"]
    problem: Annotated[
        str | None, "why the server cannot be reached, or the engine's socket not be bound"
    ]
    lease: Annotated[
        EngineLease | None, "over TCP: how long the lock is valid; null on a Unix socket"
    ]


class EngineKv(Schema):
    memory: Annotated[str, "whose memory it is: `gms` (outlives the engine) or `private`"]
    adopted_blocks: Annotated[int, "blocks of an earlier engine with which its cache began"]
    published_blocks: Annotated[int, "blocks published for the next engine since it woke"]
    kept_blocks: Annotated[int, "blocks that its successor would find now; 0 unless `active`"]
    note: Annotated[str | None, "why it adopted or publishes none"]


class EngineLastCanary(Schema):
    ok: Annotated[bool, "it generated the expected tokens"]
    at: Annotated[Time, "when it was made"]


class EngineBackend(Schema):
    name: Annotated[str, "`reference`, `vllm`"]
    pids: Annotated[dict[str, int], "its processes, by name"]
    started_at: Annotated[Time | None, "when it was launched; null before the first launch"]
    exit: Annotated[str | None, "how the first process to exit by itself ended; null if none has"]
    weights_bytes: Annotated[int | None, "weights of all ranks; null until prepared"]
    kv_bytes: Annotated[int | None, "size of the KV cache when awake; null until prepared"]
    kv: Annotated[EngineKv | None, "null unless it is awake"]
    epoch: Annotated[
        str | None, "epochs that it maps, by rank, separated by commas; null until prepared"
    ]
    serves_on: Annotated[
        str | None, "where it accepts connections; null unless `waking` or `active`"
    ]
    last_canary: Annotated[EngineLastCanary | None, "null if this launch has not made one"]


class EngineBudget(Schema):
    ms: Annotated[float | None, "time limit of this state; null: unlimited"]
    spent_ms: Annotated[float, "time spent in this state"]
    is_spent: Annotated[bool, "the time limit has been reached"]


class EngineStop(Schema):
    is_told: Annotated[bool, "it was ordered to exit"]
    drain_ms: Annotated[float, "how long its streams get then (`--drain-ms`)"]
    streams: Annotated[
        str, "what its streams do if it alone is told to end: `hand_over` or `finish`"
    ]


class EngineHealth(Schema):
    cpu_pressure: Annotated[
        float | None, "share of time in which processes waited for a CPU; null: unknown"
    ]
    stretch: Annotated[float, "the factor by which it lengthens `--hang-ms`, 1 to 2.5"]
    has_standby: Annotated[bool | None, "a standby is ready; null unless active"]
    is_continued: Annotated[
        bool | None, "that standby can continue its streams; null unless active"
    ]
    hang_budget_ms: Annotated[
        float | None, "time without a token after which it counts as hung; null unless active"
    ]
    hang_budget: Annotated[str | None, "the same for operators; null unless active"]
    answer_late_ms: Annotated[float | None, "how late the backend's answer is; null unless active"]


class EngineDeathFields(Schema):
    incarnation: Annotated[str, "the last ten launches of this supervisor that ended"]
    number: Annotated[int, "number of the launch"]
    cause: Annotated[
        str, "`child_exit`, `budget_exceeded`, `canary_failed`, …: [the causes](states.md)"
    ]
    message: Annotated[str, "for operators"]
    at: Annotated[Time, "when it ended"]
    is_rehearsed: Annotated[bool, "a drill killed it; not counted towards a crash loop"]
    reaped_in_ms: Annotated[float, "time until its last process was gone"]


class EngineRelaunch(Schema):
    in_ms: Annotated[float, "the longest delay, counted from the decision"]
    reason: Annotated[str, "what the launch is waiting for"]


class EngineLastFailover(Schema):
    token: Annotated[int, "token of the grant"]
    is_contended: Annotated[bool, "another engine held the lock before"]
    granted_mono_ms: Annotated[float, "when the lock was granted"]
    canary_mono_ms: Annotated[float | None, "when the canary had passed; null before that"] = None
    active_mono_ms: Annotated[float | None, "when the engine was active; null before that"] = None


class EngineMemory(Schema):
    was_standby: Annotated[bool, "saved for the next supervisor: as `engine.was_standby`"] = False
    was_cold: Annotated[bool, "it was cold on purpose in this pod"] = False
    number: Annotated[int, "saved for the next supervisor: number of launches so far"] = 0
    goal: Annotated[str, "saved for the next supervisor: as `goal.goal`"] = "awake"
    generation: Annotated[str, 'likewise: as `goal.generation`, "" without one'] = ""
    failover_attempts: Annotated[int, "number of contended grants"] = 0
    failover_successes: Annotated[int, "contended grants after which it became active"] = 0


class EngineDocument(Schema, kw_only=True):
    """What is this engine doing, and why?

    Without a supervisor the document is the last one in the state file.
    """

    online: Annotated[
        bool | UnsetType, "only when printed by `engine status`: false: read from the state file"
    ] = UNSET
    schema: Annotated[int, "1"]
    as_of_event_id: Annotated[int, "the newest event that the document includes"]
    last_event: Annotated[EventRecord | None, "the newest event"]
    engine: EngineEngine
    goal: EngineGoal
    lock: EngineLock
    backend: EngineBackend
    inflight: Annotated[int, "number of requests in flight"]
    budget: EngineBudget
    stop: EngineStop
    health: EngineHealth
    deaths: list[EngineDeathFields]
    relaunch: Annotated[EngineRelaunch | None, "null unless it is dead and will be launched again"]
    last_failover: Annotated[
        EngineLastFailover | None, "the last grant to this supervisor; null if there was none"
    ]
    problems: Annotated[list[str], "what does not work, for operators"]
    memory: EngineMemory


class DrainDocument(Schema):
    """What did the order to end do?"""

    status: Annotated[str, "`ended`"]
    transition: Annotated[str, "its immediate effect: `active → draining`, `standby → dead`"]
    duration_ms: Annotated[float, "time until the engine had ended"]
