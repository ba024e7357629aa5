"""What a pod looks like from outside: the parts' documents in, one document or a few lines out.

Pure. Decides when a pod is healthy, degraded or down. A part that did not answer has an `error`,
which is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from plumbing.pod.models import ACTIVE, kind_of
from plumbing.text import duration, since, size, table
from understudy.status.parts_view import (
    Document,
    awake_engines,
    engines_by_pid,
    gateway_faults,
    gateway_lines,
    headline,
    is_open,
    lacks_shadow,
    load_of,
    memory_faults,
    memory_lines,
    pool_faults,
    pool_lines,
    rest_line,
)

SCHEMA = 1
GONE = ": not running: asked to exit"  # of an engine; no fault while the whole pod stops
PARKED = "standby"
SERVING = "active"
RESTING = "resting"  # holds the lock, and serves as soon as it is woken
PROBLEMS_OF_PAIR_SHOWN, PROBLEMS_SHOWN = 4, 6  # of a pool, whose every model may have one
BUSY_STRETCH = 1.25  # a fifth of the time is lost to waiting for a CPU
ENGINE_HEADER = ("engine", "role", "state", "since", "in flight", "last canary", "pid", "reason")


def pod_view(
    directory: str,
    lockserver: Document,
    gms: Sequence[Document],
    engines: Sequence[Document],
    gateway: Document | None = None,
    pool: Document | None = None,
) -> dict[str, Any]:
    """The document of `understudy status --json`.

    Each part is its own status document, or `{"name", "error"}` where it did not answer. `gateway`:
    None with a lock over TCP. `pool`: None without a pool file.
    """
    states = [str(_engine(engine).get("state", "unreachable")) for engine in engines]
    lock = _active(lockserver)
    holder = lock.get("holder") or {}
    resting = _one_in(RESTING, engines, states)
    serving = _serving(holder, engines, states) or resting
    standbys = states.count(PARKED)
    # A standby alone is not enough: the lock server must be able to grant it the lock.
    ready = standbys > 0 and lock.get("state") == "held" and not lock.get("problem")
    stopping = _is_stopping(engines)
    faults = _faults(lockserver, gms, engines, states)
    if stopping:
        left = awaited({"gateway": gateway, "engines": engines})
        faults = [f"the pod is stopping: {_left(*left)}", *(f for f in faults if GONE not in f)]
    faults += gateway_faults(gateway, lockserver, has_pool=pool is not None)
    if pool is not None:
        faults += pool_faults(pool)
        awake = awake_engines(pool)
        serving = awake[0] if len(awake) == 1 else None
        ready = bool(standbys) and not lacks_shadow(pool)
    elif serving and not standbys:
        faults.append("no standby: if the active engine dies now, the pod stops serving")
    elif serving and not ready and not faults:
        faults.append(f"lock active is {lock.get('state')}, so no standby can be granted it")
    soundness = "degraded" if faults else "healthy"
    is_served = serving and is_open(gateway, is_resting=resting is not None)
    if pool is not None:  # a request raises its model
        is_served = is_open(gateway) and ("error" not in pool or SERVING in states)
    return {
        "schema": SCHEMA,
        "dir": directory,
        "state": soundness if is_served else "down",
        "active": serving,
        "resting": resting is not None,
        "token": holder.get("token"),
        "standbys": standbys,
        "failover_ready": ready,
        "stopping": stopping,
        "problems": faults,
        "lockserver": dict(lockserver),
        "gateway": dict(gateway) if gateway is not None else None,
        "pool": dict(pool) if pool is not None else None,
        "gms": [dict(part) for part in gms],
        "engines": [dict(engine) for engine in engines],
    }


def _is_stopping(engines: Sequence[Document]) -> bool:
    """Whether every engine that still runs was told to exit."""
    told = [_stop(engine).get("is_told") for engine in engines if "error" not in engine]
    return bool(told) and all(told)


def awaited(view: Document) -> tuple[int, float]:
    """How many requests a pod that is stopping finishes, and how many milliseconds its engines have
    for them, from their order to exit on."""
    engines, gateway = view["engines"], view["gateway"]
    most_ms = max((float(_stop(engine).get("drain_ms") or 0) for engine in engines), default=0.0)
    if gateway is not None and "error" not in gateway:
        return int(load_of(gateway).get("in_flight") or 0), most_ms
    return sum(int(engine.get("inflight") or 0) for engine in engines), most_ms


def _left(requests: int, most_ms: float) -> str:
    noun = "request" if requests == 1 else "requests"
    return f"{requests} {noun} in flight, which may take {duration(most_ms)}"


def _stop(engine: Document) -> Document:
    return engine.get("stop") or {}


def is_reachable(view: Document) -> bool:
    """Whether any part answered."""
    return any("error" not in part for part in parts_of(view))


def parts_of(view: Document) -> list[Document]:
    """The documents of all parts of a view."""
    maybe = (view.get("gateway"), view.get("pool"))
    single = [view["lockserver"], *(part for part in maybe if part is not None)]
    return [*single, *view["gms"], *view["engines"]]


def lines(view: Document, now: datetime) -> list[str]:
    """The view as text, in less than 15 lines for a pod of two engines and one device. The pod of a
    pool file has models in place of engines and of the one lock."""
    pool, state = view.get("pool"), "stopping" if view["stopping"] else str(view["state"])
    if pool is not None:
        ready, most = headline(pool), PROBLEMS_SHOWN
    else:
        is_ready, most = view["failover_ready"], PROBLEMS_OF_PAIR_SHOWN
        ready = f"failover ready ({view['standbys']} standby)" if is_ready else "NO failover"
        ready = f"{awaited(view)[0]} in flight" if view["stopping"] else ready
    # The directory last: it may be longer than a terminal is wide.
    out = [f"pod    {state}   {ready}   {view['dir']}"]
    out += [_lock_line(view, now)] if pool is None else pool_lines(pool)
    if view["engines"] and (pool is None or "error" in pool):
        out += table([ENGINE_HEADER, *(_engine_row(part, now) for part in view["engines"])])
    for engine in view["engines"]:
        out += [*_busy(engine), *(_kept(engine) if pool is None else [])]
    out += (rest_line(view["gateway"]) if pool is None else []) + gateway_lines(view["gateway"])
    if pool is None:
        named = engines_by_pid(view["engines"])
        out += [line for part in view["gms"] for line in memory_lines(part, now, named)]
    out += [f"! {problem}" for problem in view["problems"][:most]]
    if pool is not None and len(view["problems"]) > most:
        out.append(f"! and {len(view['problems']) - most} more problems")
    return [*out, f"last   {_last_event(view, now)}"]


def offline_lines(documents: Sequence[Document], now: datetime) -> list[str]:
    """The offline view: the engines' last status documents, from their state files, as text."""
    rows = [_offline_row(each.get("engine") or {}, now) for each in documents]
    if not rows:
        return []
    header = ("engine", "role", "was", "since", "reason")
    return ["offline view: what the engines last wrote", *table([header, *rows])]


