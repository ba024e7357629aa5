"""The pod's view as pure code: what is called healthy, degraded, down, and what people read."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from understudy.status.gateway_view import has_gateway
from understudy.status.view import is_reachable, lines, pod_view

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
EARLIER = "2030-01-01T08:48:00.000Z"


def lockserver(state: str = "held", holder: str | None = "engine-0") -> dict:
    found = {"engine": holder, "token": 17, "since": EARLIER} if holder else None
    lock = {"state": state, "holder": found, "waiters": [], "problem": None}
    return {"schema": 1, "token": 17, "locks": {"active": lock}}


def engine(name: str, state: str) -> dict:
    about = {"id": name, "role": "auto", "state": state, "since": EARLIER, "reason": "as it should"}
    return {"schema": 1, "engine": about, "inflight": 2}


def memory(state: str = "committed") -> dict:
    device = {
        "device_uuid": "HOST-0",
        "tag": "weights",
        "state": state,
        "committed_bytes": 3 * 2**29,
        "sessions": [{}, {}],
        "waiting": [],
    }
    return {"schema": 1, **device}


ACTIVE, STANDBY = engine("engine-0", "active"), engine("engine-1", "standby")
SILENT = {"name": "engine-1", "error": "nobody listens on engine_engine-1.sock"}


NO_LOCKSERVER = {"name": "lockserver", "error": "gone"}


@pytest.mark.parametrize(
    ("lock", "gms", "engines", "state", "word"),
    [
        (lockserver(), [memory()], [ACTIVE, STANDBY], "healthy", ""),
        (lockserver(), [memory()], [ACTIVE, engine("engine-1", "init")], "degraded", "no standby"),
        (lockserver(), [memory()], [ACTIVE, SILENT], "degraded", "nobody listens"),
        (lockserver(), [memory("recovering")], [ACTIVE, STANDBY], "degraded", "recovering"),
        (lockserver("free", None), [memory()], [STANDBY], "down", ""),
        (lockserver("releasing"), [memory()], [STANDBY], "down", ""),
        (lockserver(), [memory()], [ACTIVE, engine("engine-1", "active")], "down", "more than one"),
        (NO_LOCKSERVER, [memory()], [ACTIVE, STANDBY], "degraded", "gone"),
        (lockserver(), [memory()], [{"name": "engine-0", "error": "x"}, STANDBY], "degraded", "x"),
        (NO_LOCKSERVER, [], [], "down", "gone"),
    ],
)
def test_pod_view_state_follows_from_the_parts(lock, gms, engines, state, word):
    """Goal: one word that can be trusted. Method: one thing amiss at a time."""
    view = pod_view("/run/understudy", lock, gms, engines)
    assert view["state"] == state
    assert word in " ".join(view["problems"])


def test_failover_is_ready_only_if_somebody_can_grant():
    """Goal: the first line never promises what cannot happen. Method: a standby is there, and the
    lock server is gone, recovering, or waits for a stopped holder."""
    hung = lockserver()
    hung["locks"]["active"]["problem"] = "engine-0 is unresponsive"
    for lock in (NO_LOCKSERVER, lockserver("recovering"), hung):
        view = pod_view("/d", lock, [memory()], [ACTIVE, STANDBY])
        assert view["state"] == "degraded"
        assert "NO failover" in lines(view, NOW)[0]


def leaving(name: str, state: str) -> dict:
    return {**engine(name, state), "stop": {"is_told": True, "drain_ms": 43_000}}


LEFT = {"name": "engine-1", "error": "not running: asked to exit (SIGTERM)"}


@pytest.mark.parametrize(
    ("engines", "stopping"),
    [
        ([leaving("engine-0", "draining"), LEFT], True),
        ([leaving("engine-0", "draining"), {**leaving("engine-1", "dead"), "inflight": 0}], True),
        ([leaving("engine-0", "draining"), STANDBY], False),  # one engine is replaced
        ([LEFT], False),
        ([ACTIVE, STANDBY], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("gateway", [None, {"accepting": False, "load": {"in_flight": 2}}])
def test_pod_whose_engines_were_all_told_to_exit_is_stopping(engines, stopping, gateway):
    """Goal: a pod that finishes its requests is not shown as broken."""
    view = pod_view("/d", lockserver(), [memory()], engines, gateway)
    assert view["stopping"] is stopping
    if stopping:
        assert view["state"] == "down"
        assert view["problems"][0].startswith("the pod is stopping: 2 requests")
        assert not any("not running" in each for each in view["problems"])
        assert lines(view, NOW)[0].split()[:4] == ["pod", "stopping", "2", "in"]


def test_lines_of_a_standard_pod_fit_below_fifteen():
    """Goal: one look is enough. Method: the healthy pod, and one with more trouble than fits."""
    view = pod_view("/run/understudy", lockserver(), [memory()], [ACTIVE, STANDBY])
    text = lines(view, NOW)
    assert len(text) < 15
    assert "healthy" in text[0]
    assert "failover ready (1 standby)" in text[0]
    assert "held by engine-0" in text[1]
    assert "token 17   since 3h12m" in text[1]
    assert any("HOST-0" in line and "1.5 GiB" in line and "2 sessions" in line for line in text)
    from_supervisor = {"schema": 1, "devices": [memory(), memory()]}
    view = pod_view("/run/understudy", lockserver(), [from_supervisor], [ACTIVE, STANDBY])
    assert sum("HOST-0" in line for line in lines(view, NOW)) == 2
    broken = [{"name": f"part-{number}", "error": "gone"} for number in range(4)]
    assert len(lines(pod_view("/d", broken[0], broken[1:2], broken[2:]), NOW)) < 15


@pytest.mark.parametrize(
    ("last", "text"),
    [(None, "-  "), ({"ok": True, "at": EARLIER}, "ok 3h12m ago"), ({"ok": False}, "FAILED")],
)
def test_last_canary_is_in_the_engines_line(last, text):
    """Goal: tokens that were proven are seen. Method: none yet, one that passed, one that did
    not."""
    known = {**ACTIVE, "backend": {"last_canary": last}}
    view = pod_view("/d", lockserver(), [memory()], [known, STANDBY])
    header, row = lines(view, NOW)[2:4]
    assert row[header.index("last canary") :].startswith(text)


def test_is_reachable_when_anybody_answers():
    """Goal: exit code 3 only for silence. Method: all silent, then one voice."""
    silent = {"name": "lockserver", "error": "gone"}
    assert not is_reachable(pod_view("/d", silent, [], []))
    assert is_reachable(pod_view("/d", silent, [], [STANDBY]))


PIDS = {"http": 20, "model": 21}
RUNNING = [{**ACTIVE, "backend": {"pids": PIDS}}, STANDBY]


def holding(state: str = "committed", **more: object) -> dict:
    """A device with something besides what is committed."""
    reader = {"mode": "ro", "engine": "engine-0", "epoch": "old", "pid": 21}
    loader = {"mode": "rw", "engine": "engine-1", "epoch": "new", "pid": 31}
    found = {"epoch": "new", "sessions": [reader, loader], "superseded_bytes": 3 * 2**29}
    return {**memory(state), **found, **more}


def of(*gms: dict) -> tuple[dict, str]:
    """The view of a pod with `gms`, and how it reads."""
    view = pod_view("/d", lockserver(), gms, RUNNING)
    return view, "\n".join(lines(view, NOW))


@pytest.mark.parametrize(
    ("state", "then"),
    [
        ("empty", "engine-0; the next relaunch loads a second copy"),
        ("staging", "engine-0; an engine is loading a second copy"),
    ],
)
def test_weights_out_of_service_that_engines_map_are_a_fault(state, then):
    """Goal: nobody is surprised by two copies. Method: dropped or condemned, and still mapped."""
    view, text = of(holding(state, committed_bytes=0))
    assert view["state"] == "degraded"
    assert f"! the weights of HOST-0 are out of service but still mapped by {then}" in text


def test_second_copy_is_shown_with_who_maps_it():
    """Goal: two copies never read like one. Method: superseded beside committed; releasing."""
    view, text = of(holding())
    assert view["state"] == "healthy"
    assert "       superseded 1.5 GiB, mapped by engine-0\n" in text + "\n"
    ending = {"phase": "releasing", "size_bytes": 2**30, "holders": [20, 99]}
    _, text = of(holding(superseded_bytes=0, unowned=[ending]))
    assert "       releasing 1.0 GiB, mapped by pid 20 (engine-0), pid 99" in text
    assert "superseded" not in text


def test_kv_memory_is_shown_once_there_is_some_and_if_its_server_is_away():
    """Goal: no line that says nothing. Method: no server, an empty one, a lent pool, none that
    answers."""
    empty = {"state": "empty", "pool": None, "waiting": []}
    for kv in (None, empty):
        assert " kv " not in of({**memory(), "kv": kv})[1]
    holder = {"engine": "engine-0", "token": 7}
    lent = {"state": "lent", "pool": "p", "pool_bytes": 2**30, "holder": holder, "pid": 30}
    assert "       kv lent engine-0 1.0 GiB   0 waiting   pid 30" in of({**memory(), "kv": lent})[1]
    idle = {**lent, "state": "idle"}
    said = "kv idle (kept for the next engine; `gms drop-kv` frees it) 1.0 GiB"
    assert said in of({**memory(), "kv": idle})[1]
    away = {"state": "offline", "reason": "no server is listening"}
    view, text = of({**memory(), "kv": away})
    assert "       kv offline: no server is listening" in text
    assert view["state"] == "degraded"
    assert "the KV memory of HOST-0 has no server: no server is listening;" in view["problems"][0]


def test_engine_whose_cache_outlives_it_says_what_it_adopted_and_keeps():
    """Goal: a line once it is awake, with the reason where nothing was adopted; none for a cache of
    its own."""
    kv = {"memory": "gms", "adopted_blocks": 0, "kept_blocks": 9, "note": "the pool is new"}
    for cache, count in ((kv, 1), ({**kv, "memory": "private"}, 0), (None, 0)):
        active = {**engine("engine-0", "active"), "backend": {"kv": cache}}
        view = pod_view("/d", lockserver(), [memory()], [active, engine("engine-1", "standby")])
        said = "engine-0 adopted 0 KV blocks, keeps 9 for the next engine   the pool is new"
        assert "\n".join(lines(view, NOW)).count(said) == count


def test_recovering_memory_names_the_pids_and_their_engines():
    """Goal: whom to look at. Method: one pid of a known engine, one of nobody; none at all yet."""
    orphan = {"phase": "orphaned", "size_bytes": 0, "holders": [21, 99]}
    nobody = {**orphan, "holders": []}
    _, text = of({**memory("recovering"), "unowned": [orphan]})
    assert "! memory of HOST-0 is recovering: mapped by pid 21 (engine-0), pid 99" in text
    _, text = of({**memory("recovering"), "unowned": [nobody]})
    assert "recovering: mapped by processes not visible here" in text


def test_silent_memory_server_is_down_by_its_devices_name():
    """Goal: what it means, not a file's name. Method: the server of a device does not answer."""
    view, text = of({"name": "HOST-0", "error": "nobody listens"}, memory())
    assert view["state"] == "degraded"
    assert "gms    HOST-0   down\n" in text
    assert "! gms HOST-0 down: nobody listens; engines keep serving, new ones wait" in text


