"""The lease as its member counts it; with delays, stops and cuts in tests/sim/lease."""

from __future__ import annotations

from lockserver.client.lease import SENT_MAX, LeaseKeeper, RenewedLease


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


def test_expired_lease_of_a_holder_is_not_renewed():
    """Goal: no answer makes up for a time without a lease. Method: an answer after the full length
    of the lease, without a check in between."""
    keeper = kept()
    keeper.hold()
    keeper.sent(2, 950.0)
    assert not keeper.renewed(2, 1000, 1000.0)
    assert keeper.lease == RenewedLease(0.0, 1000)
    assert keeper.must_stop(1001.0)


def test_unanswered_messages_are_bounded():
    """Goal: a server that answers nothing costs no memory, and its next answer counts. Method: send
    far more messages than are kept; answer the last one and one that was dropped."""
    keeper = LeaseKeeper()
    for number in range(1, 10 * SENT_MAX):
        keeper.sent(number, float(number))
    assert not keeper.renewed(1, 1000, 700.0)
    assert keeper.renewed(10 * SENT_MAX - 1, 1000, 700.0)
