"""A switchover in the pure machine: what refuses it, which engine it prefers, and how it may
end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.lock import Lock, LockState, Waiter
from lockserver.core.supervisors import next_of
from lockserver.messages import HandOverMsg, SwitchedOverMsg
from tests.lockserver.core.shell import A2, A, B, Shell, happened, messages, sent, want

C = "engine-2-000000000000000c"
ASKED = ev.SwitchOverAsked(ask=1, pid=77, lock="active", to=None, timeout_ms=10_000)


def pod(*waiting: str, **options: float) -> Shell:
    """Engine 0 holds `active`, `waiting` wait in this order on connections 2, 3 …"""
    shell = Shell(**options)
    shell.feed(want(1, A, "active"))
    for conn, incarnation in enumerate(waiting, 2):
        shell.feed(want(conn, incarnation, "active"))
    assert shell.active.holder.incarnation == A
    return shell


def ask(shell: Shell, **changes) -> list[ev.LockEffect]:
    return shell.feed(replace(ASKED, **changes))


def told(effects) -> list[str]:
    return [f"{each.incarnation} to {each.to}" for each in messages(effects, HandOverMsg)]


def answers(effects) -> list[tuple[int, str]]:
    """Which connections were answered, and with what: an engine's id, or a code."""
    return [
        (e.ask, e.answer.engine if isinstance(e.answer, SwitchedOverMsg) else e.answer.code)
        for e in effects
        if isinstance(e, ev.AnswerSwitchOver)
    ]


def give_up(shell: Shell, conn: int = 1, engine: str = "engine-0") -> list[ev.LockEffect]:
    """The holder has drained and reaped: it names no incarnation, and its witness is free."""
    incarnation = shell.active.holder.incarnation
    effects = shell.feed(want(conn, None, engine=engine))
    return effects + shell.find_free(incarnation)


# ---------------------------------------------------------------------- done


def test_holder_is_asked_and_the_first_waiter_is_granted():
    """Goal: a switchover from beginning to end. Method: ask, drain, give up; the answer, the grant
    and the events, and that no trace of it is left."""
    shell = pod(B, C)
    effects = ask(shell)
    assert told(effects) == [f"{A} to engine-1"]
    assert happened(effects) == ["lock.switchover"]
    assert shell.machine.switchovers.under_way["active"].pid == 77
    shell.now_ms = 2500.0
    effects = give_up(shell)
    assert sent(effects) == [(2, B, 2)]
    assert answers(effects) == [(1, "engine-1")]
    (report,) = [each.answer for each in effects if isinstance(each, ev.AnswerSwitchOver)]
    assert (report.source, report.token, report.took_ms) == ("engine-0", 2, 2500)
    assert happened(effects)[-1] == "lock.switched_over"
    assert not shell.machine.switchovers.under_way
    assert shell.active.preferred is None


def test_named_engine_goes_ahead_of_longer_waiters():
    """Goal: `--to`. Method: name the one that waits second; FIFO again after that."""
    shell = pod(B, C)
    assert told(ask(shell, to="engine-2")) == [f"{A} to engine-2"]
    assert sent(give_up(shell)) == [(3, C, 2)]
    assert sent(give_up(shell, 3, "engine-2")) == [(2, B, 3)]


def resumes(effects) -> list[bool]:
    return [each.resume for each in messages(effects, HandOverMsg)]


@pytest.mark.parametrize(
    ("ids", "drain", "is_resumed"),
    [
        (("x", "x"), False, True),
        (("x", "x"), True, False),
        (("x", "y"), False, False),
        (("", ""), False, False),
    ],
    ids=["same", "drain", "other", "none"],
)
def test_streams_are_left_to_a_target_that_can_continue_them(ids, drain, is_resumed):
    """Goal: a switchover waits for no stream that can go on; in any other case it
    drains. Method: each condition alone; the holder reconnects and is asked the same again."""
    shell = Shell()
    shell.feed(want(1, A, "active", continuation=ids[0]))
    shell.feed(want(2, B, "active", continuation="z"))
    shell.feed(want(3, C, "active", continuation=ids[1]))
    effects = ask(shell, to="engine-2", drain=drain)
    assert resumes(effects) == [is_resumed]
    (event,) = [effect for effect in effects if isinstance(effect, ev.Happened)]
    assert event.data["resume"] is is_resumed
    assert ("continues" in event.message) is is_resumed
    shell.feed("connection_closed", 1)
    back = want(9, A, "active", token=1, continuation=ids[0])
    assert resumes(shell.feed(back)) == [is_resumed]


def test_switchover_to_the_holder_is_not_an_error():
    """Goal: asking twice is harmless. Method: name the holder: answered at once, nothing begins."""
    shell = pod(B)
    effects = ask(shell, to="engine-0")
    assert answers(effects) == [(1, "engine-0")]
    assert told(effects) == []
    assert not shell.machine.switchovers.under_way


# ---------------------------------------------------------------------- refused


