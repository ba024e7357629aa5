"""What a pod looks like from outside: the parts' documents in, one document or a few lines out.

Pure. Decides when a pod is healthy, degraded or down. A part that did not answer has an `error`,
which is shown. With a lock over TCP there is no gateway, and without a pool file no pool: None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.front_text import history, pods_line, pods_table
from plumbing.text import counted, duration, since, size, table
from pool import status_text

Document = Mapping[str, Any]
Engines = Mapping[int, str]  # which engine each pid belongs to

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
    told = [_stop(engine).get("is_told") for engine in engines if "error" not in engine]
    stopping = bool(told) and all(told)  # every engine that still runs
    faults = _faults(lockserver, gms, engines, states)
    if stopping:
        requests, most_ms = awaited({"gateway": gateway, "engines": engines})
        left = f"{counted(requests, 'request')} in flight"
        stops = f"the pod is stopping: {left}, which may take {duration(most_ms)}"
        faults = [stops, *(fault for fault in faults if GONE not in fault)]
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


def awaited(view: Document) -> tuple[int, float]:
    """How many requests a pod that is stopping finishes, and how many milliseconds its engines have
    for them, from their order to exit on."""
    engines, gateway = view["engines"], view["gateway"]
    most_ms = max((float(_stop(engine).get("drain_ms") or 0) for engine in engines), default=0.0)
    if gateway is not None and "error" not in gateway:
        return int(gateway["load"]["in_flight"]), most_ms
    return sum(int(engine.get("inflight") or 0) for engine in engines), most_ms


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
        out += _budget_and_cache(engine, has_pool=pool is not None)
    out += gateway_lines(view["gateway"], has_pool=pool is not None)
    if pool is None:
        named = engines_by_pid(view["engines"])
        out += [line for device in view["gms"] for line in memory_lines(device, now, named)]
    problems = [*view["problems"], *engine_problems(view["engines"])]
    out += [f"! {problem}" for problem in problems[:most]]
    if pool is not None and len(problems) > most:
        out.append(f"! and {len(problems) - most} more problems")
    return [*out, f"last   {_last_event(view, now)}"]


def offline_lines(documents: Sequence[Document], now: datetime) -> list[str]:
    """The offline view: the engines' last status documents, from their state files, as text."""
    rows = [("engine", "role", "was", "since", "reason")]
    for engine in map(_engine, documents):
        who, role, state = (str(engine.get(key) or "?") for key in ("id", "role", "state"))
        when, why = since(engine.get("since"), now), str(engine.get("reason") or "-")
        rows.append((who, role, state, when, why))
    return ["offline view: what the engines last wrote", *table(rows)] if documents else []


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
        if lock.get("problem"):
            faults.append(f"lock {name}: {lock['problem']}")
    named = engines_by_pid(engines)
    faults += [fault for device in gms for fault in memory_faults(device, named)]
    sizes: dict[str | None, dict[str, int]] = {}  # of KV caches, by model and engine
    for part in engines:
        about, kv_bytes = _engine(part), (part.get("backend") or {}).get("kv_bytes")
        if kv_bytes:
            sizes.setdefault(about.get("model"), {})[about["id"]] = kv_bytes
    return faults + [
        f"the KV caches of {' and '.join(each)} differ in size, so neither adopts the other's"
        " blocks: give all engines of a model the same size"
        for each in sizes.values()
        if len(set(each.values())) > 1
    ]


def engine_problems(engines: Iterable[Document]) -> list[str]:
    """What engines report, and do not wait for. They serve with it, so the pod is as healthy."""
    return [
        f"{_engine(part)['id']}: {problem}"
        for part in engines
        for problem in part.get("problems") or ()
        if problem not in str(_engine(part).get("reason"))
    ]