def _offline_row(engine: Document, now: datetime) -> tuple[str, ...]:
    return (
        *(str(engine.get(key) or "?") for key in ("id", "role", "state")),
        since(engine.get("since"), now),
        str(engine.get("reason") or "-"),
    )


def _last_event(view: Document, now: datetime) -> str:
    """The newest event of all parts that answered."""
    events = [part["last_event"] for part in parts_of(view) if part.get("last_event")]
    if not events:
        return "no events yet"
    newest = max(events, key=lambda event: float(event["mono_ms"]))
    return f"{since(newest['ts'], now)} ago   {newest['source']}   {newest['message']}"


def _serving(holder: Document, engines: Sequence[Document], states: Sequence[str]) -> str | None:
    """The engine that serves. One that does not answer still does while it holds the lock."""
    if states.count(SERVING):
        return _one_in(SERVING, engines, states)
    silent = {part.get("name") for part in engines if "error" in part}
    name = holder.get("engine")
    return str(name) if name in silent else None


def _one_in(which: str, engines: Sequence[Document], states: Sequence[str]) -> str | None:
    """The engine in this state, if it is one alone."""
    found = [engine for engine, state in zip(engines, states, strict=True) if state == which]
    return str(_engine(found[0]).get("id")) if len(found) == 1 else None


