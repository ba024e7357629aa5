"""The `--json` documents of pool, from which docs/cli_json.md is generated."""

from __future__ import annotations

from typing import Annotated, Any

from plumbing.service.schema import Bytes, EventRecord, Schema, Time


class PoolHolder(Schema):
    engine: Annotated[str, "its id"]
    token: Annotated[int, "the token"]


class PoolEngine(Schema):
    engine: Annotated[str, "an engine of the model"]
    shadow: Annotated[bool, "it stands by to take over from the other one"]
    goal: Annotated[str | None, "its newest goal"]
    state: Annotated[str | None, "its state; null: it is not connected"]
    problem: Annotated[str | None, "why it does not report, or is not at its goal"]


class PoolModel(Schema):
    model: Annotated[str, "its name"]
    state: Annotated[str, "see [states.md](states.md)"]
    since: Annotated[Time, "since when it is in that state"]
    for_ms: Annotated[float, "time since then"]
    reason: Annotated[str | None, "why it went there"]
    waits_for: Annotated[str | None, "what it waits for"]
    fault: Annotated[str | None, "the last fault of its engines"]
    tier: Annotated[str, "where its engines are told to be"]
    pinned: Annotated[bool, "it never yields"]
    priority: Annotated[int, "priority of its requests; lower is sooner"]
    recovering: Annotated[bool, "not all of its engines have reported"]
    tickets: Annotated[int, "requests and parked streams that wait for it"]
    oldest_ticket_ms: Annotated[float | None, "how long the oldest has waited"]
    parked: Annotated[int, "how many of them are parked streams"]
    in_flight: Annotated[int, "requests that its engine has"]
    door: Annotated[
        dict[str, Any], "its `type`: `open`, `shut` or `refused`; `number` grows with each change"
    ]
    holder: Annotated[PoolHolder | None, "who holds `active:MODEL`"]
    engines: list[PoolEngine]
    bytes: Annotated[
        dict[str, dict[str, Bytes]], "by device and kind (`base`, `weights`, `kv`, `copy`)"
    ]
    estimated: Annotated[bool, "its sizes have not been measured"]
    sizes: Annotated[
        dict[str, dict[str, Bytes]] | None,
        "what one engine needs, by kind and device; null: unknown",
    ]
    refused: Annotated[str | None, "why it cannot get its memory while others keep theirs"]
    expected_ms: Annotated[float | None, "predicted time until it is awake; null: no prediction"]
    bound_ms: Annotated[
        float | None, "longest possible wait, with each phase's budget; null: no bound"
    ]
    measured_bound_ms: Annotated[
        float | None, "longest wait with measured phase times; null: no bound"
    ]
    alarm: Annotated[str | None, "something to look at"]


class PoolBooked(Schema):
    owner: Annotated[str, "a model, or `lease ID`"]
    kind: Annotated[str, "`base`, `weights`, `kv`, `copy`, `lease`"]
    bytes: Annotated[int, "how much"]
    leaving: Annotated[bool, "it is on its way out"]


class PoolDevice(Schema):
    device: Annotated[str, "its name; `HOST`: memory for copies of weights"]
    total_bytes: Annotated[int | None, "its size; null: not measured yet"]
    free_bytes: Annotated[int | None, "room in the books"]
    booked_bytes: Annotated[int, "booked, what leaves included"]
    outside_bytes: Annotated[int, "used by processes outside the pool"]
    margin_bytes: Annotated[int, "kept free"]
    booked: list[PoolBooked]


class PoolLeaseFields(Schema):
    lease: Annotated[str, "its id"]
    device: Annotated[str, "the device"]
    bytes: Annotated[int, "how much of it"]
    granted: Annotated[bool, "booked, or waiting"]
    waits_for: Annotated[str | None, "whom or what it waits for"]
    priority: Annotated[int, "lower is sooner"]
    command: Annotated[str | None, "the program, without its directory and arguments"]
    pid: Annotated[int | None, "the process of `lease`"]
    since: Annotated[Time, "when it was asked for"]
    for_ms: Annotated[float, "time since then"]


class PoolGateway(Schema):
    gateway: Annotated[str, "its id"]


class PoolFileFields(Schema):
    path: Annotated[str | None, "the pool file"]
    digests: Annotated[
        dict[str, str], 'digests of the running settings by model; "": the rest of the file'
    ]


class PoolStatus(Schema):
    """Which model may be awake where, and what waits for which?"""

    schema: Annotated[int, "1"]
    online: Annotated[bool, "true"]
    as_of_event_id: Annotated[int, "the newest event"]
    last_event: Annotated[EventRecord | None, "the newest event"]
    pid: Annotated[int, "the pool"]
    restarts: Annotated[int, "restarts by the container's init"]
    dir: Annotated[str, "its directory"]
    since: Annotated[Time, "since when it runs"]
    for_ms: Annotated[float, "time since then"]
    era: Annotated[str, "new whenever the state file was lost"]
    recovering: Annotated[bool, "not all engines have reported since the start"]
    models: list[PoolModel]
    devices: list[PoolDevice]
    leases: list[PoolLeaseFields]
    gateways: list[PoolGateway]
    file: PoolFileFields
    changed: Annotated[dict[str, dict[str, str]], "by model (`pool`: the whole pool) and setting"]
    problems: Annotated[list[str], "what does not work, and the way out"]


class ExplainedModel(Schema):
    model: Annotated[str, "its name"]
    lines: Annotated[list[str], "why, what it waits for, who holds what, the bound"]


class ExplainDocument(Schema):
    """Why is each model where it is, and how long can a request wait?"""

    schema: Annotated[int, "1"]
    models: list[ExplainedModel]


class OrderDocument(Schema):
    """What became of an operator's order.

    Errors: `model_not_found`, `pool.pinned`, `pool.failed`, `pool.unknown_setting`,
    `pool.bad_setting` (exit code 1).
    """

    schema: Annotated[int, "1"]
    state: Annotated[str | None, "the model's state now; null for `set`"]
    message: Annotated[str, "the state and its reason, or what was set"]
