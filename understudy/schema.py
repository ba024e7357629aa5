"""The `--json` documents of understudy, from which docs/cli_json.md is generated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

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


# --- the documents of drills


class DrillMachine(Schema):
    cpu: Annotated[str, "name of the CPU"]
    cpus: Annotated[int, "number of CPUs available to the drill"]
    memory_bytes: Annotated[int, "memory of the machine"]
    kernel: Annotated[str, "kernel release"]
    python: Annotated[str, "Python version"]


class DrillGms(Schema):
    recovery_ms: Annotated[
        Percentiles, "from SIGKILL until the epochs are there and no memory has a fault"
    ]


DoubleActive = Annotated[int, "how often two engines served at once; must be 0"]


class AnyDrillDocument(Schema, kw_only=True):
    """What the documents of all drills have."""

    passed: Annotated[bool, "all that must be 0 is 0, and `problems` is empty"]
    problems: Annotated[list[str], "any other reason why the drill did not pass"]
    mode: Annotated[str, "`gateway`, `pool` or `fleet`"]
    requests: Annotated[int, "number of requests sent"]
    kills: Annotated[int, "number of kills"]
    killed: Annotated[dict[str, int], "number of kills, by target"]
    refused: Annotated[int, "requests that were refused; must be 0"]
    wrong_tokens: Annotated[int, "answers that were wrong; must be 0"]
    doubled_tokens: Annotated[int, "pieces of text that a client got twice; must be 0"]
    false_deaths: Annotated[
        int, "engines that ended unkilled, pods that their front took for lost; must be 0"
    ]
    lost_in_gateway: Annotated[
        int,
        "requests lost with the gateway's process, in a fleet the front's, which are not counted as"
        " lost",
    ]
    resumed: Annotated[int, "streams resumed at another engine"]
    lasted_s: Annotated[float, "how long the pod was under load"]
    backend: Annotated[str, "`reference`, `vllm`"]
    machine: DrillMachine


class DrillDocument(AnyDrillDocument, kw_only=True):
    """How did the pod survive kills under load?

    The exit code also says whether the drill passed; stderr says why it did not. A drill that is
    interrupted after a kill prints what it has measured.
    """

    double_active: DoubleActive
    lost_in_flight: Annotated[
        int, "requests that a kill cut off or left without an answer; must be 0"
    ]
    broken_streams: Annotated[int, "those of them that were streams"]
    failover_ms: Annotated[
        Percentiles, "from the SIGKILL to the first token of a request sent after it"
    ]
    phases_ms: Annotated[
        dict[str, Percentiles], "duration of the phases `detect`, `fence`, `grant`, `wake`, `serve`"
    ]
    pause_ms: Annotated[Percentiles, "longest gap in the text of resumed streams"]
    adopted_blocks: Annotated[int, "KV blocks with which the successors' caches began"]
    published_blocks: Annotated[int, "KV blocks that the killed engines had published"]
    adopted_share: Annotated[
        float | None, "`adopted_blocks` of `published_blocks`; null: none published"
    ]
    url: Annotated[
        str | UnsetType, "only when run with `--url`: the address outside the pod that clients used"
    ] = UNSET
    gms: Annotated[DrillGms | UnsetType, "only when memory servers were killed"] = UNSET
    vllm: Annotated[dict[str, Any] | UnsetType, "only when written by `make drill-vllm`"] = UNSET


class FleetDrillOutcome(Schema):
    number: Annotated[int, "one kill: its number"]
    target: Annotated[str, "what was killed"]
    pod: Annotated[str, "of which pod; empty: the front"]
    streams: Annotated[int, "requests that the front had there at that moment"]
    paused: Annotated[int, "streams that had begun there, and that were read to the end"]
    longest_pause_ms: Annotated[float | None, "the longest gap in the text of one of them"]
    at_ms: Annotated[float, "since the load began"]
    back_ms: Annotated[float | None, "until all pods were ready again; null: they were not"]


class FleetDrillDocument(AnyDrillDocument, kw_only=True):
    """How did a fleet survive the loss of pods? Exit code and stderr as above."""

    lost_in_flight: Annotated[int, "requests cut off or left without an answer; must be 0"]
    broken_streams: Annotated[int, "those of them that were streams"]
    pods: Annotated[int, "number of pods"]
    pause_ms: Annotated[Percentiles, "longest gap in the text of streams whose pod was hit"]
    pauses_ms: Annotated[dict[str, Percentiles], "the same, by target"]
    outcomes: list[FleetDrillOutcome]


class PoolDrillOutcome(Schema):
    number: Annotated[int, "one kill: its number"]
    target: Annotated[str, "what was killed"]
    engine: Annotated[str | None, "of which engine, if it was an engine's process"]
    model: Annotated[str, "the model that had entered `phase`"]
    phase: Annotated[str, "the state that it had entered"]
    at_ms: Annotated[float, "since the load began"]
    outcome: Annotated[str, "how it ended, in words"]
    back_ms: Annotated[float | None, "until the victim worked again; null: it did not"]


class PoolDrillModel(Schema):
    answered: Annotated[int, "by model: requests that were answered in full"]
    switches: Annotated[int, "switches to it for waiting requests"]
    longest_wait_ms: Annotated[float, "its longest wait"]
    longest_wait_of_bound: Annotated[float | None, "as above, of this model"]


class PoolDrillDocument(AnyDrillDocument, kw_only=True):
    """How did a pool of models survive switches and kills under load?

    `passed` also requires that both `longest_…_of_bound` are at most 1. Exit code and stderr as
    above.
    """

    double_active: DoubleActive
    lost: Annotated[int, "requests without an answer; must be 0"]
    cut: Annotated[int, "requests that ended with the error `pool.cut`; must be 0"]
    broken_streams: Annotated[int, "streams that ended without their end marker; must be 0"]
    switches: Annotated[int, "model switches for waiting requests"]
    parked: Annotated[int, "how often a stream was parked and went on"]
    switch_ms: Annotated[
        Percentiles, "a switch: drain and release of one model, start of the other"
    ]
    wait_ms: Annotated[Percentiles, "from a request to its first text"]
    pause_ms: Annotated[Percentiles, "longest gap in the text of parked streams"]
    failover_pause_ms: Annotated[
        Percentiles, "longest gap in the text of streams resumed after a kill"
    ]
    pool_back_ms: Annotated[
        Percentiles, "from SIGKILL of the pool until the next one knows all parts"
    ]
    longest_wait_of_bound: Annotated[
        float | None, "longest wait divided by its stated bound; at most 1; null: no bound"
    ]
    longest_pause_of_bound: Annotated[
        float | None, "longest gap in a stream's text divided by that bound"
    ]
    models: dict[str, PoolDrillModel]
    outcomes: list[PoolDrillOutcome]
    not_reached: Annotated[list[str], "kills left out because no model reached their state"]


# --- where each is printed

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
