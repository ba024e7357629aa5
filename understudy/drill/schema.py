"""The `--json` documents of understudy, from which docs/cli_json.md is generated."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, UnsetType

from plumbing.service.schema import Percentiles, Schema


class DrillMachine(Schema):
    cpu: Annotated[str, "name of the CPU"]
    cpus: Annotated[int, "number of CPUs available to the drill"]
    memory_bytes: Annotated[int, "memory of the machine"]
    kernel: Annotated[str, "kernel release"]
    python: Annotated[str, "Python version"]


class DrillGms(Schema):
    recovery_ms: Annotated[Percentiles, "from SIGKILL until the epoch has its readers again"]


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

    The exit code also says whether the drill passed; stderr says why it did not.
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
    model: Annotated[str, "the model of the engine; empty: another part was killed"]
    phase: Annotated[str, "the state that the model was in"]
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