def _active(lockserver: Document) -> Document:
    locks = lockserver.get("locks") or {}
    return locks.get("active") or {}


def _engine(part: Document) -> Document:
    return part.get("engine") or {}


def _faults(
    lockserver: Document,
    gms: Sequence[Document],
    engines: Sequence[Document],
    states: Sequence[str],
) -> list[str]:
    faults = [
        f"{part['name']}: {part['error']}" for part in (lockserver, *engines) if "error" in part
    ]
    pairs = zip(engines, states, strict=True)
    models = [_engine(engine).get("model") for engine, state in pairs if state == SERVING]
    if len(set(models)) < len(models):
        faults.append("more than one engine reports that it is active")
    for name, lock in (lockserver.get("locks") or {}).items():
        if kind_of(name) == ACTIVE and lock.get("problem"):
            faults.append(f"lock {name}: {lock['problem']}")
    named = engines_by_pid(engines)
    faults += [fault for part in gms for fault in memory_faults(part, named)]
    return faults + _kv_sizes(engines)


def _kv_sizes(engines: Sequence[Document]) -> list[str]:
    """Engines of one model whose KV caches differ in size."""
    sizes: dict[str | None, dict[str, int]] = {}
    for part in engines:
        about, kv_bytes = _engine(part), (part.get("backend") or {}).get("kv_bytes")
        if kv_bytes:
            sizes.setdefault(about.get("model"), {})[about["id"]] = kv_bytes
    return [
        f"the KV caches of {' and '.join(each)} differ in size, so neither adopts the other's"
        " blocks: give all engines of a model the same size"
        for each in sizes.values()
        if len(set(each.values())) > 1
    ]


def _kept(part: Document) -> list[str]:
    """A line about a KV cache that outlives its engine, once that is awake."""
    kv = (part.get("backend") or {}).get("kv") or {}
    if kv.get("memory") != "gms":
        return []
    why = f"   {kv['note']}" if kv.get("note") else ""
    return [
        f"       {_engine(part).get('id')} adopted {kv.get('adopted_blocks', 0)} KV blocks, keeps"
        f" {kv.get('kept_blocks', 0)} for the next engine{why}"
    ]


def _lock_line(view: Document, now: datetime) -> str:
    lock = _active(view["lockserver"])
    if not lock:
        return "lock   active   unknown: the lock server does not answer"
    holder = lock.get("holder")
    if not holder:
        return f"lock   active   {lock.get('state')}   last token {view['lockserver'].get('token')}"
    return (
        f"lock   active   {lock.get('state')} by {holder.get('engine')}   "
        f"token {holder.get('token')}   since {since(holder.get('since'), now)}"
    )


def _engine_row(part: Document, now: datetime) -> tuple[str, ...]:
    if "error" in part:
        return (str(part["name"]), "-", "unreachable", "-", "-", "-", "-", "-")
    engine = _engine(part)
    return (
        str(engine.get("id", "?")),
        str(engine.get("role", "-")),
        str(engine.get("state", "?")),
        since(engine.get("since"), now),
        str(part.get("inflight", "-")),
        _canary(part, now),
        str(engine.get("pid") or "-"),
        str(engine.get("reason") or "-"),
    )


def _busy(part: Document) -> list[str]:
    """What CPU pressure does to the active engine's budget; nothing on a machine at ease."""
    health = part.get("health") or {}
    if not health.get("hang_budget") or health.get("stretch", 1) < BUSY_STRETCH:
        return []
    return [f"busy   {_engine(part).get('id', '?')}: hang {health['hang_budget']}"]


def _canary(part: Document, now: datetime) -> str:
    """`ok 4s ago`: the result of this incarnation's last canary."""
    last = (part.get("backend") or {}).get("last_canary")
    if not last:
        return "-"
    return f"{'ok' if last.get('ok') else 'FAILED'} {since(last.get('at'), now)} ago"


# --- what `understudy status --watch` shows below: requests, switches, failovers, events

