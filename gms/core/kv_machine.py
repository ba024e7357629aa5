"""The machine of one device's KV memory: pools, borrowers, waits. Everything legal is decided here.

A pool is made at the first claim and kept from then on: what its holder wrote is still there for
the next one. Sessions and pools have states, whose tables enforce themselves (`kv_state.py`); what
operators see is derived. After every event all survivors and waiters are judged anew, in order of
arrival.

Rules that are easy to break:
- Only one incarnation holds the pool. Another is granted it when no session of the last one is left
  and, besides, the kernel says that no process holds the pool's file: a session may end before its
  process.
- A claim with an older token of the same era has lost the lock: it is refused, whatever is free.
  Tokens of different eras do not compare.
- No memory is made while any process may map another pool: a device never holds two.
- After a restart, only evidence ends the wait: memory that a survivor hands back, or a free file.

Its snapshot is one JSON-like object, for status, metrics and the CLI. Instants are milliseconds of
the caller's clock, which the caller's function `at` turns into times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gms import kv_messages as msg
from gms.core import events as ev
from gms.core import kv_events as kv
from gms.core.events import Effects
from gms.core.kv_events import Claimant, PoolPhase
from gms.core.kv_state import Borrowers, ClaimMsg, KvBorrower, Pool, Pools
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError
from plumbing.text import size

FULL_RETRY_MS = 100.0  # nothing announces that another process has released memory
FAILED_ADOPTIONS_MAX = 2  # two engines died of the same content: a third one need not


class KvMachine:
    """Events in, effects out; see the head of this file."""

    def __init__(
        self,
        *,
        new_pool_id: Callable[[], str],
        orphans: Mapping[str, bool] | None = None,
        newest: Iterable[Claimant] = (),
    ) -> None:
        """`orphans` are the pools of earlier servers whose files some process holds, each with
        whether its file says that it was discarded; `newest` are the newest claims, one of each
        era, that an earlier server has kept."""
        self.pools = Pools(orphans or {})
        self.borrowers = Borrowers(newest)
        self.full: UnderstudyError | None = None  # why no pool could be made the last time
        self.retry_ms = 0.0
        self.made_total = self.lent_total = self.full_waits_total = 0
        self._new_pool_id = new_pool_id

    def next_deadline_ms(self) -> float | None:
        """When to send the next `DeadlinePassed`."""
        waiting, leaving = self.borrowers.waiting, self.borrowers.leaving
        times = [each.deadline_ms for each in waiting + leaving if each.deadline_ms is not None]
        if self.full is not None and waiting:
            times.append(self.retry_ms)
        return min(times, default=None)

    def handle(self, event: ev.DeviceEvent, now_ms: float) -> Effects:
        """Take one event and return what to do.

        Raises:
            ProtocolError, UnderstudyError: the client's fault; nothing has changed, and the shell
                answers with the error and closes the connection.
            InvariantError: ours.
        """
        match event:
            case ev.Received():
                effects = self._received(event, now_ms)
            case ev.Closed(session_id):
                effects = self._closed(session_id)
            case ev.DeadlinePassed():
                effects = []
            case kv.KvPoolEvent():
                effects = self._happened(event, now_ms)
            case _:
                raise InvariantError(f"{type(event).__name__} is no event of this machine")
        effects += self._judge_survivors(now_ms)
        for session in self.borrowers.waiting:
            effects += self._judge(session, now_ms)
        for pool in self.pools.by_id.values():
            pool.is_free = False  # true only for those that were just judged
        return (
            effects
            + self.borrowers.end_overdue(now_ms, self.full)
            + self.pools.watch(self.borrowers)
        )

    # ------------------------------------------------------------------ what clients ask

    def _received(self, event: ev.Received, now_ms: float) -> Effects:
        match event.message:
            case msg.BorrowPoolMsg() as message:
                return self.borrowers.borrow(event, message, now_ms)
            case msg.TakeMsg():
                return self._take(event, now_ms)
            case msg.HandBackMsg() as message:
                return self._hand_back(event, message, now_ms)
            case msg.MarkMsg(mark):
                session = self.borrowers.get(event)
                session.target(msg.MarkMsg)
                if mark not in (msg.BEGUN, msg.ADOPTING, msg.ADOPTED):
                    raise ProtocolError("gms.bad_mark", f"there is no mark {mark[:64]!r}")
                self.pools.by_id[session.pool].note(session.claimant, mark)
                return []
            case msg.DiscardMsg(why):
                session = self.borrowers.get(event)
                session.move(msg.DiscardMsg, now_ms)
                return self.pools.discard(
                    self.pools.by_id[session.pool], f"{session.label} says: {why}"
                )
            case msg.GiveUpMsg() as message:
                session = self.borrowers.leave(event, message, now_ms)
                return self.pools.give_up(self.pools.by_id[session.pool], session.claimant)
            case msg.DropPoolMsg():
                return self._drop(event)
            case message:
                raise ProtocolError(
                    "gms.unexpected_message", f"clients do not send {message.TYPE!r}"
                )

    def _drop(self, event: ev.Received) -> Effects:
        """Whether a process without a session maps it, the shell has asked the kernel."""
        pool = self.pools.current
        holders = [each.label for each in self.borrowers.holders]
        waiting = [each.label for each in self.borrowers.waiting]
        if holders or waiting:
            verb = "lent to" if holders else "being lent to"
            raise UnderstudyError(
                "gms.kv_held",
                f"the KV memory is {verb} {', '.join(holders or waiting)}; it can be dropped only"
                " while no engine uses it",
                holders=holders or waiting,
            )
        if self.pools.unowned:
            raise UnderstudyError(*self.pools.unowned[0].why)
        if pool is None:
            raise UnderstudyError("gms.no_kv_pool", "there is no KV memory to drop")
        if pool.phase is PoolPhase.MAKING:  # for somebody who has left since
            raise UnderstudyError(*pool.why)
        answer = msg.PoolDroppedMsg(pool.id, pool.memory_bytes)
        effects = self.pools.discard(pool, "an operator dropped it")
        return [*effects, ev.SendMessage(event.session, event.request_id, answer)]

    def _take(self, event: ev.Received, now_ms: float) -> Effects:
        """The shell has checked that the process holds the flock."""
        session = self.borrowers.get(event)
        session.target(msg.TakeMsg)
        pool = self.pools.by_id[session.pool]
        if pool.phase is not PoolPhase.KEPT:
            raise UnderstudyError(
                "gms.kv_stale_pool", f"pool {pool.id} was discarded meanwhile; borrow again"
            )
        session.move(msg.TakeMsg, now_ms)
        return [kv.SendPool(session.id, event.request_id, pool.id, not pool.has_begun)]

    def _hand_back(self, event: ev.Received, message: msg.HandBackMsg, now_ms: float) -> Effects:
        """A survivor of an earlier server has reconnected: it maps that pool, which is a fact and
        no claim, so neither its token nor who else is here matters."""
        pool = self.pools.by_id.get(message.pool)
        known = (PoolPhase.ORPHANED, PoolPhase.KEPT, PoolPhase.DISCARDED)
        if pool is None or pool.phase not in known:
            raise UnderstudyError(
                "gms.kv_pool_gone",
                f"pool {message.pool[:32]} is unknown: its file was removed while it was"
                " mapped. Its holders keep its memory until they exit",
            )
        sizes = pool.slab_sizes or message.slab_sizes
        is_whole = sum(message.slab_sizes) >= message.size_bytes and sizes == message.slab_sizes
        if not is_whole or (pool.slab_sizes and not pool.fits(message)):
            raise ProtocolError(
                "gms.bad_offer", f"the memory handed back as pool {pool.id} has other sizes"
            )
        effects = self.borrowers.hand_back(event, message, now_ms)
        # Noted at once: it may be gone before the driver has checked what it brought.
        if message.mark:
            pool.note(self.borrowers.get(event).claimant, message.mark)
        if message.discarded:
            effects += self.pools.discard(pool, f"{message.engine} says: {message.discarded}")
        return effects

    def _closed(self, session_id: int) -> Effects:
        session = self.borrowers.drop(session_id)
        pool = self.pools.by_id.get(session.pool) if session is not None else None
        if session is None or pool is None or pool.adopting != session.claimant:
            return []
        if any(each.claimant == pool.adopting for each in self.borrowers.holders):
            return []
        pool.adopting = None
        pool.failed_adoptions += 1
        if pool.failed_adoptions < FAILED_ADOPTIONS_MAX:
            return []
        why = f"{pool.failed_adoptions} engines in a row ended while they adopted its blocks"
        return self.pools.discard(pool, why)

    # ------------------------------------------------------------------ what has happened to pools

    def _happened(self, event: kv.KvPoolEvent, now_ms: float) -> Effects:
        pool = self.pools.by_id.get(event.pool)
        if pool is None and isinstance(event, kv.PoolFree | kv.PoolHoldersSeen):
            return []  # a try that was under way when the watch ended
        if pool is None:
            raise InvariantError(f"{type(event).__name__} of unknown pool {event.pool}")
        match event:
            case kv.PoolMade(_, slab_sizes):
                pool.turn("keep")
                pool.slab_sizes, pool.is_free, self.full = slab_sizes, True, None
                self.made_total += 1
                return []
            case kv.PoolNotMade(_, error):
                pool.turn("fail")
                del self.pools.by_id[pool.id]
                return self._not_made(error, now_ms)
            case kv.PoolFree():
                return self.pools.free(pool, has_holders=bool(self.borrowers.holders_of(pool.id)))
            case kv.PoolHoldersSeen(_, pids):
                pool.pids = pids
            case kv.PoolReleased():
                pool.turn("end")
                del self.pools.by_id[pool.id]
                return self.borrowers.freed(pool, now_ms)
            case kv.PoolTakenBack():
                return self.pools.taken_back(pool)
            case kv.PoolNotTakenBack(_, session_id, error):
                pool.returning = pool.offer = None
                return self.borrowers.refuse(session_id, error, now_ms)
        return []

    def _not_made(self, error: UnderstudyError, now_ms: float) -> Effects:
        if error.code == "gms.device_full":
            self.full_waits_total += self.full is None
            self.full, self.retry_ms = error, now_ms + FULL_RETRY_MS
            return []
        self.full = None
        effects: Effects = []
        for session in self.borrowers.waiting:
            effects += self.borrowers.refuse(session.id, error, now_ms)
        return effects

    # ------------------------------------------------------------------ judging

    def _judge_survivors(self, now_ms: float) -> Effects:
        effects: Effects = []
        for session in self.borrowers.returning:
            pool, offer = self.pools.by_id[session.pool], session.claim
            if not isinstance(offer, msg.HandBackMsg):
                raise InvariantError(f"session {session.id} returns without an offer")
            if pool.phase is PoolPhase.ORPHANED:
                if pool.returning is None:  # one at a time; if it fails, the next one's is checked
                    pool.returning, pool.offer = session.id, offer
                    effects.append(
                        kv.TakePoolBack(pool.id, session.id, offer.slab_sizes, offer.index_bytes)
                    )
                continue
            session.move(kv.BorrowerBack, now_ms)
            session.deadline_ms = None
            effects.append(ev.SendMessage(session.id, session.request_id, msg.PoolKeptMsg(pool.id)))
        return effects

    def _judge(self, session: KvBorrower, now_ms: float) -> Effects:
        """Grant the pool, make or discard one, refuse, or say what is waited for."""
        claim = session.claim
        if claim is None:
            raise InvariantError(f"session {session.id} waits without a claim")
        others = [b for b in self.borrowers.holders if b.claimant != session.claimant]
        if others:
            names = ", ".join(dict.fromkeys(each.label for each in others))
            text = f"the KV memory is still lent to {names}"
            return self.borrowers.wait(session, "gms.kv_busy", text)
        if self.pools.unowned:
            return self.borrowers.wait(session, *self.pools.unowned[0].why)
        pool = self.pools.current
        if pool is None:
            return self._make(session, claim, now_ms)
        if pool.phase is PoolPhase.MAKING:
            return self._wait_for_room(session, pool)
        has_mates = bool(self.borrowers.holders_of(pool.id))
        if not pool.fits(claim):
            if has_mates:
                error = UnderstudyError(
                    "gms.kv_size_differs",
                    f"this engine's KV pool has {pool.size_bytes} bytes and an index of"
                    f" {pool.index_bytes}; this process asks for {claim.size_bytes} and"
                    f" {claim.index_bytes}: all processes of an engine must ask for the same",
                )
                return self.borrowers.refuse(session.id, error, now_ms)
            why = (
                f"{session.label} asks for {size(claim.size_bytes)}, it has {size(pool.size_bytes)}"
            )
            effects = self.pools.discard(pool, why)
            return effects + self.borrowers.wait(session, *pool.why)
        if pool.is_free and not pool.is_certain:
            why = "it is not known whether its last holder had zeroed it"
            effects = self.pools.discard(pool, why)
            return effects + self.borrowers.wait(session, *pool.why)
        if has_mates or pool.is_free:
            return self._lend(session, pool, now_ms)
        return self.borrowers.wait(session, *pool.why)

    def _lend(self, session: KvBorrower, pool: Pool, now_ms: float) -> Effects:
        is_news = pool.holder != session.claimant
        pool.holder = session.claimant
        self.lent_total += is_news
        session.move(kv.PoolLent, now_ms)
        session.pool, session.deadline_ms = pool.id, None
        session.reason = session.reason_message = ""
        effects: Effects = [kv.GrantPool(session.id, session.request_id, pool.id)]
        if is_news:
            text = f"KV pool {pool.id} is lent to {pool.holder}"
            data = {"pool": pool.id, "engine": pool.holder.engine, "token": pool.holder.token}
            effects.append(ev.RecordEvent("gms.kv_lent", text, data))
        return effects

    def _make(self, session: KvBorrower, claim: ClaimMsg, now_ms: float) -> Effects:
        if self.full is not None and now_ms < self.retry_ms:
            return self.borrowers.wait(session, self.full.code, self.full.message)
        pool = Pool(self._new_pool_id(), PoolPhase.MAKING, claim.size_bytes, claim.index_bytes)
        self.pools.by_id[pool.id] = pool
        make = kv.MakePool(pool.id, claim.size_bytes, claim.index_bytes)
        return [make, *self._wait_for_room(session, pool)]

    def _wait_for_room(self, session: KvBorrower, pool: Pool) -> Effects:
        """Wait for a pool that is being made, and for memory if that has failed before."""
        code, text = (self.full.code, self.full.message) if self.full else pool.why
        return self.borrowers.wait(session, code, text)


# What operators see of the pools, the first that applies.
STATES = ("lent", "recovering", "discarded", "releasing", "making", "idle", "empty")


def state_of(machine: KvMachine) -> str:
    """One of STATES."""
    pools = machine.pools
    if pools.current is not None and machine.borrowers.holders:
        return "lent" if pools.current.phase is PoolPhase.KEPT else "making"
    names = {
        PoolPhase.ORPHANED: "recovering",
        PoolPhase.DISCARDED: "discarded",
        PoolPhase.RELEASING: "releasing",
        PoolPhase.MAKING: "making",
        PoolPhase.KEPT: "idle",
    }
    shown = {names[pool.phase] for pool in pools.by_id.values() if pool.phase in names}
    return next((state for state in STATES if state in shown), "empty")


def kv_snapshot(machine: KvMachine, at: Callable[[float], str]) -> dict[str, Any]:
    """The state; `at` turns one of the machine's instants into RFC 3339."""
    pool = machine.pools.current or next(iter(machine.pools.unowned), None)
    return {
        "state": state_of(machine),
        **_pool(pool),
        "sessions": [
            _session(each, at) for each in machine.borrowers.holders + machine.borrowers.leaving
        ],
        "waiting": [_waiter(each, at) for each in machine.borrowers.waiting],
        "pools_made_total": machine.made_total,
        "pools_lent_total": machine.lent_total,
        "pools_discarded_total": machine.pools.discards_total,
        "pools_given_up_total": machine.pools.given_up_total,
        "recoveries_total": machine.pools.recoveries_total,
        "stale_refusals_total": machine.borrowers.stale_refusals_total,
        "full_waits_total": machine.full_waits_total,
    }