def _silent(shell: Shell) -> None:
    """The waiting engines fall silent, the holder does not."""
    effects = []
    for beat in range(1, 5):
        effects += shell.pass_ms(1000) + shell.feed("beaten", 1, beat)
    assert happened(effects) == ["lock.silent"]


@pytest.mark.parametrize(
    ("waiting", "before", "changes", "code"),
    [
        ((), None, {}, "lock.no_standby"),
        ((B,), _silent, {}, "lock.no_standby"),
        ((B,), None, {"to": "engine-7"}, "lock.unknown_engine"),
        ((B,), None, {"lock": "nonsense"}, "lock.unknown_lock"),
        ((B,), None, {"lock": "loader"}, "lock.unknown_lock"),
        ((B,), lambda s: s.feed("connection_closed", 1), {}, "lock.not_held"),
        ((B,), lambda s: s.pass_ms(4000), {}, "lock.not_held"),
        ((B,), ask, {}, "lock.switchover_busy"),
    ],
)
def test_refused_switchover_changes_nothing(waiting, before, changes, code):
    """Goal: without a standby, nothing changes. Method: each reason; one answer, one
    event, no message to the holder, the preference unchanged."""
    shell = pod(*waiting)
    if before is not None:
        before(shell)
    was = (shell.active.state, shell.active.holder, shell.active.preferred)
    effects = ask(shell, ask=9, **changes)
    assert answers(effects) == [(9, code)]
    assert happened(effects) == ["lock.switchover_refused"]
    assert told(effects) == []
    assert (shell.active.state, shell.active.holder, shell.active.preferred) == was


def test_free_lock_has_no_holder_to_hand_it_over():
    """Goal: no holder, no switchover. Method: a machine without engines, and a restarted one whose
    holder has not reconnected yet."""
    assert answers(ask(Shell())) == [(1, "lock.not_held")]
    shell = pod(B)
    again = Shell(shell.disk)
    again.feed(want(2, B, "active"))
    assert answers(ask(again)) == [(1, "lock.not_held")]


# ---------------------------------------------------------------------- other ends


@pytest.mark.parametrize("to", [None, "engine-1"])
def test_holder_that_dies_is_an_ordinary_failover(to):
    """Goal: a death while draining loses the lock as usual, and the requester is answered. Method:
    its process ends, its witness is free: the next waiter is granted, the answer is an error."""
    shell = pod(B)
    ask(shell, to=to)
    effects = shell.feed("process_gone", f"{'engine-0':0>16}")
    assert sent(effects) == []
    effects = shell.find_free(A)
    assert sent(effects) == [(2, B, 2)]
    assert answers(effects) == [(1, "lock.switchover_failed")]
    assert happened(effects)[-1] == "lock.switchover_failed"


def test_dead_target_leaves_the_queue_unchanged():
    """Goal: FIFO if the preferred engine is gone. Method: engine-2, named, dies; engine-1 is next,
    which is not what was requested; without a name, it is."""
    for to, answer in (("engine-2", "lock.switchover_failed"), (None, "engine-1")):
        shell = pod(*((B, C) if to else (C, B)))
        ask(shell, to=to)
        conn = 3 if to else 2
        shell.feed("connection_closed", conn)
        effects = give_up(shell)
        assert [incarnation for _, incarnation, _ in sent(effects)] == [B]
        assert answers(effects) == [(1, answer)]


def test_switchover_back_to_the_same_holder_is_reported():
    """Goal: a switchover without effect is not reported as a success. Method: the only standby
    dies, the old holder is relaunched and is granted again."""
    shell = pod(B)
    ask(shell)
    shell.feed("process_gone", f"{'engine-1':0>16}")
    give_up(shell)
    effects = shell.feed(want(1, A2, "active"))
    assert sent(effects) == [(1, A2, 2)]
    assert answers(effects) == [(1, "lock.switchover_failed")]
    assert not shell.machine.switchovers.under_way


def test_timeout_ends_the_wait_and_nothing_else():
    """Goal: a holder that ignores the request only delays the answer. Method: let the deadline
    pass: answered once, the holder holds, status still shows it; a second request replaces it; the
    grant ends it."""
    shell = pod(B, C)
    ask(shell, to="engine-2")
    effects: list[ev.LockEffect] = []
    for beat in range(1, 30):
        effects += shell.pass_ms(500)
        for conn in (1, 2, 3):
            effects += shell.feed("beaten", conn, beat)
    assert answers(effects) == [(1, "lock.switchover_failed")]
    assert happened(effects) == ["lock.switchover_overdue"]
    assert shell.active.state is LockState.HELD
    assert shell.machine.switchovers.under_way["active"].is_overdue
    assert shell.active.preferred == "engine-2"
    assert told(ask(shell, ask=2, to="engine-1")) == [f"{A} to engine-1"]
    effects = give_up(shell)
    assert sent(effects) == [(2, B, 2)]
    assert answers(effects) == [(2, "engine-1")]