def _budget_and_cache(part: Document, *, has_pool: bool) -> list[str]:
    """What CPU pressure does to the active engine's budget, on a machine that is not at ease; and
    the KV cache that outlives its engine, once that is awake."""
    name, found = _engine(part).get("id", "?"), []
    health, kv = part.get("health") or {}, (part.get("backend") or {}).get("kv") or {}
    if health.get("hang_budget") and health.get("stretch", 1) >= BUSY_STRETCH:
        found.append(f"busy   {name}: hang {health['hang_budget']}")
    if kv.get("memory") == "gms" and not has_pool:
        why = f"   {kv['note']}" if kv.get("note") else ""
        found.append(
            f"       {name} adopted {kv['adopted_blocks']} KV blocks, keeps {kv['kept_blocks']}"
            f" for the next engine{why}"
        )
    return found


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
    engine, last = part["engine"], (part.get("backend") or {}).get("last_canary")
    who, role, state = (str(engine.get(key, "-")) for key in ("id", "role", "state"))
    canary = f"{'ok' if last['ok'] else 'FAILED'} {since(last['at'], now)} ago" if last else "-"
    load, pid = str(part.get("inflight", "-")), str(engine.get("pid") or "-")
    when, why = since(engine.get("since"), now), str(engine.get("reason") or "-")
    return (who, role, state, when, load, canary, pid, why)


# --- the gateway: streams that are parked are no fault by themselves, a failover parks them all

PARKED_LONG_MS = 10_000  # the time for which new requests wait; a failover takes far less


def is_open(gateway: Document | None, *, is_resting: bool = False) -> bool:
    """Whether requests can come in, through the gateway or without one, and will be answered."""
    if gateway is None:
        return True
    return bool(gateway.get("accepting")) and not (is_resting and _waits_for_operator(gateway))


def _rest_of(gateway: Document | None) -> dict[str, Any]:
    """What the gateway knows of an engine that rests; empty while none does."""
    found = (gateway or {}).get("rest") or {}
    said = found.get("engine") or {}
    return {**found, **said} if said.get("state") == "resting" else {}


def _waits_for_operator(gateway: Document | None) -> bool:
    """Whether an engine rests that no request wakes."""
    rest = _rest_of(gateway)
    return rest.get("wake") == "manual" and rest.get("goal") != "awake"


def gateway_lines(gateway: Document | None, *, has_pool: bool) -> list[str]:
    """Its load, none without a gateway; before it since when an engine outside of a pool rests, who
    asked for it, and how it wakes."""
    if gateway is None:
        return []
    if "error" in gateway:
        return ["gateway down"]
    found, rest, lines = gateway["load"], _rest_of(gateway), []
    if rest and not has_pool:
        by = f"   requested by {rest['goal_by']}" if rest.get("goal_by") else ""
        how = "run `understudy wake`" if _waits_for_operator(gateway) else "a request wakes it"
        lines = [f"rest   for {duration(rest.get('for_ms') or 0)}{by}   {how}"]
    oldest_ms = found["parked_oldest_ms"]
    oldest = f" (oldest {duration(oldest_ms)})" if found["parked"] and oldest_ms else ""
    restarts = gateway.get("restarts")
    return [
        *lines,
        f"gateway {'accepting' if is_open(gateway) else 'not accepting'}   "
        f"{found['in_flight']} in flight   {found['parked']} parked{oldest}   "
        f"{found['replaying']} replaying   "
        f"{f'restarts {restarts}   ' if restarts else ''}pid {gateway.get('pid', '-')}",
    ]


def gateway_faults(
    gateway: Document | None, lockserver: Document, *, has_pool: bool = False
) -> list[str]:
    """What is wrong with it, as sentences. In a pool streams are parked between their turns."""
    if gateway is None:
        return []
    if "error" in gateway:
        return [f"gateway: {gateway['error']}; requests wait, and are refused after 10 s"]
    faults = [str(each) for each in gateway.get("problems") or ()]
    if not is_open(gateway) and not faults:
        faults.append("the gateway does not accept connections")
    if _waits_for_operator(gateway):
        faults.append("the active engine sleeps, and no request wakes it: run `understudy wake`")
    oldest_ms = gateway["load"]["parked_oldest_ms"]
    if oldest_ms > PARKED_LONG_MS and not has_pool:
        faults.append(f"a request has been parked for {duration(oldest_ms)}")
    return faults


def front_view(directory: str, front: Document) -> dict[str, Any]:
    """The document of `understudy status --json` where a front runs, and no pod."""
    pods = front["pods"]
    states = [str(each["state"]) for each in pods]
    problems = [str(each) for each in front["problems"]]
    problems += [
        f"{each['name'] or each['address']} is {each['state']}"
        for each in pods
        if each["state"] != "ready" and not each["problem"]
    ]
    if states.count("ready") == 1:
        problems.append("one pod is ready: if it is lost, streams wait")
    is_served = front["accepting"] and "ready" in states
    return {
        "schema": SCHEMA,
        "dir": directory,
        "state": ("degraded" if problems else "healthy") if is_served else "down",
        "problems": problems,
        "front": dict(front),
    }