ROWS_SHOWN = 5  # of failovers, and of a pool's switches
EVENTS_SHOWN = 8
GAP = "   "
PHASES = ("wait", "drain", "release", "raise")
LOAD = {
    "connections": "connections",
    "in_flight": "in flight",
    "waiting": "waiting for an engine",
    "parked": "parked",
    "replaying": "replaying",
    "suspects": "suspects",
}


def watch_lines(view: Document, events: Sequence[Mapping[str, Any]], now: datetime) -> list[str]:
    """The sections that have something to show, each below its title and an empty line."""
    found = {
        "requests": requests(view.get("gateway")),
        "switches": switches(events, now),
        "failovers": failovers(view, now),
        "events": [_event(each) for each in events[-EVENTS_SHOWN:]],
    }
    return [line for title, rows in found.items() if rows for line in ("", title, *rows)]


def _event(record: Mapping[str, Any]) -> str:
    return f"{record.get('ts')}  {record.get('source', ''):<11}  {record.get('message')}"


def requests(gateway: Document | None) -> list[str]:
    """The gateway's load, and what failovers have cost so far; none without a gateway."""
    if gateway is None or "error" in gateway:
        return []
    load, totals = load_of(gateway), gateway.get("totals") or {}
    now = [f"{load.get(name, 0)} {word}" for name, word in LOAD.items()]
    held, limit = size(load.get("memory_bytes")), size(gateway.get("memory_bytes_max"))
    ended: dict[str, int] = {}
    for each in totals.get("requests") or ():
        ended[each["ending"]] = ended.get(each["ending"], 0) + each["count"]
    ends = [f"{count} {name}" for name, count in ended.items() if count]
    pauses = totals.get("pauses", 0)
    mean = f" of {totals['pause_ms'] / pauses:.0f} ms on average" if pauses else ""
    return [
        f"{GAP.join(now)}{GAP}holds {held} of {limit}",
        f"{pauses} pauses{mean}{GAP}{totals.get('resumes', 0)} resumed{GAP}"
        f"{totals.get('replayed_tokens', 0)} tokens replayed",
        f"ended: {', '.join(ends) or 'none'}",
    ]


def switches(events: Sequence[Mapping[str, Any]], now: datetime) -> list[str]:
    """A pool's last switches, newest first, with the duration of each phase."""
    found = [each for each in events if each.get("type") == "pool.switch"]
    rows = []
    for record in reversed(found[-ROWS_SHOWN:]):
        data = record.get("data") or {}
        took = (duration(float(data.get(f"{phase}_ms") or 0)) for phase in PHASES)
        others = ", ".join(data.get("victims") or ()) or "-"
        rows.append((f"{since(record.get('ts'), now)} ago", str(data.get("model")), others, *took))
    return table([("when", "to", "in place of", *PHASES), *rows]) if rows else []


def failovers(view: Document, now: datetime) -> list[str]:
    """The last grants of `active` that took it from another engine, newest first, with phases:
    fence, until the old engine's processes are gone; grant; wake, until a test inference has
    passed; serve, until requests are accepted."""
    granted = view["lockserver"].get("last_grants") or ()
    taken = [it for it in granted if kind_of(str(it.get("lock"))) == ACTIVE and it.get("contended")]
    lasts = [part["last_failover"] for part in view["engines"] if part.get("last_failover")]
    own = {last["token"]: last for last in lasts}  # each engine's own account of its takeover
    rows = []
    for grant in reversed(taken[-ROWS_SHOWN:]):
        after = own.get(grant.get("token")) or {}
        marks = [grant.get(f"{name}_mono_ms") for name in ("lost", "fenced")]
        marks += [after.get(f"{name}_mono_ms") for name in ("granted", "canary", "active")]
        phases = ("-" if None in pair else f"{pair[1] - pair[0]:.1f}" for pair in pairwise(marks))
        who = str(grant.get("engine")), f"token {grant.get('token')}"
        rows.append((f"{since(grant.get('ts'), now)} ago", *who, *phases))
    header = ("when", "to", "grant no.", "fence ms", "grant ms", "wake ms", "serve ms")
    return table([header, *rows]) if rows else []
