"""The `--json` documents of understudy, from which docs/cli_json.md is generated."""

from __future__ import annotations

from typing import Annotated, Literal

from engine.schema import DrainDocument, EngineDocument
from gateway.schema import (
    FrontStatus,
    GatewayStatus,
    LeaveDocument,
    OfflineGateway,
    ReplaceDocument,
)
from gms.schema import (
    DeviceStatus,
    DropDocument,
    DropKvDocument,
    GmsServiceStatus,
    GmsStatus,
    KvStatus,
    SilentDevice,
    VerifyDocument,
)
from lockserver.schema import LockserverStatus, NoEngineDocument, SwitchoverDocument
from plumbing.service.schema import (
    ErrorDocument,
    EventRecord,
    Percentiles,
    PortIndex,
    ProbeAnswerFields,
    Schema,
)
from pool.schema import ExplainDocument, OrderDocument, PoolStatus
from understudy.drill.schema import DrillDocument, FleetDrillDocument, PoolDrillDocument

CheckStatus = Literal["fail", "warn", "pass", "skip"]


class Unreachable(Schema):
    """In place of the document of a part that did not answer."""

    name: Annotated[str, "`lockserver`, `gateway`, `pool`, the device or the engine"]
    error: Annotated[str, "the reason"]


class PodStatus(Schema):
    """Is the pod healthy, who is active, and what would a failure do?

    Exit code 3 when no part answers.
    """

    schema: Annotated[int, "1"]
    dir: Annotated[str, "the pod's directory"]
    state: Annotated[str, "`healthy`, `degraded` (see `problems`) or `down` (requests fail)"]
    active: Annotated[
        str | None, "the engine that serves or sleeps as lock holder; null: none, or several"
    ]
    resting: Annotated[bool, "the lock holder sleeps; `gateway.rest` says how it wakes"]
    token: Annotated[int | None, "token of the holder of lock `active`; null: none"]
    standbys: Annotated[int, "number of engines in `standby`"]
    failover_ready: Annotated[
        bool, "a standby can be granted the lock; in a pool: for every model with a shadow"
    ]
    stopping: Annotated[bool, "every engine was told to end: the pod drains"]
    problems: Annotated[list[str], "why the pod is not healthy, for operators"]
    lockserver: Annotated[LockserverStatus | Unreachable, "the lock server"]
    gateway: Annotated[GatewayStatus | Unreachable | None, "null with a lock over TCP"]
    pool: Annotated[PoolStatus | Unreachable | None, "null in a pod without a pool file"]
    gms: Annotated[list[DeviceStatus | Unreachable], "every device that has a socket"]
    engines: Annotated[list[EngineDocument | Unreachable], "every engine that has a socket"]


class FrontView(Schema):
    """The same in the directory of a front, which has no pod of its own."""

    schema: Annotated[int, "1"]
    dir: Annotated[str, "the front's directory"]
    state: Annotated[str, "`healthy`, `degraded` (see `problems`) or `down` (no pod is ready)"]
    problems: Annotated[list[str], "why the fleet is not healthy, for operators"]
    front: Annotated[FrontStatus, "the front"]


class GoalEngine(Schema):
    engine: Annotated[str, "an engine that got the goal"]
    state: Annotated[str | None, "its state; null if it does not answer"]
    tier: Annotated[str | None, "how much of it is resident"]
    goal: Annotated[str | None, "its goal"]
    problem: Annotated[str | None, "why it did not get the goal"]


class GoalDocument(Schema):
    """What became of an order to sleep or to wake.

    Errors: `engine.cannot_rest`, `pod.goal_overridden` (exit code 1), `pod.unreachable`,
    `pod.no_engine` (3), `pod.goal_timeout` (5).
    """

    schema: Annotated[int, "1"]
    result: Annotated[str, "`rested`, `woken`, `already_…`"]
    goal: Annotated[str, "the engines' goal: `awake`, `warm` or `offloaded`"]
    engine: Annotated[str | None, "the lock's holder"]
    token: Annotated[int | None, "the token of its grant"]
    took_ms: Annotated[float, "until it was there"]
    engines: list[GoalEngine]


class CheckResult(Schema):
    """The result of one check."""

    id: Annotated[str, "stable; [the list](reference.md#doctor)"]
    title: Annotated[str, "for operators"]
    status: Annotated[CheckStatus, "`fail`, `warn`, `pass`, `skip` (the check cannot be made here)"]
    found: Annotated[str, "what was found, or why the check was skipped"]
    fix: Annotated[str | None, "what to do; null if nothing needs to be done"] = None


class DoctorDocument(Schema):
    """What is wrong with this machine?

    Exit code 1 when `status` is `fail`; with `--strict` also when it is `warn`.
    """

    schema: Annotated[int, "1"]
    dir: Annotated[str, "the directory that was examined"]
    status: Annotated[CheckStatus, "the most serious result: `fail`, `warn` or `pass`"]
    counts: Annotated[
        dict[CheckStatus, int],
        "number of checks with the result `fail`, `warn`, `pass`, `skip`",
    ]
    checks: list[CheckResult]
    fixed: Annotated[list[str], "always empty: doctor changes nothing; `fix` has the command"]


EVENTS = "understudy events, lockserver events, gateway events, /events"
ORDERS = "pool load, pool sleep, pool unload, pool pin, pool unpin, pool reset, pool set"
# Each document by what prints it, in the order of docs/cli_json.md.
DOCUMENTS: dict[str, type[Schema]] = {
    "Errors": ErrorDocument,
    "understudy status": PodStatus,
    "The status of a front's directory": FrontView,
    "No answer": Unreachable,
    EVENTS: EventRecord,
    "understudy doctor": DoctorDocument,
    "understudy drill": DrillDocument,
    "understudy drill --pool": PoolDrillDocument,
    "understudy drill --fleet": FleetDrillDocument,
    "understudy sleep, understudy wake": GoalDocument,
    "lockserver status, /status of the lock server": LockserverStatus,
    "lockserver switchover": SwitchoverDocument,
    "gateway status, /status of the gateway": GatewayStatus,
    "gateway status of a front": FrontStatus,
    "gateway status without a gateway": OfflineGateway,
    "gateway replace": ReplaceDocument,
    "gateway leave": LeaveDocument,
    "pool status, /status of the pool": PoolStatus,
    "pool explain": ExplainDocument,
    ORDERS: OrderDocument,
    "gms status": GmsStatus,
    "gms verify": VerifyDocument,
    "gms drop": DropDocument,
    "gms drop-kv": DropKvDocument,
    "/status of gms": GmsServiceStatus,
    "A device": DeviceStatus,
    "KV memory of a device": KvStatus,
    "No answer of a device": SilentDevice,
    "engine status, /status of an engine": EngineDocument,
    "engine drain": DrainDocument,
    "The spread of a duration": Percentiles,
    "Probes": ProbeAnswerFields,
    "Ports": PortIndex,
    "No active engine": NoEngineDocument,
}