def pools_in_full(machine: KvMachine) -> list[dict[str, Any]]:
    """Every pool with its slabs: what `gms inspect` shows."""
    return [
        {**_pool(pool), "phase": str(pool.phase), "slab_sizes": list(pool.slab_sizes)}
        for pool in machine.pools.by_id.values()
    ]


def _pool(pool: Pool | None) -> dict[str, Any]:
    holder = pool.holder if pool is not None else None
    return {
        "pool": pool.id if pool else None,
        "pool_bytes": sum(pool.slab_sizes) if pool else 0,
        "index_bytes": pool.index_bytes if pool and pool.slab_sizes else 0,
        "slabs": len(pool.slab_sizes) if pool else 0,
        "is_written": bool(pool and pool.has_begun),
        "discarded": (pool.discarded or None) if pool else None,
        "failed_adoptions": pool.failed_adoptions if pool else 0,
        "holder": {
            "engine": holder.engine,
            "incarnation": holder.incarnation,
            "token": holder.token,
            "era": holder.era,
        }
        if holder is not None
        else None,
        "mapped_by": list(pool.pids) if pool else [],
    }


def _session(session: KvBorrower, at: Callable[[float], str]) -> dict[str, Any]:
    claimant = session.claimant
    return {
        "engine": claimant.engine,
        "incarnation": claimant.incarnation,
        "token": claimant.token,
        "pid": session.pid,
        "state": str(session.state),
        "since": at(session.since_ms),
    }


def _waiter(session: KvBorrower, at: Callable[[float], str]) -> dict[str, Any]:
    return {
        **_session(session, at),
        "reason": session.reason,
        "message": session.reason_message,
        "deadline": at(session.deadline_ms) if session.deadline_ms is not None else None,
    }
