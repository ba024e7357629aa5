"""The lease as its member counts it; with delays, stops and cuts in tests/sim/lease."""

from __future__ import annotations

import pytest

from lockserver.client.client import FENCED
from lockserver.client.lease import SENT_MAX, LeaseKeeper, RenewedLease
from lockserver.core.lock import KINDS


def kept(lease_ms: int = 1000, sent_ms: float = 0.0) -> LeaseKeeper:
    keeper = LeaseKeeper()
    keeper.sent(1, sent_ms)
    assert keeper.renewed(1, lease_ms, sent_ms + 5)
    return keeper


def test_lease_counts_from_its_request():
    """Goal: the time of the answer does not count. Method: an answer that takes half the lease."""
    keeper = LeaseKeeper()
    keeper.sent(1, 100.0)
    assert not keeper.may_act(100.0)
    assert keeper.renewed(1, 1000, 600.0)
    assert keeper.lease == RenewedLease(100.0, 1000)
    assert (keeper.lease.stop_at_ms, keeper.lease.kill_at_ms) == (700.0, 900.0)
    assert keeper.lease.valid_until_ms == 1100.0
    assert keeper.may_act(699.0)
    assert not keeper.may_act(700.0)
    assert (keeper.valid_for_ms(650.0), keeper.valid_for_ms(800.0)) == (50.0, 0.0)


@pytest.mark.parametrize("progress", [0, 2, 3])
def test_answer_to_a_message_never_sent_renews_nothing(progress):
    """Goal: only an answer to something that was sent counts. Method: other numbers."""
    keeper = LeaseKeeper()
    keeper.sent(1, 0.0)
    assert not keeper.renewed(progress, 1000, 1.0)
    assert keeper.lease is None


def test_an_answer_counts_once_and_supersedes_older_ones():
    """Goal: duplicate or late answers change nothing. Method: answer the second message, then the
    first, then the second again."""
    keeper = LeaseKeeper()
    keeper.sent(1, 0.0)
    keeper.sent(2, 100.0)
    assert keeper.renewed(2, 1000, 150.0)
    assert not keeper.renewed(1, 1000, 160.0)
    assert not keeper.renewed(2, 1000, 170.0)
    assert keeper.lease == RenewedLease(100.0, 1000)


def test_answers_for_a_cut_connection_or_an_older_incarnation_do_not_count():
    """Goal: an answer renews the lease only for the incarnation that was named, and only on its own
    connection. Method: cut, or begin anew, between the message and its answer."""
    for forget in (LeaseKeeper.cut, LeaseKeeper.begin):
        keeper = LeaseKeeper()
        keeper.sent(1, 0.0)
        forget(keeper)
        assert not keeper.renewed(1, 1000, 1.0)


def test_a_cut_leaves_the_lease_and_another_incarnation_ends_it():
    """Goal: a client may reconnect within its lease. Method: cut, then begin."""
    keeper = kept()
    keeper.hold()
    keeper.cut()
    assert keeper.may_act(100.0)
    keeper.begin()
    assert not keeper.may_act(100.0)
    assert not keeper.is_held
    assert not keeper.must_stop(10_000.0)


def test_only_a_holder_must_stop():
    """Goal: an unreachable standby has nothing to stop. Method: the same silence with and without a
    lock."""
    keeper = kept()
    assert not keeper.must_stop(5000.0)
    keeper = kept()
    keeper.hold()
    assert not keeper.must_stop(599.0)
    assert keeper.must_stop(600.0)
    assert keeper.must_stop(0.0), "once lost, it stays lost"
    assert keeper.valid_for_ms(0.0) == 0.0


def test_answers_while_the_tree_is_reaped_keep_the_supervisor_alive():
    """Goal: after a loss at 60 %, an answer before the lease expires extends the kernel's timer but
    does not undo the loss. Method: an answer at 70 %."""
    keeper = kept()
    keeper.hold()
    keeper.sent(2, 500.0)
    assert keeper.must_stop(600.0)
    assert keeper.renewed(2, 1000, 700.0)
    assert keeper.lease == RenewedLease(500.0, 1000)
    assert keeper.must_stop(701.0)
    assert not keeper.may_act(701.0)


def test_expired_lease_of_a_holder_is_not_renewed():
    """Goal: no answer makes up for a time without a lease. Method: an answer after the full length
    of the lease, without a check in between."""
    keeper = kept()
    keeper.hold()
    keeper.sent(2, 950.0)
    assert not keeper.renewed(2, 1000, 1000.0)
    assert keeper.lease == RenewedLease(0.0, 1000)
    assert keeper.must_stop(1001.0)


def test_expired_lease_of_a_waiter_is_renewed():
    """Goal: a standby that was unreachable for a long time may be granted the lock again. Method:
    an answer long after the lease expired, with no lock held."""
    keeper = kept()
    keeper.sent(2, 9000.0)
    assert not keeper.may_act(9005.0)
    assert keeper.renewed(2, 1000, 9010.0)
    assert keeper.may_act(9010.0)


def test_unanswered_messages_are_bounded():
    """Goal: a server that answers nothing costs no memory, and its next answer counts. Method: send
    far more messages than are kept; answer the last one and one that was dropped."""
    keeper = LeaseKeeper()
    for number in range(1, 10 * SENT_MAX):
        keeper.sent(number, float(number))
    assert not keeper.renewed(1, 1000, 700.0)
    assert keeper.renewed(10 * SENT_MAX - 1, 1000, 700.0)


def test_client_and_machine_agree_on_the_fenced_locks():
    """Goal: client and server agree on which locks a lease protects. Method: compare."""
    assert {name for name, is_fenced in KINDS.items() if is_fenced} == FENCED