def front_lines(view: Document, events: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """That view as text. `events`: of `--watch`."""
    front, now = view["front"], datetime.now(UTC)
    state = "stopping" if front["stopping"] else view["state"]
    out = [f"front  {state}   {pods_line(front)}   {view['dir']}", *pods_table(front, now)]
    out += [*gateway_lines(front, has_pool=False), f"fleet  {history(front)}"]
    out += [f"! {problem}" for problem in view["problems"][:PROBLEMS_SHOWN]]
    if events is not None:
        return [*out, *watch_lines(events)]
    last = front["last_event"]
    return [*out, f"last   {since(last['ts'], now)} ago   {last['message']}"] if last else out


# --- the pool: what is amiss is what it says of its models, not how many engines there are

AWAKE, FAILED = "awake", "failed"
MODELS_SHOWN = 20  # what fits on a screen; `understudy pool status` shows all
NOTHING_SWITCHES = "awake models are still served, but no model switches"


def models_of(pool: Document | None) -> list[dict[str, Any]]:
    return list((pool or {}).get("models") or ())


def awake_engines(pool: Document | None) -> list[str]:
    """The engines that stand for awake models."""
    found = [each for each in models_of(pool) if each["state"] == AWAKE]
    return [str(each["holder"]["engine"]) for each in found if each.get("holder")]


def lacks_shadow(pool: Document) -> list[str]:
    """The awake models that have a shadow which could not take over now."""
    found = []
    for each in models_of(pool):
        shadows = [own for own in each["engines"] if own["shadow"]]
        is_ready = any(own["state"] == "standby" for own in shadows)
        if each["state"] == AWAKE and shadows and not is_ready:
            found.append(str(each["model"]))
    return found


def pool_faults(pool: Document) -> list[str]:
    """What is wrong with it, as sentences."""
    if "error" in pool:
        return [f"pool: {pool['error']}; {NOTHING_SWITCHES}"]
    faults = [str(each) for each in pool.get("problems") or ()]
    if pool.get("recovering"):
        names = [each["model"] for each in models_of(pool) if each["recovering"]]
        faults.append(f"the pool is recovering: it has not heard all engines of {', '.join(names)}")
    for each in models_of(pool):
        name, waited_ms, bound_ms = each["model"], each["oldest_ticket_ms"], each["bound_ms"]
        if each["state"] == FAILED:
            faults.append(f"model {name} has failed: {each['fault'] or each['reason']}")
        if waited_ms is not None and bound_ms is not None and waited_ms > bound_ms:
            faults.append(
                f"a request for {name} has waited for {duration(waited_ms)}, longer than its bound"
                f" of {duration(bound_ms)}: see `understudy pool explain {name}`"
            )
    missing = lacks_shadow(pool)
    faults += [f"the shadow of {name} cannot take over now" for name in missing]
    for device in pool.get("devices") or ():
        outside_bytes, total_bytes = device["outside_bytes"], device["total_bytes"]
        if total_bytes is None or not outside_bytes:
            continue
        over = device["booked_bytes"] + outside_bytes + device["margin_bytes"] - total_bytes
        if over > 0:
            faults.append(
                f"{device['device']}: {size(over)} more in use than fits beside the margin; "
                f"programs outside the pool use {size(outside_bytes)}"
            )
    return faults


def pool_lines(pool: Document) -> list[str]:
    """The models, who waits, and the devices."""
    if "error" in pool:
        return ["pool   down"]
    state = f"pool   {status_text.state_of(pool)}   pid {pool.get('pid', '-')}"
    return [*status_text.lines(pool, MODELS_SHOWN), state]


def headline(pool: Document) -> str:
    """For the first line: what the pool serves, in a few words."""
    if "error" in pool:
        return "no pool"
    models = models_of(pool)
    awake = sum(each["state"] == AWAKE for each in models)
    waiting = sum(each["tickets"] for each in models)
    return f"{awake} of {len(models)} models awake, {waiting} waiting"


# --- the memory service: none of its faults stops the engine that serves, which looks fine; they
# affect the next relaunch, or the next failover


def engines_by_pid(engines: Iterable[Document]) -> dict[int, str]:
    """The engine that each process belongs to, from the engines' documents."""
    found: dict[int, str] = {}
    for part in engines:
        engine, backend = part.get("engine") or {}, part.get("backend") or {}
        pids = [engine.get("pid"), *(backend.get("pids") or {}).values()]
        found |= {pid: str(engine.get("id")) for pid in pids if pid}
    return found


def memory_faults(device: Document, engines: Engines) -> list[str]:
    """The faults of the memory, as sentences."""
    if "error" in device:
        why = device["error"]
        return [f"gms {device['name']} down: {why}; engines keep serving, new ones wait"]
    name, state = device.get("device_uuid"), device.get("state")
    faults = []
    if state == "recovering":
        holders = _holders(device["unowned"], device, engines)
        faults.append(f"memory of {name} is recovering: mapped by {holders}")
    elif device.get("superseded_bytes") and not device.get("committed_bytes"):
        loader = "an engine is loading" if state == "staging" else "the next relaunch loads"
        faults.append(
            f"the weights of {name} are out of service but still mapped by {_readers(device)};"
            f" {loader} a second copy"
        )
    elif device.get("problem"):
        faults.append(f"memory of {name}: {device['problem']}")
    return faults


def memory_lines(device: Document, now: datetime, engines: Engines) -> list[str]:
    """A line for the device, and lines for memory besides the committed weights: the KV memory;
    copies that are out of service, and the processes that map them."""
    if "error" in device:
        return [f"gms    {device['name']}   down"]
    sessions, waiting = device.get("sessions") or [], device.get("waiting") or []
    count = device.get("restarts_total")
    restarts = f"restarts {count}, last {since(device.get('since'), now)} ago   " if count else ""
    lines = [
        f"gms    {device.get('device_uuid')}   {device.get('state')}   "
        f"{device.get('tag', 'weights')} {size(device.get('committed_bytes'))}   "
        f"{counted(len(sessions), 'session')}   {len(waiting)} waiting   "
        f"{restarts}pid {device.get('pid', '-')}",
        *_kv(device.get("kv") or {}),
    ]
    if device.get("superseded_bytes"):
        lines.append(
            f"       superseded {size(device['superseded_bytes'])}, mapped by {_readers(device)}"
        )
    releasing = [each for each in device["unowned"] if each["phase"] == "releasing"]
    if releasing:
        total_bytes = sum(each["size_bytes"] or 0 for each in releasing)
        lines.append(
            f"       releasing {size(total_bytes)}, mapped by"
            f" {_holders(releasing, device, engines)}"
        )
    return lines


def _kv(kv: Document) -> list[str]:
    """A line for KV memory that there is."""
    if not kv.get("pool"):
        return []
    holder, waiting = kv.get("holder") or {}, kv.get("waiting") or []
    of = f" {holder.get('engine')}" if holder else ""
    if kv.get("state") == "idle":
        of = " (kept for the next engine; `gms drop-kv` frees it)"
    return [
        f"       kv {kv.get('state')}{of} {size(kv.get('pool_bytes'))}   {len(waiting)} waiting   "
        f"pid {kv.get('pid', '-')}"
    ]


def _readers(device: Document) -> str:
    """The engines that map epochs other than the device's current one."""
    names = dict.fromkeys(
        str(each.get("engine"))
        for each in device.get("sessions") or ()
        if each.get("mode") == "ro" and each.get("epoch") not in (None, device.get("epoch"))
    )
    return ", ".join(names) or "unknown engines"


def _holders(epochs: Iterable[Document], device: Document, engines: Engines) -> str:
    """`pid 17 (engine-0), pid 18`: the processes that hold `epochs`."""
    spoken = [*(device.get("sessions") or ()), *(device.get("waiting") or ())]
    known = {**engines, **{each.get("pid"): each.get("engine") for each in spoken}}
    pids = dict.fromkeys(pid for epoch in epochs for pid in epoch.get("holders") or ())
    named = [f"pid {pid} ({known[pid]})" if pid in known else f"pid {pid}" for pid in pids]
    return ", ".join(named) or "processes not visible here"


# --- what `understudy status --watch` shows below

EVENTS_SHOWN = 8


def watch_lines(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The last events, below a title and an empty line."""
    last = [f"{it['ts']}  {it['source']:<11}  {it['message']}" for it in events[-EVENTS_SHOWN:]]
    return ["", "events", *last] if last else []
