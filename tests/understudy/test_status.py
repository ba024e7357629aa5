"""`understudy status`: which pod is healthy, degraded or down, and how each kind of pod reads.

Verdicts are tables over pure code, one thing amiss at a time. `status.txt` has the text of pods
that show every line there is: `GOLDEN=write` writes it anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_command
from tests.lockserver.processes import ServerProcess
from tests.understudy.pools import GIB, SINCE, device, model, pool
from understudy.status.gather import gather, states_on_file
from understudy.status.view import is_reachable, lines, offline_lines, pod_view, watch_lines

GOLDEN = Path(__file__).with_name("status.txt")
NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
EARLIER = "2030-01-01T08:48:00.000Z"
UNREACHABLE = 3
WAIT_S = 30.0
STATUS = (sys.executable, "-m", "understudy.cli.main", "status")


def lockserver(state: str = "held", holder: str | None = "engine-0", **more: Any) -> dict[str, Any]:
    found = {"engine": holder, "token": 17, "since": EARLIER} if holder else None
    lock = {"state": state, "holder": found, "waiters": [], "problem": None}
    return {"schema": 1, "token": 17, "locks": {"active": lock}, **more}


def engine(name: str, state: str, **more: Any) -> dict[str, Any]:
    about = {"id": name, "role": "auto", "state": state, "since": EARLIER, "reason": "so"}
    return {"schema": 1, "engine": about, "inflight": 2, **more}


def memory(state: str = "committed", **more: Any) -> dict[str, Any]:
    return {
        "device_uuid": "HOST-0",
        "tag": "weights",
        "state": state,
        "committed_bytes": 3 * 2**29,
        "capacity_bytes": 4 * GIB,
        "sessions": [],
        "waiting": [],
        "unowned": [],
        **more,
    }


LOAD = {"in_flight": 12, "parked": 2, "parked_oldest_ms": 1200.0, "replaying": 1}
LATE = {**LOAD, "parked_oldest_ms": 30_000}


def gateway(**differences: Any) -> dict[str, Any]:
    return {"schema": 1, "accepting": True, "load": LOAD, "pid": 77, **differences}


def gone(name: str) -> dict[str, Any]:
    return {"name": name, "error": "no process is listening"}


def leaving(name: str, state: str) -> dict[str, Any]:
    return engine(name, state, stop={"is_told": True, "drain_ms": 43_000})


ACTIVE, STANDBY = engine("engine-0", "active"), engine("engine-1", "standby")
PAIR = [ACTIVE, STANDBY]
BEHIND = {"mode": "gateway", "service": {"active": {}}}
HUNG = lockserver()
HUNG["locks"]["active"]["problem"] = "engine-0 is unresponsive"
MAPPED = {"mode": "ro", "engine": "engine-0", "epoch": "old", "pid": 21}
SMALL, LARGE = ({"backend": {"kv_bytes": kv_bytes}} for kv_bytes in (1 << 20, 3 << 20))
LEFT = {"name": "engine-1", "error": "not running: asked to exit (SIGTERM)"}


@pytest.mark.parametrize(
    ("lock", "gms", "engines", "state"),
    [
        (lockserver(), [memory()], PAIR, "healthy"),
        (lockserver(), [memory()], [ACTIVE, engine("engine-1", "init")], "degraded"),
        (lockserver(), [memory()], [ACTIVE, gone("engine-1")], "degraded"),
        (lockserver(), [memory("recovering")], PAIR, "degraded"),
        (lockserver(), [gone("HOST-0")], PAIR, "degraded"),
        (lockserver(), [memory(superseded_bytes=1)], PAIR, "healthy"),
        (lockserver(), [memory()], [ACTIVE | SMALL, STANDBY | SMALL], "healthy"),
        (lockserver(), [memory()], [ACTIVE | SMALL, STANDBY | LARGE], "degraded"),
        (lockserver(), [memory(superseded_bytes=1, committed_bytes=0)], PAIR, "degraded"),
        (lockserver("free", None), [memory()], [STANDBY], "down"),
        (lockserver("releasing"), [memory()], [STANDBY], "down"),
        (lockserver(), [memory()], [ACTIVE, engine("engine-1", "active")], "down"),
        (lockserver(), [memory()], [gone("engine-0"), STANDBY], "degraded"),
        (gone("lockserver"), [memory()], PAIR, "degraded"),
        (lockserver("recovering"), [memory()], PAIR, "degraded"),
        (HUNG, [memory()], PAIR, "degraded"),
        (gone("lockserver"), [], [], "down"),
    ],
)
def test_pod_view_state_follows_from_the_parts(lock, gms, engines, state):
    """Goal: one word that can be trusted, and no failover promised that cannot happen."""
    view = pod_view("/run/understudy", lock, gms, engines)
    assert view["state"] == state
    assert bool(view["problems"]) or state != "degraded"
    can_grant = lock is not HUNG and lock.get("locks", {}).get("active", {}).get("state") == "held"
    standby = any(each.get("engine") == STANDBY["engine"] for each in engines)
    assert view["failover_ready"] == (can_grant and standby)
    assert is_reachable(view) == bool(gms)


@pytest.mark.parametrize(
    ("found", "lock", "state"),
    [
        (gateway(), BEHIND, "healthy"),
        (None, {"mode": "direct"}, "healthy"),  # over TCP
        (gone("gateway"), BEHIND, "down"),
        (gateway(accepting=False), BEHIND, "down"),
        (gateway(accepting=False, problems=["no descriptors"]), BEHIND, "down"),
        (gateway(load=LATE), BEHIND, "degraded"),
    ],
)
def test_pod_that_answers_no_request_is_not_healthy(found, lock, state):
    view = pod_view("/d", lockserver(**lock), [memory()], PAIR, found)
    assert (view["state"], bool(view["problems"])) == (state, state != "healthy")


@pytest.mark.parametrize(
    ("wake", "goal", "state"),
    [
        ("on-request", "warm", "healthy"),
        ("manual", "warm", "down"),
        ("manual", "awake", "healthy"),
    ],
)
def test_sleeping_engine_is_no_fault_if_a_request_wakes_it(wake, goal, state):
    said = {"state": "resting", "for_ms": 300_000, "goal": goal, "goal_by": "gateway"}
    found = gateway(rest={"wake": wake, "door": "shut", "engine": said})
    engines = [engine("engine-0", "resting"), STANDBY]
    view = pod_view("/d", lockserver(**BEHIND), [memory()], engines, found)
    assert (view["state"], view["active"], view["resting"]) == (state, "engine-0", True)
    assert view["failover_ready"]


@pytest.mark.parametrize("found", [None, {"accepting": False, "load": {**LOAD, "in_flight": 2}}])
@pytest.mark.parametrize(
    ("engines", "stopping"),
    [
        ([leaving("engine-0", "draining"), LEFT], True),
        ([leaving("engine-0", "draining"), {**leaving("engine-1", "dead"), "inflight": 0}], True),
        ([leaving("engine-0", "draining"), STANDBY], False),  # one engine is replaced
        ([LEFT], False),
        (PAIR, False),
        ([], False),
    ],
)
def test_pod_whose_engines_were_all_told_to_exit_is_stopping(engines, stopping, found):
    """Goal: a pod that finishes its requests is not shown as broken."""
    view = pod_view("/d", lockserver(), [memory()], engines, found)
    assert view["stopping"] is stopping
    if stopping:
        assert not any("not running" in each for each in view["problems"])
        assert lines(view, NOW)[0].split()[:4] == ["pod", "stopping", "2", "in"]


LOCKS = {"locks": {"active:chat": {"problem": None}, "active:coder": {"problem": None}}}
OF_MODELS = {**LOCKS, "models": ["chat", "coder"], **BEHIND}
SHADOWED = [
    {"engine": "chat-0", "shadow": False, "state": "active", "goal": "awake"},
    {"engine": "chat-1", "shadow": True, "state": "init", "goal": "warm"},
]
ENGINES = [engine("chat-0", "active"), engine("coder-0", "resting")]
OPEN = gateway(load=dict.fromkeys(LOAD, 0), problems=[])


@pytest.mark.parametrize(
    ("found", "door", "state"),
    [
        (pool(), OPEN, "healthy"),
        (pool(model("chat", "cold"), model("coder", "warm")), OPEN, "healthy"),
        (pool(), gateway(load=LATE), "healthy"),
        (pool(), gateway(accepting=False), "down"),
        (gone("pool"), OPEN, "degraded"),
        (pool(problems=["no gateway is connected"]), OPEN, "degraded"),
        (pool(model("chat", "failed", fault="no file")), OPEN, "degraded"),
        (pool(model("chat", "warm", recovering=True), recovering=True), OPEN, "degraded"),
        (pool(model("chat", "pending", tickets=1, oldest_ticket_ms=46_000)), OPEN, "degraded"),
        (pool(model("chat", "awake", engines=SHADOWED)), OPEN, "degraded"),
        (pool(devices=[device(outside_bytes=11 * GIB)]), OPEN, "degraded"),
    ],
)
def test_state_of_a_pods_pool_follows_from_its_parts(found, door, state):
    shown = pod_view("/d", OF_MODELS, [], ENGINES, door, found)
    assert (shown["state"], bool(shown["problems"])) == (state, state != "healthy"), shown
    without = pod_view("/d", OF_MODELS, [], [engine("chat-0", "resting")], OPEN, gone("pool"))
    assert without["state"] == "down"


# --- the text


def rich_pod() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    grant = {"lock": "active", "engine": "engine-1", "token": 3, "contended": True, "ts": EARLIER}
    marks = {"lost_mono_ms": 1000.0, "fenced_mono_ms": 1005.5}
    last = {"token": 4, "granted_mono_ms": 1007.5, "canary_mono_ms": 1020.0}
    kv = {"memory": "gms", "adopted_blocks": 0, "kept_blocks": 9, "note": "the pool is new"}
    active = engine(
        "engine-0",
        "active",
        backend={"pids": {"model": 21}, "kv": kv, "last_canary": {"ok": True, "at": SINCE}},
        health={"stretch": 2.5, "hang_budget": "budget 7.5 s: 3 s, stretched 2.5 times"},
        last_failover={**last, "active_mono_ms": 1024.0},
        last_event={"mono_ms": 1.0, "ts": SINCE, "source": "engine-0", "message": "is active"},
    )
    weights = memory(
        superseded_bytes=2**29,
        sessions=[MAPPED],
        unowned=[{"phase": "releasing", "size_bytes": 2**30, "holders": [21, 99]}],
        kv={"state": "lent", "pool": "p", "pool_bytes": GIB, "capacity_bytes": GIB, "pid": 30}
        | {"holder": {"engine": "engine-0"}},
        restarts_total=3,
        since=EARLIER,
    )
    orphaned = {"phase": "orphaned", "size_bytes": 0, "holders": [21]}
    recovering = memory("recovering", device_uuid="HOST-1", unowned=[orphaned])
    ended = [("whole", "exact", 5), ("whole", "state", 2), ("broken", "none", 1)]
    counts = [{"ending": e, "continuation": c, "count": n} for e, c, n in ended]
    totals = {"requests": counts, "pauses": 4, "pause_ms": 100.0, "replayed_tokens": 70}
    view = pod_view(
        "/run/understudy",
        lockserver(**BEHIND, last_grants=[grant, {**grant, "token": 4, **marks}]),
        [weights, recovering],
        [active, STANDBY],
        gateway(totals=totals, memory_bytes_max=GIB),
    )
    events = [{"ts": SINCE, "source": "lockserver", "message": f"message {n}"} for n in range(20)]
    return view, events


def rich_pool() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lease = {"lease": "1f", "device": "HOST-0", "bytes": 3 * GIB, "granted": False}
    coder = model("coder", "pending", tickets=3, oldest_ticket_ms=4_000, waits_for="chat has work")
    found = pool(
        model("chat", "awake", engines=SHADOWED, pinned=True),
        coder,
        *(model(f"m{n}", "failed", fault="no file", tickets=1) for n in range(40)),
        leases=[lease | {"for_ms": 9_000, "waits_for": "chat is pinned"}],
        devices=[device(outside_bytes=GIB)],
    )
    data = {"model": "chat", "victims": ["coder"], "wait_ms": 9_000, "drain_ms": 50}
    events = [{"type": "pool.switch", "ts": SINCE, "source": "pool", "message": "m", "data": data}]
    return pod_view("/d", OF_MODELS, [], ENGINES, OPEN, found), events


def silent_pod() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    parts = gone("lockserver"), [gone("HOST-0")], [gone("engine-0")], gone("gateway")
    return pod_view("/d", *parts), []


def test_text_of_a_status_and_a_watch():
    """Goal: one look is enough, and a hole is a hole. Method: pods that have every line."""
    scenes = {"pod": rich_pod(), "pool": rich_pool(), "silent": silent_pod()}
    text = "".join(
        f"==== {name}\n" + "\n".join([*lines(view, NOW), *watch_lines(events), ""])
        for name, (view, events) in scenes.items()
    )
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    healthy = pod_view("/run/understudy", lockserver(), [memory()], PAIR)
    assert len(lines(healthy, NOW)) < 15
    assert len(lines(scenes["pool"][0], NOW)) < 45


# --- the command


def write(directory: Path, name: str, state: str, reason: str = "as told") -> None:
    about = {"id": name, "role": "auto", "state": state, "since": EARLIER, "reason": reason}
    (directory / f"engine_{name}.json").write_text(json.dumps({"engine": about}))


def status(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    words = [*STATUS, f"--dir={directory}", *flags]
    return run_command(words, timeout=WAIT_S)


def test_status_of_a_pod_that_is_down_shows_its_offline_view_and_exits_with_3(tmp_path: Path):
    """Goal: down is an answer. Method: no pod; then engines' state files, one of them torn."""
    nothing = status(tmp_path)
    assert (nothing.returncode, nothing.stdout) == (UNREACHABLE, "")
    write(tmp_path, "engine-0", "active")
    write(tmp_path, "engine-1", "standby")
    (tmp_path / "engine_engine-2.json").write_text('{"engine": ')
    (tmp_path / "engine_engine-3.json").write_text("{}")
    _, header, *rows = offline_lines(states_on_file(tmp_path), NOW)
    assert header.split() == ["engine", "role", "was", "since", "reason"]
    assert [row.split()[0] for row in rows] == ["engine-0", "engine-1", "?"]
    done = status(tmp_path)
    assert (done.returncode, "engine-0" in done.stdout) == (UNREACHABLE, True)
    done = status(tmp_path, "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "pod.unreachable")


def test_status_names_the_cause_when_every_engine_is_in_a_crash_loop():
    """Goal: `status` says why a pod is down although its lock server answers. Method: a lock
    server, and state files of engines that ended by themselves, as asked to, and not at all."""
    loop = "crash loop: 5 deaths within 10 minutes, the last one: http exited with code 1"
    with tempfile.TemporaryDirectory(prefix="us") as path:
        server = ServerProcess(path)
        server.start()
        try:
            write(Path(path), "engine-0", "dead", loop)
            write(Path(path), "engine-1", "dead", "drained")
            write(Path(path), "engine-2", "active")
            view = asyncio.run(gather(Path(path)))
        finally:
            server.close()
    assert (view["state"], [each["name"] for each in view["engines"]]) == ("down", ["engine-0"])
    assert loop in view["engines"][0]["error"]


def test_watch_waits_for_a_pod_and_ends_with_ctrl_c(tmp_path: Path):
    """Goal: an operator leaves it open. Method: a lock server that comes; Ctrl-C."""
    words = [*STATUS, "--watch", f"--dir={tmp_path}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        shown = watch.stdout

        def sees(text: str) -> None:
            assert any(text in line for line in shown), f"it ended before {text!r}"

        sees("no part of a pod answers")
        sees("no part of a pod answers")
        server = ServerProcess(str(tmp_path))
        server.start()
        try:
            for text in ("NO failover", "events", "lockserver"):
                sees(text)
        finally:
            server.close()
        watch.send_signal(signal.SIGINT)
        assert watch.wait(WAIT_S) == 130
