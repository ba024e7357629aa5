"""Leases: what renews one, what ends one, and what its end proves to the machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.leases import Leases
from lockserver.core.lock import LockState
from lockserver.core.supervisors import LEASE
from lockserver.messages import RenewedMsg
from tests.lockserver.core.shell import A2, A, B, Shell, happened, messages, refused, sent
from tests.lockserver.core.shell import want as want_of

SPAN_MS = 6000  # 5000 and a margin of 1000
OTHER = "f" * 16
WHO = "engine-0", f"{'engine-0':0>16}", A


class Timed(Shell):
    """A machine with leases."""

    def __init__(self, record=None, *, lease_ms=5000, listens=False):
        leases = Leases(0.0, lease_ms=lease_ms, margin_ms=1000, listens=listens)
        super().__init__(record, leases=leases)
        self.progress = 0

    def want(self, conn, incarnation, *locks, **fields):
        self.progress += 1
        progress = fields.pop("progress", self.progress)
        event = want_of(conn, incarnation, *locks, pid=0, process=LEASE, **fields)
        msg = replace(event.msg, progress=progress)
        return self.feed(replace(event, msg=msg, witness_file=None))

    def beat_for(self, ms, *conns):
        done = []
        for _ in range(round(ms / 500)):
            done += self.pass_ms(500)
            for conn in conns:
                self.progress += 1
                done += self.feed("beaten", conn, self.progress)
        return done


@pytest.fixture
def held():
    """engine-0 holds with token 1, on connection 1; engine-1 waits, on connection 2."""
    timed = Timed()
    timed.want(1, A, "active")
    timed.want(1, A, "active", token=1)
    timed.want(2, B, "active")
    assert timed.active.holder.incarnation == A
    return timed


@given(
    st.lists(
        st.one_of(st.sampled_from(["renew", "end"]), st.integers(0, 12_000)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 60_000),
    st.integers(0, 10_000),
)
def test_lease_expires_in_a_tick_and_never_before_its_span(script, lease_ms, margin_ms):
    """Goal: however time passes, no lease that was not ended expires early, and none is kept for
    longer than that. Method: random renewals, ends and waits, in ticks or in one leap."""
    leases = Leases(0.0, lease_ms=lease_ms, margin_ms=margin_ms)
    now_ms, until_ms = 0.0, None
    for step in script:
        if step == "renew":
            leases.renew(*WHO, now_ms)
            until_ms = now_ms + lease_ms + margin_ms
        elif step == "end":
            leases.renew(*WHO[:2], None, now_ms)
            until_ms = None
        else:
            now_ms += step
            assert (A in leases.valid) == (until_ms is not None), "only a tick ends it"
            is_stalled = step > 10_000
            if is_stalled and until_ms is not None:
                until_ms = now_ms + lease_ms + margin_ms
            expired = leases.tick(now_ms, is_stalled=is_stalled)
            assert bool(expired) == (until_ms is not None and now_ms >= until_ms)
            until_ms = None if expired else until_ms


def test_lease_on_file_keeps_the_length_that_its_engine_was_sent(held):
    """Method: 5000 ms on file, 1000 now; the engine sends one message, and then no more."""
    timed = Timed(held.disk, lease_ms=1000)
    timed.pass_ms(2000)
    answer = timed.want(1, A, "active", token=1)
    assert [each.lease_ms for each in messages(answer, RenewedMsg)] == [5000]
    timed.pass_ms(SPAN_MS - 100)
    assert timed.active.holder.incarnation == A
    timed.pass_ms(100)
    assert timed.active.holder is None


def test_holder_that_is_cut_keeps_the_lock_until_its_lease_has_expired(held):
    """Goal: a lost connection proves nothing; time does. Method: cut it; back within the lease it
    has the same grant; cut for longer, the next one has it, and a late claim is refused."""
    held.feed("connection_closed", 1)
    held.beat_for(SPAN_MS - 500, 2)
    assert held.active.state is LockState.RELEASING
    assert sent(held.want(3, A, "active", token=1)) == [(3, A, 1)]
    held.feed("connection_closed", 3)
    done = held.beat_for(SPAN_MS, 2)
    assert "lock.lease_expired" in happened(done)
    assert (2, B, 2) in sent(done)
    assert refused(held.want(4, A, "active", token=1)) == ["lock.stale_claim"]


def test_another_supervisor_is_refused_until_the_lease_expires(held):
    """Goal: an engine that is lost for good can be replaced, and is told the time."""
    held.feed("connection_closed", 1)
    (refusal, *_) = held.want(3, A2, "active", supervisor=OTHER)
    assert (refusal.code, refusal.details["left_ms"]) == ("lock.engine_id_taken", SPAN_MS)
    held.beat_for(SPAN_MS, 2)
    assert refused(held.want(3, A2, "active", supervisor=OTHER)) == []


def test_silent_connection_is_closed_and_an_engine_without_a_lease_is_forgotten():
    """Goal: half-open connections end, and nothing is kept of who is gone. Method: silence."""
    timed = Timed()
    timed.want(1, None, engine="engine-0")
    closed = [e.conn for e in timed.pass_ms(4000) if isinstance(e, ev.Close)]
    assert closed == [1]
    timed.feed("connection_closed", 1)
    assert timed.machine.supervisors == {}


def test_over_tcp_nothing_is_handed_over_in_place(held):
    """Goal: no file proves that it stopped. Method: say so."""
    over = {"active": 1}
    assert refused(held.want(1, A, "active", over=over)) == ["lock.bad_want"]


def test_holder_that_is_cut_for_long_is_reported_with_what_is_left_of_its_lease():
    """Goal: an operator sees why the lock waits. Method: a lease that outlasts the patience."""
    timed = Timed(lease_ms=60_000)
    timed.want(1, A, "active")
    timed.feed("connection_closed", 1)
    done = timed.pass_ms(30_000)
    assert happened(done).count("lock.waiting_evidence") == 1
    leases = timed.machine.leases
    assert leases.left_ms(A, timed.now_ms) == 61_000 - 30_000
    assert leases.left_ms(B, timed.now_ms) is None


def test_stalled_server_believes_every_lease_anew():
    """Goal: what arrived while this server could not receive counts. Method: a stall of longer than
    a lease, after a start at which engines may live that have not connected."""
    timed = Timed(listens=True)
    timed.want(1, A, "active")
    timed.now_ms += 2 * SPAN_MS
    assert "lock.lease_expired" not in happened(timed.feed("time_passed"))
    assert timed.machine.leases.may_have_strangers