@pytest.mark.parametrize("is_killed", [False, True])
def test_overdue_switchover_ends_with_the_next_grant_without_an_answer(is_killed):
    """Goal: an overdue switchover still takes place. Method: past the deadline the holder gives up,
    or is killed."""
    shell = pod(B)
    ask(shell, timeout_ms=100)
    shell.pass_ms(200)
    if is_killed:
        shell.feed("process_gone", f"{'engine-0':0>16}")
        effects = shell.find_free(A)
    else:
        effects = give_up(shell)
    assert sent(effects) == [(2, B, 2)]
    assert answers(effects) == []
    assert not shell.machine.switchovers.under_way


def test_holder_on_a_new_connection_is_asked_again():
    """Goal: the request is not lost with its connection. Method: cut the holder's connection; it is
    asked again once it is back, but not when it merely repeats its want; not when overdue."""
    shell = pod(B)
    ask(shell)
    assert told(shell.feed(want(1, A, "active", token=1))) == []
    shell.feed("connection_closed", 1)
    assert told(shell.feed(want(5, A, "active"))) == [f"{A} to engine-1"]
    shell.pass_ms(11_000)
    shell.feed("connection_closed", 5)
    assert told(shell.feed(want(6, A, "active"))) == []


@given(
    st.lists(st.integers(0, 5), max_size=6, unique=True),
    st.sets(st.integers(0, 5)),
    st.none() | st.integers(0, 5),
)
def test_preference_only_moves_one_to_the_front(order, silent, preferred):
    """Goal: a switchover cannot grant to a silent or absent engine, and FIFO holds among the
    others. Method: every queue, compared with the same queue without the engines that may not be
    granted."""
    lock = Lock("active")
    lock.waiters = [Waiter(f"s{n}", f"engine-{n}", f"engine-{n}-x", 0.0) for n in order]
    lock.preferred = None if preferred is None else f"engine-{preferred}"
    supervisors: Any = {f"s{n}": SimpleNamespace(is_silent=n in silent) for n in order}
    found = next_of(lock, supervisors)
    heard = [n for n in order if n not in silent]
    expected = preferred if preferred in heard else next(iter(heard), None)
    assert (found and found.engine) == (None if expected is None else f"engine-{expected}")


STEPS = st.sampled_from(
    [
        *("ask", "ask_b", "ask_c"),
        *("give_up", "free", "cut_holder", "kill_holder", "kill_b", "kill_c", "back"),
        *("beat", "time", "disk"),
    ]
)


@given(st.lists(STEPS, max_size=30))
@settings(max_examples=300, deadline=None)
def test_switchovers_never_grant_early_and_answer_once(steps):
    """Goal: whatever happens meanwhile, a switchover never grants over a living holder, and each
    request gets one answer. Method: random orders of everything; a grant comes only after the last
    holder's witness was found free, tokens grow, no request is answered twice, and in the end, once
    time has passed, every request has been answered."""
    shell = pod(B, C)
    asks: list[int] = []
    seen: list[tuple[int, str]] = []
    freed: set[str] = set()
    token, number = 1, 1

    def feed(*event: Any) -> None:
        nonlocal token
        holder = shell.active.holder
        effects = shell.feed(*event)
        seen.extend(answers(effects))
        for *_, granted in sent(effects):
            if granted > token:
                token = granted
                last = holder or shell.active.previous
                assert last is None or last.incarnation in freed

    for conn, step in enumerate(steps, 10):
        holder = shell.active.holder
        if step.startswith("ask"):
            asks.append(conn)
            to = {"ask_b": "engine-1", "ask_c": "engine-2"}.get(step)
            feed(replace(ASKED, ask=conn, to=to, timeout_ms=2000))
        elif step == "time":
            for _ in range(4):
                shell.now_ms += 250
                feed("time_passed")
        elif step == "beat":
            for each in tuple(shell.machine.supervisors.values()):
                if each.conn is not None:
                    feed("beaten", each.conn, each.progress + 1)
        elif step == "disk":
            shell.disk_error = None if shell.disk_error else "Input/output error"
        elif step == "back":
            number += 1
            for engine in ("engine-0", "engine-1", "engine-2"):
                if not any(s.engine == engine for s in shell.machine.supervisors.values()):
                    feed(want(conn, f"{engine}-{number:016x}", "active"))
                    break
        elif step in ("kill_b", "kill_c"):
            feed("process_gone", f"{'engine-1' if step == 'kill_b' else 'engine-2':0>16}")
        elif holder is not None:
            supervisor = shell.machine.supervisors.get(holder.supervisor)
            if step == "kill_holder":
                feed("process_gone", holder.supervisor)
            elif step == "cut_holder" and supervisor and supervisor.conn is not None:
                feed("connection_closed", supervisor.conn)
            elif step == "give_up" and supervisor and supervisor.conn is not None:
                feed(want(supervisor.conn, None, engine=holder.engine))
            elif step == "free" and holder.incarnation in shell.due():
                freed.add(holder.incarnation)
                feed("evidence_gone", shell.evidence(holder.incarnation))
        assert (shell.active.preferred is None) == (not shell.machine.switchovers.under_way)
    for _ in range(12):
        shell.now_ms += 250
        feed("time_passed")
    assert sorted(ask for ask, _ in seen) == asks
