"""What the structs of `--json` documents are written with, and the documents of every part.

docs/cli_json.md is generated from these structs, one `schema.py` per package. A field's meaning is
the string in `Annotated[TYPE, "meaning"]`; its unit is in its name (`_ms`, `_bytes`), or in one of
the types below. A field that may be omitted has the default UNSET.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType


class Unit(Struct, frozen=True):
    """A type's name on the page, where the name of a field does not tell it."""

    name: str


Time = Annotated[str, Unit("time")]  # RFC 3339 in UTC
Pid = Annotated[int, Unit("pid")]
Bytes = Annotated[int, Unit("bytes")]
Ms = Annotated[float, Unit("ms")]


class Schema(Struct):
    """A JSON object of known keys."""


class Percentiles(Schema):
    """The spread of a duration."""

    p50: Annotated[Ms | None, "null if nothing was measured"]
    p99: Ms | None
    max: Ms | None


class ErrorBody(Schema):
    code: Annotated[str, "stable and dotted: `pod.unreachable`, `gms.no_devices`"]
    message: Annotated[str, "what happened, what caused it, and what to do"]
    details: Annotated[dict[str, Any], "details that depend on the code; may be empty"]


class ErrorDocument(Schema):
    """Printed with `--json` when a command fails and has no document of its own.

    Stderr also gets the message. An unknown flag is reported on stderr only. `/events` returns this
    document with status 400.
    """

    error: ErrorBody


class EventRecord(Schema):
    """What has happened, one record per line.

    `/events` (on every port) has them in the list `events`, beside `as_of_event_id`; `?since=ID`
    leaves out what is older.
    """

    id: Annotated[int | None, "counts from 1 in each process; null: `pod.gone`, `pod.back`"]
    ts: Annotated[Time, "when it happened"]
    mono_ms: Annotated[float, "when it happened; orders the records of all parts"]
    type: Annotated[str, "`lock.granted`, `engine.state`, `gms.commit` …"]
    severity: Annotated[str, "`debug`, `info`, `warning`, `error`"]
    source: Annotated[str, "the part: `lockserver`, `gms`, `gms-HOST-0`, `engine-1`"]
    message: Annotated[str, "for operators"]
    data: Annotated[dict[str, Any], "depends on the type; `engine.state`: `from`, `to`, `cause`"]


class ProbeAnswerFields(Schema, kw_only=True):
    """`/startup`, `/live`, `/ready`, `/serving`: status 200 if `ok`, otherwise 503.

    [reference.md](reference.md#probes) lists the probes of each part.
    """

    ok: Annotated[bool, "the result of the probe"]
    reason: Annotated[str, "why; engines and the lock server give a stable word, gms a sentence"]
    engine: Annotated[str | UnsetType, "only when the lock has a holder: its engine"] = UNSET
    token: Annotated[int | UnsetType, "only when the lock has a holder: its token"] = UNSET
    kv_silent: Annotated[list[str] | UnsetType, "gms: devices that lack their KV memory"] = UNSET
    silent: Annotated[list[str] | UnsetType, "gms: devices whose server is silent"] = UNSET
    state: Annotated[str | UnsetType, "only when an engine answers: its state"] = UNSET
    message: Annotated[str | UnsetType, "only when an engine answers: for operators"] = UNSET
    since_s: Annotated[float | UnsetType, "only when an engine answers: time in its state"] = UNSET
    rule: Annotated[str | UnsetType, "only when an engine answers: [its rule](states.md)"] = UNSET


class PortIndex(Schema):
    """`/` on every port lists its other paths.

    `/metrics` is for Prometheus; the others are described above.
    """

    paths: Annotated[list[str], "`/status` …"]
