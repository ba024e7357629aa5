"""What the owner of KV memory grants, refuses, keeps and discards, scenario by scenario."""

from __future__ import annotations

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core.events import Claimant, Closed, DeadlinePassed, Received
from gms.core.kv import FULL_RETRY_MS
from gms.core.snapshot import kv_snapshot
from plumbing.errors import UnderstudyError
from tests.gms.kv.desk import INDEX, SIZE, WAIT_MS, Desk, hand_back, of, refused


def test_processes_of_one_engine_share_one_pool_that_is_made_at_the_first_claim():
    """Goal: memory at the first claim only, one for all of an incarnation. Method: two sessions
    before it is made, one after."""
    desk = Desk()
    assert desk.effects == []
    desk.borrow(1)
    desk.borrow(2)
    pool = desk.make()
    for session in (1, 2):
        assert desk.last_to(session).pool == pool
        assert desk.take(session) == ev.SendRegion(session, 2, pool, is_fresh=True)
    desk.mark(1, msg.BEGUN)
    desk.borrow(3)
    assert desk.take(3).is_fresh is False
    assert [each.TYPE for each in (desk.machine.all_holders[0].request,)] == ["borrow_pool"]


def test_wait_ends_at_its_deadline_and_names_the_holder():
    desk = Desk()
    desk.hold(1)
    desk.borrow(2, token=2)
    assert desk.machine.next_deadline_ms() == WAIT_MS
    desk.now_ms = WAIT_MS
    desk.tell(DeadlinePassed())
    error = desk.last_to(2)
    assert error.code == "gms.kv_busy"
    assert "engine-1 (token 1, pid 101)" in error.message
    assert desk.machine.next_deadline_ms() is None


@pytest.mark.parametrize(
    ("known", "token", "incarnation", "is_stale"),
    [
        (5, 4, "i-4", True),
        (5, 5, "i-5", False),  # the same again
        (5, 5, "another", True),  # no two grants have one token
        (5, 6, "i-6", False),
    ],
)
def test_older_token_of_an_era_is_refused(known, token, incarnation, is_stale):
    """Goal: an engine that lost the lock gets no memory, also not from a restarted server."""
    newest = [Claimant(f"engine-{known}", f"i-{known}", known, "e")]
    desk = Desk(newest=newest)
    claim = msg.BorrowPoolMsg("e", incarnation, token, "e", SIZE, INDEX, WAIT_MS)
    if token == known and not is_stale:
        claim = msg.BorrowPoolMsg(f"engine-{known}", incarnation, token, "e", SIZE, INDEX, WAIT_MS)
    if is_stale:
        assert refused(desk, Received(1, 1, claim)).code == "gms.kv_stale_token"
        assert desk.machine.stale_refusals_total == 1
    else:
        of(desk.tell(Received(1, 1, claim)), ev.MakePool)


def test_tokens_of_another_era_do_not_compare_and_each_era_is_remembered():
    desk = Desk()
    desk.borrow(1, token=9, era="old")
    desk.borrow(2, token=1, era="new")
    assert desk.last_to(2).TYPE == "waiting"
    stale = msg.BorrowPoolMsg("e", "i", 8, "old", SIZE, INDEX, WAIT_MS)
    assert refused(desk, Received(3, 1, stale)).code == "gms.kv_stale_token"


def test_newer_claim_ends_the_wait_of_an_older_one():
    desk = Desk()
    desk.hold(1)
    desk.borrow(2, token=2)
    desk.borrow(3, token=3)
    assert desk.last_to(2).code == "gms.kv_stale_token"
    assert desk.last_to(3).TYPE == "waiting"


