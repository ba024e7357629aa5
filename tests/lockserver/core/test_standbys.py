"""What a holder is told of the engines behind it: in the pure machine, and each node over TCP."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lockserver.core import events as ev
from lockserver.core.lock import LockState
from lockserver.messages import StandbyMsg
from tests.lockserver.core.shell import A, B, Shell, happened, want

C = "engine-2-000000000000000c"
ENGINES = (A, B, C)


def standbys(effects) -> list[tuple[int, StandbyMsg]]:
    found = [each for each in effects if isinstance(each, ev.Send)]
    return [(each.conn, each.message) for each in found if isinstance(each.message, StandbyMsg)]


def told(effects) -> list[tuple[int, str, bool]]:
    return [(conn, each.lock, each.is_ready) for conn, each in standbys(effects)]


def continues(effects) -> list[bool]:
    return [each.continues for _, each in standbys(effects)]


def test_holder_is_told_whether_the_engine_that_is_next_can_continue_its_streams():
    """Goal: no stream is left for an engine that cannot go on with it. Method: behind a gateway,
    engines with another continuation id, the same one, and none wait behind each other; the first
    leaves, the next falls silent; the holder's own id changes."""
    shell = Shell(silent_ms=3000.0)
    shell.feed(want(1, A, "active", continuation="x"))
    assert continues(shell.feed(want(2, B, "active", continuation="y"))) == [False]
    assert continues(shell.feed(want(3, C, "active", continuation="x"))) == []
    assert continues(shell.feed(want(2, B, continuation="y"))) == [True]
    assert continues(shell.feed(want(2, B, "active", continuation="x"))) == []
    assert continues(shell.feed(want(1, A, "active", token=1))) == [False]
    again = want(1, A, "active", token=1, continuation="x")
    assert continues(shell.feed(again)) == [True]
    effects = []
    for beat in range(1, 9):
        effects += shell.feed("beaten", 1, beat) + shell.pass_ms(500)
    assert continues(effects) == [False]


def test_engine_that_a_switchover_prefers_is_the_one_whose_continuation_counts():
    """Goal: what the holder is told is about the engine that will be granted. Method: a switchover
    to the second in the queue, which has the holder's id; the first has none."""
    shell = Shell()
    shell.feed(want(1, A, "active", continuation="x"))
    shell.feed(want(2, B, "active"))
    shell.feed(want(3, C, "active", continuation="x"))
    asked = ev.SwitchOverAsked(1, 77, "active", "engine-2", 10_000)
    assert continues(shell.feed(asked)) == [True]


events = st.one_of(
    st.tuples(st.just("want"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("close"), st.integers(0, 2), st.just(False)),
    st.tuples(st.just("beat"), st.integers(0, 2), st.just(False)),
    st.tuples(st.just("pass"), st.integers(1, 40), st.just(False)),
)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.lists(events, max_size=40))
def test_last_message_to_a_connected_holder_is_true(steps):
    """Goal: no order of events leaves a holder with stale news. Method: three engines want, close,
    beat or fall silent in any order; after each step the holder's news is compared with the
    queue."""
    shell, conns, beats = Shell(silent_ms=1000.0), [0, 0, 0], 0
    opened, known = 0, {}
    for kind, number, wants in steps:
        effects = []
        if kind == "want":
            if not conns[number]:
                opened += 1
                conns[number] = opened
            effects = shell.feed(want(conns[number], ENGINES[number], *["active"][: int(wants)]))
        elif kind == "close" and conns[number]:
            effects = shell.feed("connection_closed", conns[number])
            conns[number] = 0
        elif kind == "beat" and conns[number]:
            beats += 1
            effects = shell.feed("beaten", conns[number], beats)
        elif kind == "pass":
            effects = shell.pass_ms(100 * number)
        known.update({conn: is_ready for conn, _, is_ready in told(effects)})
        lock, supervisors = shell.active, shell.machine.supervisors
        if lock.state is LockState.HELD:
            conn = supervisors[lock.holder.supervisor].conn
            heard = [w for w in lock.waiters if not supervisors[w.supervisor].is_silent]
            assert known[conn] == bool(heard)


def announced(effects) -> list[tuple[str, int, bool]]:
    found = [each.message for each in effects if isinstance(each, ev.Announce)]
    return [(each.lock, each.token, each.is_leaving) for each in found]


def news(effects) -> list[tuple[int, bool, bool]]:
    return [(conn, each.is_ready, each.is_settled) for conn, each in standbys(effects)]


def test_holder_that_was_told_to_end_has_a_standby_only_in_an_engine_that_vouches_for_it():
    """Goal: a want from before the order proves nothing. Method: the holder leaves while another
    engine waits; that one vouches for an older grant, then for this one; then it leaves, too."""
    shell = Shell()
    shell.feed(want(1, A, "active"))
    assert news(shell.feed(want(2, B, "active"))) == [(1, True, False)]
    leaves = want(1, A, "active", token=1, is_leaving=True)
    effects = shell.feed(leaves)
    assert announced(effects) == [("active", 1, True)]
    assert happened(effects) == ["lock.told_to_end"]
    assert news(effects) == [(1, False, False)]
    assert announced(shell.feed(leaves)) == []  # it is said once
    assert news(shell.feed(want(2, B, "active", succeeds=7))) == []
    assert news(shell.feed(want(2, B, "active", succeeds=1))) == [(1, True, True)]
    assert news(shell.feed(want(2, B, "active", succeeds=1, is_leaving=True))) == [(1, False, True)]