def test_restarts_of_a_memory_server_are_shown_once_there_are_any():
    """Goal: a server that keeps dying is seen. Method: none, then three."""
    assert "restarts" not in of({**memory(), "restarts_total": 0, "since": EARLIER})[1]
    _, text = of({**memory(), "restarts_total": 3, "since": EARLIER})
    assert "restarts 3, last 3h12m ago" in text


def test_busy_machine_is_shown_with_what_it_does_to_the_budget():
    """Goal: at 3 am, why a slow engine is left alone. Method: the active engine's health at ease,
    under pressure, and as an older engine reports it."""
    budget = "budget 7.5 s: 3 s, stretched 2.5 times by a CPU pressure of 80 %"
    for stretch, is_shown in ((1.0, False), (2.5, True)):
        health = {"stretch": stretch, "hang_budget": budget}
        view = pod_view("/d", lockserver(), [memory()], [{**ACTIVE, "health": health}, STANDBY])
        text = lines(view, NOW)
        assert (f"busy   engine-0: hang {budget}" in text) is is_shown
    assert not any("busy" in line for line in lines(pod_view("/d", {}, [], [ACTIVE]), NOW))


BEHIND = {"mode": "gateway", "service": {"active": {}}}


def gateway(**differences: object) -> dict:
    load = {"in_flight": 12, "parked": 2, "parked_oldest_ms": 1200.0, "replaying": 1}
    return {"schema": 1, "accepting": True, "load": load, "pid": 77, **differences}