def test_content_that_two_engines_died_of_is_discarded():
    """Goal: a poisoned cache must not kill every successor; an adoption that succeeded counts as
    a new beginning. Method: deaths between `adopting` and `adopted`."""
    desk = Desk()
    pool = desk.hold(1)
    desk.mark(1, msg.BEGUN)
    desk.tell(Closed(1))
    for token, marks in ((2, ()), (3, (msg.ADOPTED,)), (4, ()), (5, ())):
        assert desk.machine.discards_total == 0
        desk.borrow(token, token)
        desk.tell(ev.RegionFree(pool))
        desk.take(token)
        desk.mark(token, msg.ADOPTING, *marks)
        desk.tell(Closed(token))
    assert "2 engines in a row" in desk.machine.regions[pool].discarded


def test_full_device_is_tried_again_until_the_deadline():
    desk = Desk()
    full = UnderstudyError("gms.device_full", "4096 bytes are needed and 0 are free", free_bytes=0)
    desk.borrow(1)
    desk.make(full)
    assert desk.last_to(1).reason == "gms.device_full"
    desk.now_ms = FULL_RETRY_MS
    assert desk.machine.next_deadline_ms() == FULL_RETRY_MS
    of(desk.tell(DeadlinePassed()), ev.MakePool)
    desk.make(full)
    desk.now_ms = WAIT_MS
    desk.tell(DeadlinePassed())
    assert desk.last_to(1).code == "gms.device_full"
    assert desk.machine.full_waits_total == 1


def test_driver_that_fails_costs_those_who_wait_and_nothing_else():
    desk = Desk()
    desk.borrow(1)
    desk.make(UnderstudyError("gms.driver_failed", "no"))
    assert desk.last_to(1).code == "gms.driver_failed"
    desk.borrow(2, token=2)
    desk.make()
    assert isinstance(desk.last_to(2), msg.PoolGrantedMsg)


def test_bad_survivor_costs_itself_and_the_next_one_is_asked():
    desk = Desk(orphans={"p": False})
    desk.tell(Received(1, 1, hand_back("p", mark=msg.BEGUN)))
    desk.tell(Received(2, 1, hand_back("p", mark=msg.BEGUN)))
    bad = UnderstudyError("gms.bad_slab", "no")
    assert of(desk.done(ev.TakeBack, error=bad)[1], ev.TakeBack).session == 2
    assert desk.last_to(1) is bad
    desk.done(ev.TakeBack)
    assert desk.last_to(2) == msg.KeptMsg("p")


@pytest.mark.parametrize("is_marked", [False, True])
def test_discard_outlives_the_server(is_marked):
    """Goal: a restart brings no bad content back. Method: the survivor repeats it, or the file
    says so."""
    desk = Desk(orphans={"p": is_marked})
    why = "" if is_marked else "canary"
    desk.tell(Received(1, 1, hand_back("p", mark=msg.BEGUN, discarded=why)))
    desk.tell(Closed(1))  # before the driver has checked it
    desk.done(ev.TakeBack)
    of(desk.tell(ev.RegionFree("p")), ev.Release)


