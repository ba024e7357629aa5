"""What the owner of KV memory grants, refuses, keeps and discards, scenario by scenario."""

from __future__ import annotations

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core.events import Claimant, Received
from gms.core.kv import FULL_RETRY_MS
from plumbing.errors import UnderstudyError
from tests.gms.kv.desk import INDEX, SIZE, WAIT_MS, Desk, hand_back, of, refused


def test_wait_ends_at_its_deadline_and_names_the_holder():
    desk = Desk()
    desk.hold(1)
    desk.borrow(2, token=2)
    assert desk.machine.next_deadline_ms() == WAIT_MS
    desk.now_ms = WAIT_MS
    desk.tell("deadline_passed")
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


def test_content_that_two_engines_died_of_is_discarded():
    """Goal: a poisoned cache must not kill every successor; an adoption that succeeded counts as
    a new beginning. Method: deaths between `adopting` and `adopted`."""
    desk = Desk()
    pool = desk.hold(1)
    desk.mark(1, msg.BEGUN)
    desk.tell("closed", 1)
    for token, marks in ((2, ()), (3, (msg.ADOPTED,)), (4, ()), (5, ())):
        assert desk.machine.discards_total == 0
        desk.borrow(token, token)
        desk.tell("region_free", pool)
        desk.take(token)
        desk.mark(token, msg.ADOPTING, *marks)
        desk.tell("closed", token)
    assert "2 engines in a row" in desk.machine.regions[pool].discarded


def test_full_device_is_tried_again_until_the_deadline():
    desk = Desk()
    full = UnderstudyError("gms.device_full", "4096 bytes are needed and 0 are free", free_bytes=0)
    desk.borrow(1)
    desk.make(full)
    assert desk.last_to(1).reason == "gms.device_full"
    desk.now_ms = FULL_RETRY_MS
    assert desk.machine.next_deadline_ms() == FULL_RETRY_MS
    of(desk.tell("deadline_passed"), ev.MakePool)
    desk.make(full)
    desk.now_ms = WAIT_MS
    desk.tell("deadline_passed")
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


# ---------------------------------------------------------------------- freed on purpose


def test_operator_drops_a_pool_that_no_engine_uses():
    """Goal: idle memory can be had back, and only idle memory. Method: ask while there is none,
    while it is lent, while it is promised, and when it is idle."""
    desk = Desk()
    drop = Received(9, 1, msg.DropMsg(is_kv=True))
    assert refused(desk, drop).code == "gms.no_kv_pool"
    pool = desk.hold(1)
    held = refused(desk, drop)
    assert (held.code, "lent to engine-1 (token 1, pid 101)" in held.message) == ("gms.kv_held", 1)
    desk.borrow(2, token=2)
    desk.tell("closed", 1)
    held = refused(desk, drop)
    assert (held.code, "being lent to engine-2" in held.message) == ("gms.kv_held", True)
    desk.tell("closed", 2)
    desk.tell(drop)
    assert desk.last_to(9) == msg.DroppedMsg(pool, size_bytes=SIZE + INDEX)
    assert of(desk.tell("region_free", pool), ev.Release).region == pool
    assert refused(desk, drop).code == "gms.kv_releasing"
    desk.done(ev.Release)
    desk.borrow(3, token=3)
    assert desk.make() != pool