def through(found: dict | None, **lock: object) -> tuple[dict, str]:
    """The view of a sound pod whose clients come through the gateway `found`."""
    server = {**lockserver(), "mode": "gateway", **lock}
    view = pod_view("/d", server, [memory()], [ACTIVE, STANDBY], found)
    return view, "\n".join(lines(view, NOW))


def test_gateway_has_a_line_with_what_waits_in_it():
    """Goal: a failover seen from the door. Method: streams that are parked; direct mode."""
    view, text = through(gateway())
    assert view["state"] == "healthy"
    assert (
        "gateway accepting   12 in flight   2 parked (oldest 1.2s)   1 replaying   pid 77" in text
    )
    assert "gateway" not in through(None, mode="direct")[1]


@pytest.mark.parametrize(
    ("found", "state", "word"),
    [
        ({"name": "gateway", "error": "nobody listens"}, "down", "gateway: nobody listens; requ"),
        (gateway(accepting=False, problems=["no descriptors"]), "down", "! no descriptors"),
        (gateway(accepting=False), "down", "! the gateway does not accept connections"),
        (gateway(load={"parked_oldest_ms": 25_000}), "degraded", "has been parked for 25s"),
    ],
)
def test_what_keeps_requests_out_is_a_fault(found, state, word):
    """Goal: a pod that answers nobody is never called healthy. Method: one thing amiss at a
    time."""
    view, text = through(found)
    assert view["state"] == state
    assert word in text