def test_survivor_of_an_unknown_pool_or_of_other_sizes_is_refused():
    desk = Desk(orphans={"p": False})
    assert refused(desk, Received(1, 1, hand_back("q"))).code == "gms.kv_pool_gone"
    odd = hand_back("p", slabs=(SIZE // 2,))
    assert refused(desk, Received(1, 1, odd)).code == "gms.bad_offer"


def test_nobody_takes_before_a_grant():
    desk = Desk()
    assert refused(desk, Received(1, 1, msg.TakeMsg())).code == "gms.not_attached"
    desk.borrow(1)
    assert refused(desk, Received(1, 1, msg.TakeMsg())).code == "gms.unexpected_message"


def test_two_living_engines_hand_the_pool_to_and_fro():
    """Goal: a lease that was returned, and a free file, are all that a successor needs; also the
    engine that had it before, under its next token. Method: one incarnation under tokens 1 and 3,
    another under 2; nothing dies."""
    desk = Desk()
    pool = desk.hold(1)
    desk.mark(1, msg.BEGUN)
    for session, token, incarnation in ((2, 2, "i-2"), (3, 3, "i-1")):
        desk.tell(Closed(session - 1))
        desk.borrow(session, token, incarnation=incarnation)
        assert desk.last_to(session).reason == "gms.kv_busy"  # until the kernel has spoken
        desk.tell(ev.RegionFree(pool))
        assert desk.take(session) == ev.SendRegion(session, 2, pool, is_fresh=False)
        desk.mark(session, msg.ADOPTING, msg.ADOPTED)
    assert desk.machine.regions[pool].failed_adoptions == 0
    assert (desk.machine.made_total, desk.machine.lent_total) == (1, 3)


# ---------------------------------------------------------------------- freed on purpose


def test_operator_drops_a_pool_that_no_engine_uses():
    """Goal: idle memory can be had back, and only idle memory. Method: ask while there is none,
    while it is lent, while it is promised, and when it is idle."""
    desk = Desk()
    drop = Received(9, 1, msg.DropPoolMsg())
    assert refused(desk, drop).code == "gms.no_kv_pool"
    pool = desk.hold(1)
    held = refused(desk, drop)
    assert (held.code, "lent to engine-1 (token 1, pid 101)" in held.message) == ("gms.kv_held", 1)
    desk.borrow(2, token=2)
    desk.tell(Closed(1))
    held = refused(desk, drop)
    assert (held.code, "being lent to engine-2" in held.message) == ("gms.kv_held", True)
    desk.tell(Closed(2))
    desk.tell(drop)
    assert desk.last_to(9) == msg.PoolDroppedMsg(pool, SIZE + INDEX)
    assert of(desk.tell(ev.RegionFree(pool)), ev.Release).region == pool
    assert refused(desk, drop).code == "gms.kv_releasing"
    desk.done(ev.Release)
    desk.borrow(3, token=3)
    assert desk.make() != pool


def test_pool_that_is_being_made_is_not_called_dropped():
    """Method: whoever asked for it leaves before the driver has made it."""
    desk = Desk()
    desk.borrow(1)
    desk.tell(Closed(1))
    drop = Received(9, 1, msg.DropPoolMsg())
    assert refused(desk, drop).code == "gms.kv_making"
    pool = desk.make()
    desk.tell(drop)
    assert desk.last_to(9) == msg.PoolDroppedMsg(pool, SIZE + INDEX)


def test_engine_that_rests_gives_the_memory_up_and_hears_when_it_is_free():
    """Goal: freed only when no process maps it, and said only then. Method: two processes of one
    engine, of which one gives up while the other still holds; then it claims again."""
    desk = Desk()
    pool = desk.hold(1)
    desk.borrow(2)
    desk.take(2)
    give_up = msg.GiveUpMsg(WAIT_MS)
    assert of(desk.tell(Received(1, 5, give_up)), ev.MarkRetired).region == pool
    desk.borrow(3)
    assert desk.last_to(3).reason == "gms.kv_busy"
    assert of(desk.tell(Closed(2)), ev.Watch).region == pool
    assert of(desk.tell(ev.RegionFree(pool)), ev.Release).region == pool
    assert kv_snapshot(desk.machine, str)["sessions"][0]["state"] == "leaving"
    made = of(desk.done(ev.Release)[1], ev.MakePool).region
    assert desk.last_to(1) == msg.PoolFreedMsg(pool, SIZE + INDEX)
    assert made != pool
    assert desk.machine.given_up_total == 1
    assert desk.machine.discards_total == 0


def test_memory_that_is_not_free_in_time_is_refused_to_whom_gave_it_up():
    desk = Desk()
    pool = desk.hold(1)
    desk.borrow(2)
    desk.take(2)
    desk.tell(Received(1, 5, msg.GiveUpMsg(WAIT_MS)))
    assert desk.machine.next_deadline_ms() == WAIT_MS
    desk.now_ms = WAIT_MS
    desk.tell(DeadlinePassed())
    assert desk.last_to(1).code == "gms.kv_busy"
    assert desk.machine.next_deadline_ms() is None
    desk.tell(Closed(1))
    desk.tell(Closed(2))
    of(desk.tell(ev.RegionFree(pool)), ev.Release)  # it is freed all the same
