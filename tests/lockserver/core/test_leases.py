"""Leases by incarnation: what renews one, what ends one, and what its end proves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockserver.core.events import Holder, LeaseTerms, MemberId
from lockserver.core.evidence import STALL_MS
from lockserver.core.names import WitnessFile
from lockserver.members.leases import SPENT_MAX, Leases

A = MemberId("a" * 16, "engine-0-000000000000000a")
B = MemberId("b" * 16, "engine-0-000000000000000b")
BOTH = LeaseTerms(5000, (A, B))
SPAN_MS = 6000.0  # 5000 and a margin of 1000


class Timed:
    """Leases under a clock that ticks as a running server's does, or jumps as a stopped one's."""

    def __init__(self, **options) -> None:
        self.now_ms = 0.0
        self.leases = Leases(0.0, lease_ms=5000, margin_ms=1000, **options)

    def renew(self, who=A, claims=()):
        return self.leases.renew("engine-0", 0 if who is A else 1, who, claims, self.now_ms)

    def pass_ms(self, ms):
        """The incarnations whose lease expired, and when."""
        over = []
        for _ in range(round(ms / 100)):
            self.now_ms += 100
            over += [(x.id.incarnation, self.now_ms) for x in self.leases.tick(self.now_ms)]
        return over

    def stall_ms(self, ms):
        self.now_ms += ms
        return self.leases.tick(self.now_ms)

    def is_alive(self, who=A):
        return who.incarnation in self.leases.alive


def nothing(t):
    """No event at all."""


EVENTS = {
    "nothing": (nothing, None),
    "renewed": (lambda t: t.renew(), SPAN_MS),
    "renewed by a claim": (lambda t: t.renew(claims=("active",)), SPAN_MS),
    "ended": (lambda t: t.leases.end(A.incarnation), 0.0),
    "spent": (lambda t: t.leases.spend(A.incarnation, 1, "lost"), None),
    "ended and back": (lambda t: (t.leases.end(A.incarnation), t.renew()), SPAN_MS),
    "on file": (lambda t: t.leases.presume("engine-0", LeaseTerms(9000, (A,)), t.now_ms), 10_000.0),
    "a stall": (lambda t: t.stall_ms(STALL_MS + 1), SPAN_MS),
    "a short pause": (lambda t: t.stall_ms(STALL_MS), None),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(EVENTS, EVENTS)))
def test_lease_is_valid_for_its_span_after_the_last_renewal(first, second):
    """Goal: the end of a lease after any two events. Method: a lease; both events, 1000 ms apart;
    then time passes, and it expires exactly when the table says."""
    timed = Timed()
    timed.renew()
    expires_ms, span_ms, dead = SPAN_MS, SPAN_MS, False
    for name in (first, second):
        timed.pass_ms(1000)
        act, lives_ms = EVENTS[name]
        act(timed)
        if name in ("ended and back", "on file"):
            span_ms = lives_ms  # born anew: under the terms of now, or of the file
        if lives_ms is None or (name == "a stall" and dead):
            continue
        dead = lives_ms == 0.0
        span_ms = SPAN_MS if dead else span_ms
        expires_ms = timed.now_ms + (0.0 if dead else span_ms)
    assert timed.is_alive() is not dead
    over = timed.pass_ms(20_000)
    expected = [] if dead else [A.incarnation]
    assert [who for who, _ in over] == expected
    assert all(expires_ms <= at_ms < expires_ms + 100 for _, at_ms in over)
    assert not timed.is_alive()


def test_lease_expires_in_a_tick_and_nowhere_else():
    """Goal: a server that was stopped does not expire members it could not receive from. Method:
    look at a lease long after its end, before the first tick, and after one that comes late."""
    timed = Timed()
    timed.renew()
    timed.now_ms += 60_000
    assert timed.is_alive()
    assert timed.leases.tick(timed.now_ms) == []
    assert timed.is_alive()
    assert [who for who, _ in timed.pass_ms(6000)] == [A.incarnation]


def test_lease_on_file_keeps_the_length_that_its_member_was_sent():
    """Goal: a restart with a shorter lease waits no less. Method: 9000 ms on file, 5000 now; the
    member sends one message, and then no more."""
    timed = Timed()
    timed.leases.presume("engine-0", LeaseTerms(9000, (A,)), 0.0)
    timed.pass_ms(500)
    assert timed.renew().lease_ms == 9000
    assert timed.pass_ms(20_000) == [(A.incarnation, 10_500.0)]
    assert timed.renew().lease_ms == 5000  # what comes later is a new lease


def test_group_is_free_when_the_last_member_is_gone_and_complete_while_none_is():
    """Goal: the count of members. Method: every set of living members of two."""
    for alive in ((), (A,), (B,), (A, B)):
        timed = Timed()
        for who in alive:
            timed.renew(who)
        assert timed.leases.is_whole(BOTH) is (len(alive) == 2)
        assert timed.leases.is_free(BOTH) is (not alive)


def test_sealed_incarnations_stay_over_and_keep_the_first_reason():
    """Goal: an incarnation found free can never be part of a group again. Method: seal, renew, seal
    again."""
    timed = Timed()
    timed.leases.spend(A.incarnation, 1, "lost")
    timed.leases.seal(BOTH)
    timed.renew()
    assert timed.leases.spent(A.incarnation).reason == "lost"
    assert timed.leases.spent(B.incarnation).member == 1
    assert timed.leases.spent(None) is None


def test_spent_incarnations_are_remembered_up_to_a_limit_the_oldest_go():
    """Goal: bounded memory. Method: one more than the limit."""
    leases = Leases(0.0)
    for number in range(SPENT_MAX + 1):
        leases.spend(f"engine-0-{number:016x}", 0, "lost")
    assert leases.spent(f"engine-0-{0:016x}") is None
    assert leases.spent(f"engine-0-{1:016x}") is not None


def test_remaining_time_covers_living_members():
    """Goal: operators see how long a wait may last. Method: one member of two, half a lease
    later."""
    timed = Timed()
    timed.renew(B)
    timed.pass_ms(2500)
    assert timed.leases.remaining_ms(BOTH, timed.now_ms) == {1: 3500.0}


@given(
    st.lists(
        st.one_of(st.sampled_from(["renew", "end"]), st.integers(0, 12_000)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 60_000),
    st.integers(0, 10_000),
)
def test_lease_never_expires_before_its_span_after_the_last_message(script, lease_ms, margin_ms):
    """Goal: however time passes, no lease that was not ended expires early. Method: random
    renewals, ends and waits, in ticks or in one leap."""
    leases = Leases(0.0, lease_ms=lease_ms, margin_ms=margin_ms)
    now_ms, heard_ms = 0.0, None
    for step in script:
        if step == "renew":
            leases.renew("engine-0", 0, A, (), now_ms)
            heard_ms = now_ms
        elif step == "end":
            leases.end(A.incarnation)
            heard_ms = None
        else:
            now_ms += step
            for lease in leases.tick(now_ms):
                assert heard_ms is not None
                assert lease.id == A
                assert now_ms - heard_ms >= lease_ms + margin_ms
                heard_ms = None
        assert (A.incarnation in leases.alive) == (heard_ms is not None)


# ---------------------------------------------------------------------- on disk


def test_terms_on_file_are_read_as_they_were_written():
    """Goal: a restart knows which members to wait for. Method: write and read back."""
    holder = Holder("engine-0", A.incarnation, A.supervisor, WitnessFile("w", 0, 0), 7, 1.5, BOTH)
    assert Holder.from_dict(holder.to_dict()) == holder
    assert "lease" not in Holder("e", "i", "s", WitnessFile("w", 1, 2), 7, 1.5).to_dict()


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"ms": 5000},
        {"ms": 0, "members": ["a" * 32]},
        {"ms": 5000, "members": []},
        {"ms": 5000, "members": ["a" * 32] * 17},
        {"ms": 5000, "members": ["a" * 31]},
        {"ms": 5000, "members": ["z" * 32]},
        {"ms": "long", "members": ["a" * 32]},
        {"ms": 5000, "members": 3},
    ],
)
def test_malformed_terms_are_refused(raw):
    """Goal: a damaged record is not half believed. Method: each way to be malformed."""
    with pytest.raises((KeyError, TypeError, ValueError)):
        LeaseTerms.from_dict(raw, "engine-0")
