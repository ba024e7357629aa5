"""Switchovers in any order of events: never granted early, and each answered once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.lock import Waiter, next_waiter
from tests.lockserver.core.shell import want
from tests.lockserver.core.switchovers import ASKED, B, C, answers, pod


@given(
    st.lists(st.integers(0, 5), max_size=6, unique=True),
    st.sets(st.integers(0, 5)),
    st.none() | st.integers(0, 5),
)
def test_preference_only_moves_one_to_the_front(order, silent, preferred):
    """Goal: a switchover cannot grant to a silent or absent engine, and FIFO holds among the
    others. Method: every queue, compared with the same queue without the engines that may not be
    granted."""
    waiters = [Waiter(f"s{n}", f"engine-{n}", f"engine-{n}-x", 0.0) for n in order]
    name = None if preferred is None else f"engine-{preferred}"
    found = next_waiter(waiters, {f"s{n}" for n in silent}, name)
    heard = [n for n in order if n not in silent]
    expected = preferred if preferred in heard else next(iter(heard), None)
    assert (found and found.engine) == (None if expected is None else f"engine-{expected}")


STEPS = st.sampled_from(
    [
        *("ask", "ask_b", "ask_c", "ask_nobody_whole"),
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

    def feed(event: ev.Input) -> None:
        nonlocal token
        holder = shell.active.holder
        effects = shell.feed(event)
        seen.extend(answers(effects))
        for grant in (e for e in effects if isinstance(e, ev.SendGrant)):
            if grant.holder.token > token:
                token = grant.holder.token
                last = holder or shell.active.previous
                assert last is None or last.incarnation in freed

    for conn, step in enumerate(steps, 10):
        holder = shell.active.holder
        if step.startswith("ask"):
            asks.append(conn)
            to = {"ask_b": "engine-1", "ask_c": "engine-2"}.get(step)
            waiting = frozenset(w.incarnation for w in shell.active.waiters)
            whole = frozenset() if step == "ask_nobody_whole" else waiting
            feed(replace(ASKED, ask=conn, to=to, whole=whole, timeout_ms=2000))
        elif step == "time":
            for _ in range(4):
                shell.now_ms += 250
                feed(ev.TimePassed())
        elif step == "beat":
            for each in tuple(shell.machine.supervisors.values()):
                if each.conn is not None:
                    feed(ev.Beaten(each.conn, each.progress + 1))
        elif step == "disk":
            shell.disk_error = None if shell.disk_error else "Input/output error"
        elif step == "back":
            number += 1
            for engine in ("engine-0", "engine-1", "engine-2"):
                if not any(s.engine == engine for s in shell.machine.supervisors.values()):
                    feed(want(conn, f"{engine}-{number:016x}", "active"))
                    break
        elif step in ("kill_b", "kill_c"):
            feed(ev.ProcessGone(f"{'engine-1' if step == 'kill_b' else 'engine-2':0>16}"))
        elif holder is not None:
            supervisor = shell.machine.supervisors.get(holder.supervisor)
            if step == "kill_holder":
                feed(ev.ProcessGone(holder.supervisor))
            elif step == "cut_holder" and supervisor and supervisor.conn is not None:
                feed(ev.ConnectionClosed(supervisor.conn))
            elif step == "give_up" and supervisor and supervisor.conn is not None:
                feed(want(supervisor.conn, None, engine=holder.engine))
            elif step == "free" and holder.incarnation in shell.due():
                freed.add(holder.incarnation)
                feed(ev.WitnessFree("active", holder.incarnation))
        assert (shell.active.preferred is None) == (not shell.machine.switchovers.under_way)
    for _ in range(12):
        shell.now_ms += 250
        feed(ev.TimePassed())
    assert sorted(ask for ask, _ in seen) == asks
