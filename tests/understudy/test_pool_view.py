"""Goal: at three in the morning one look at a pool says what is wrong, and nothing else does.

Method: the pod's view as pure code, on the documents of a pool with one thing amiss at a time.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.understudy.pools import GIB, device, model, pool, waits
from understudy.status.pool_view import has_pool
from understudy.status.view import is_reachable, lines, pod_view
from understudy.status.watch import watch_lines

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
LOCKS = {"locks": {"active:chat": {"problem": None}, "active:coder": {"problem": None}}}
LOCKSERVER: dict[str, Any] = {
    **LOCKS,
    "models": ["chat", "coder"],
    "mode": "gateway",
    "service": {"active": {}},
}
GATEWAY: dict[str, Any] = {"accepting": True, "load": {}, "problems": [], "pid": 9}
PARKED = {**GATEWAY, "load": {"parked": 1, "parked_oldest_ms": 30_000}}
CLOSED = {**GATEWAY, "accepting": False}
GONE = {"name": "pool", "error": "no process is listening"}
SHADOWED = [
    {"engine": "chat-0", "shadow": False, "state": "active", "goal": "awake"},
    {"engine": "chat-1", "shadow": True, "state": "init", "goal": "warm"},
]
GAVE_ROOM = [SHADOWED[0], {**SHADOWED[1], "state": "dead", "goal": "cold"}]


LEASE = {
    "lease": "1f",
    "device": "HOST-0",
    "bytes": 3 * GIB,
    "granted": False,
    "for_ms": 9_000,
    "waits_for": "chat is pinned",
}


def engine(name: str, state: str) -> dict[str, Any]:
    return {"engine": {"id": name, "state": state, "model": name[:-2], "role": "auto"}}


ENGINES = [engine("chat-0", "active"), engine("coder-0", "resting")]


def view(found: dict[str, Any] | None, gateway: dict[str, Any] = GATEWAY) -> dict[str, Any]:
    return pod_view("/d", LOCKSERVER, [], ENGINES, gateway, found)


@pytest.mark.parametrize(
    ("found", "gateway", "state", "words"),
    [
        (pool(), GATEWAY, "healthy", ""),
        (pool(model("chat", "cold"), model("coder", "warm")), GATEWAY, "healthy", ""),
        (pool(), PARKED, "healthy", ""),
        (pool(), CLOSED, "down", "does not accept"),
        (GONE, GATEWAY, "degraded", "pool: no process is listening; awake models are served"),
        (pool(problems=["no gateway is connected"]), GATEWAY, "degraded", "no gateway"),
        (
            pool(model("chat", "failed", fault="no file")),
            GATEWAY,
            "degraded",
            "model chat has failed: no file",
        ),
        (
            pool(model("chat", "warm", recovering=True), recovering=True),
            GATEWAY,
            "degraded",
            "it has not heard all engines of chat",
        ),
        (
            pool(model("chat", "pending", tickets=1, oldest_ticket_ms=46_000)),
            GATEWAY,
            "degraded",
            "a request for chat has waited for 46s, longer than its bound of 45s",
        ),
        (pool(model("chat", "awake", engines=SHADOWED)), GATEWAY, "degraded", "shadow of chat"),
        (pool(model("chat", "awake", engines=GAVE_ROOM)), GATEWAY, "healthy", ""),
        (
            pool(devices=[device(outside_bytes=11 * GIB)]),
            GATEWAY,
            "degraded",
            "HOST-0: 1.0 GiB more in use than fits beside the margin; 11.0 GiB are used by",
        ),
    ],
)
def test_state_of_a_pods_pool_follows_from_its_parts(found, gateway, state, words):
    shown = view(found, gateway)
    assert (shown["state"], words in " ".join(shown["problems"])) == (state, True), shown
    assert bool(shown["problems"]) == (state != "healthy")
    assert is_reachable(shown)


def test_pool_without_anybody_who_serves_is_down():
    shown = pod_view("/d", LOCKSERVER, [], [engine("chat-0", "resting")], GATEWAY, GONE)
    assert shown["state"] == "down"


@pytest.mark.parametrize(
    ("lockserver", "found", "has_socket", "expected"),
    [
        ({"locks": {"active": {}}, "models": []}, GONE, False, False),
        ({"locks": {"active": {}, "active:chat": {}}, "models": []}, GONE, False, False),
        ({"error": "gone"}, GONE, False, False),
        (LOCKSERVER, GONE, False, True),
        ({"error": "gone"}, GONE, True, True),
        ({"error": "gone"}, pool(), True, True),
    ],
)
def test_pod_has_a_pool_if_one_answers_or_should(lockserver, found, has_socket, expected):
    assert has_pool(lockserver, found, has_socket=has_socket) is expected


def test_lines_of_a_pool_name_models_who_waits_and_who_holds_memory():
    coder = model("coder", "pending", tickets=3, oldest_ticket_ms=4_000, waits_for="chat has work")
    found = pool(
        model("chat", "awake", engines=SHADOWED, pinned=True),
        coder,
        plan=[waits("coder", victims=["chat"], step="switches")],
        leases=[LEASE],
    )
    text = "\n".join(lines(view(found), NOW))
    assert "1 of 2 models awake, 3 waiting" in text.splitlines()[0]
    assert "chat-0 active, chat-1 (shadow) init" in text
    assert "next   coder   others make room   3 waiting for 4s   chat has work; asked: chat" in text
    assert "device HOST-0   10.0 GiB free of 16.0 GiB   chat 2.0 GiB, coder (leaving) 2.0" in text
    assert "lease  1f   3.0 GiB of HOST-0   waiting for 9s   chat is pinned" in text
    assert "pool   deciding   pid 5" in text
    assert "! the shadow of chat could not take over now" in text


def test_lines_of_a_hundred_models_fit_a_screen():
    many = [model(f"m{n}", "failed", fault="no file", tickets=1) for n in range(100)]
    found = pool(*many, plan=[waits(each["model"]) for each in many])
    shown = lines(view(found), NOW)
    assert len(shown) < 45
    assert any("and 80 more" in line for line in shown)
    assert any("and 95 more models are waited for" in line for line in shown)
    assert any("more problems" in line for line in shown)


def test_engines_are_shown_while_their_pool_is_away():
    text = "\n".join(lines(view(GONE), NOW))
    assert "pool   down" in text
    assert "chat-0" in text


def test_watch_shows_switches_and_bars_of_a_pool():
    """Goal: a watch says why and for how long models switched. Method: one switch."""
    data = {"model": "chat", "victims": ["coder"], "wait_ms": 9_000, "drain_ms": 50}
    ago = (NOW - timedelta(seconds=60)).isoformat()
    found = view(pool(devices=[device(outside_bytes=GIB)]))
    text = "\n".join(watch_lines(found, [{"type": "pool.switch", "ts": ago, "data": data}], NOW))
    assert "1m00s ago  chat  coder        9s" in text
    assert "[####====oo----................]  10.0 GiB free  # chat 2.0 GiB, = coder 2.0" in text
    assert "o others 1.0 GiB, - margin 2.0 GiB" in text
