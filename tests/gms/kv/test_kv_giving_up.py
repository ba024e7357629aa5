"""Who may free KV memory: an operator while no engine uses it, and the engine that borrowed it
last."""

from __future__ import annotations

from gms import kv_messages as msg
from gms.core import kv_events as ev
from gms.core.events import Closed, DeadlinePassed, Received
from gms.core.kv_machine import kv_snapshot
from tests.gms.kv.desk import INDEX, SIZE, WAIT_MS, Desk, of, refused


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
    assert of(desk.tell(ev.PoolFree(pool)), ev.ReleasePool).pool == pool
    assert refused(desk, drop).code == "gms.kv_releasing"
    desk.tell(ev.PoolReleased(pool))
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
    assert of(desk.tell(Received(1, 5, give_up)), ev.MarkDiscarded).pool == pool
    desk.borrow(3)
    assert desk.last_to(3).reason == "gms.kv_busy"
    assert of(desk.tell(Closed(2)), ev.WatchPool).pool == pool
    assert of(desk.tell(ev.PoolFree(pool)), ev.ReleasePool).pool == pool
    assert kv_snapshot(desk.machine, str)["sessions"][0]["state"] == "leaving"
    made = of(desk.tell(ev.PoolReleased(pool)), ev.MakePool).pool
    assert desk.last_to(1) == msg.PoolFreedMsg(pool, SIZE + INDEX)
    assert made != pool
    assert desk.machine.pools.given_up_total == 1
    assert desk.machine.pools.discards_total == 0


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
    of(desk.tell(ev.PoolFree(pool)), ev.ReleasePool)  # it is freed all the same


def test_engine_that_lost_the_lock_does_not_free_what_its_successor_waits_for():
    """Goal: only the newest borrower gives up. Method: a newer claim waits when the old holder
    gives up; the memory is kept, and lent with its content."""
    desk = Desk()
    pool = desk.hold(1)
    desk.mark(1, msg.BEGUN)
    desk.borrow(2, token=2)
    assert refused(desk, Received(1, 5, msg.GiveUpMsg(WAIT_MS))).code == "gms.kv_stale_token"
    desk.tell(Closed(1))
    desk.tell(ev.PoolFree(pool))
    assert desk.take(2) == ev.SendPool(2, 2, pool, is_fresh=False)