def test_gateway_beside_direct_mode_is_a_fault():
    """Goal: two parts that contradict each other are seen. Method: both answer."""
    assert (
        "! a gateway runs, but the lock server is in direct mode"
        in through(gateway(), mode="direct")[1]
    )


@pytest.mark.parametrize(
    ("lock", "document", "has_socket", "is_one"),
    [
        (BEHIND, {"error": "gone"}, False, True),  # it is missed
        ({**BEHIND, "service": {}}, {"error": "gone"}, True, False),  # for what?
        ({"mode": "direct"}, {"error": "gone"}, True, False),  # a stale socket means nothing
        ({}, {"error": "gone"}, True, False),  # an older server knows no gateway
        (NO_LOCKSERVER, {"error": "gone"}, True, True),
        (NO_LOCKSERVER, {"error": "gone"}, False, False),
        ({"mode": "direct"}, {"pid": 1}, True, True),
    ],
)
def test_whether_a_pod_has_a_gateway(lock, document, has_socket, is_one):
    """Goal: none is missed in direct mode. Method: what each of the two says, and the socket."""
    assert has_gateway(lock, document, has_socket=has_socket) is is_one


@pytest.mark.parametrize(
    ("wake", "goal", "state", "line"),
    [
        (
            "on-request",
            "warm",
            "healthy",
            "rest   for 5m00s   gateway asked for it   a request wakes",
        ),
        ("manual", "warm", "down", "! the active engine rests and no request wakes it"),
        ("manual", "awake", "healthy", "rest   for 5m00s   gateway asked for it"),
    ],
)
def test_an_engine_that_rests_is_fine_if_a_request_wakes_it(wake, goal, state, line):
    said = {"state": "resting", "for_ms": 300_000, "goal": goal, "goal_by": "gateway"}
    found = gateway(rest={"wake": wake, "door": "shut", "engine": said})
    server = {**lockserver(), **BEHIND}
    view = pod_view("/d", server, [memory()], [engine("engine-0", "resting"), STANDBY], found)
    text = "\n".join(lines(view, NOW))
    assert (view["state"], view["active"], view["resting"]) == (state, "engine-0", True)
    assert view["failover_ready"]
    assert line in text
