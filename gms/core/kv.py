"""The machine of one place's KV memory: one incarnation has it, by token. Everything legal is
decided here.

A pool is made at the first claim and kept from then on: what its holder wrote is still there for
the next one. What operators see is derived.

Rules that are easy to break:
- Only one incarnation holds the pool. Another is granted it when no session of the last one is left
  and, besides, the kernel says that no process holds the pool's file: a session may end before its
  process.
- A claim with an older token of the same era has lost the lock: it is refused, whatever is free.
  Tokens of different eras do not compare.
- No memory is made while any process may map another pool: a device never holds two.
- After a restart, only evidence ends the wait: memory that a survivor hands back, or a free file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from gms import messages as msg
from gms.core import events as ev
from gms.core.events import Claimant
from gms.core.region import Machine, Region, RegionPhase, S, Session, claimant
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.text import duration, size

FULL_RETRY_MS = 100.0  # nothing announces that another process has released memory
FAILED_ADOPTIONS_MAX = 2  # two engines died of the same content: a third one need not
ERAS_MAX = 8  # an era ends when a lock server has lost its state; older ones are forgotten


class Pool(Region):
    """One device's KV memory: slabs and an index, made and freed together."""

    claimed_bytes: int = 0  # the slabs have at least as much
    index_bytes: int = 0
    has_begun: bool = False  # a holder has zeroed it and may have written
    is_certain: bool = True  # … and that is known: a survivor may not know of its neighbour
    holder: Claimant | None = None  # the last incarnation that it was lent to
    adopting: Claimant | None = None
    # In a row: a holder died between `adopting` and `adopted`. A restarted server counts from 0;
    # still no content kills every engine: the index itself counts its unproven adopters, before
    # their first step, in the memory that a survivor hands back (`engine.kv.adopter`). This count
    # is for an engine that dies before that, while it reads the index.
    failed_adoptions: int = 0
    discarded: str = ""  # why it was
    is_free: bool = False  # the kernel has just said so, and it was not granted since

    @property
    def memory_bytes(self) -> int:
        return self.size_bytes + (self.index_bytes if self.slab_sizes else 0)

    @property
    def why(self) -> tuple[str, str]:
        """Code and sentence of a wait for this pool."""
        name, pids = f"KV pool {self.id[:8]}", self.holders_shown
        match self.phase:
            case RegionPhase.MAKING:
                return (
                    "gms.kv_making",
                    f"{size(self.claimed_bytes)} of KV memory is being allocated",
                )
            case RegionPhase.ORPHANED:
                text = f"{name} of the previous server has not been handed back yet"
                return "gms.kv_recovering", f"{text}; it is mapped by {pids or 'a process'}"
            case RegionPhase.RETIRED:
                by = f" by {pids}" if pids else ""
                return "gms.kv_busy", f"{name} was discarded ({self.discarded}), still mapped{by}"
            case RegionPhase.SERVED:
                whom = pids or f"a process of {self.holder}"
                return "gms.kv_busy", f"{name} is still mapped by {whom}, whose session has ended"
        return "gms.kv_releasing", f"the memory of {name} is being freed"

    def note(self, who: Claimant, mark: str) -> None:
        """Record what a holder reports about the content."""
        self.has_begun = self.is_certain = True
        if mark == msg.ADOPTING:
            self.adopting = who
        elif mark == msg.ADOPTED:
            self.adopting, self.failed_adoptions = None, 0

    def fits(self, claim: msg.BorrowPoolMsg | msg.HeldPool) -> bool:
        return (self.claimed_bytes, self.index_bytes) == (claim.size_bytes, claim.index_bytes)


class KvMachine(Machine[Pool]):
    """Events in, effects out; see the head of this file and `region.py`."""

    what: ClassVar[str] = "KV memory"
    again: ClassVar[str] = "hold again"

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
        super().__init__(
            Pool(
                each,
                RegionPhase.ORPHANED,
                has_begun=True,
                is_certain=False,
                discarded="before this server started" if is_discarded else "",
            )
            for each, is_discarded in (orphans or {}).items()
        )
        self.newest = {each.era: each for each in newest}  # by era, the last that was heard last
        self.full: UnderstudyError | None = None  # why no pool could be made the last time
        self.retry_ms = 0.0
        self.made_total = self.lent_total = self.full_waits_total = self.recoveries_total = 0
        self.discards_total = self.given_up_total = self.stale_refusals_total = 0
        self._new_pool_id = new_pool_id

    @property
    def current(self) -> Pool | None:
        """The pool that is lent, or will be."""
        return next(iter(self._in_phase(RegionPhase.SERVED, RegionPhase.MAKING)), None)

    @property
    def unowned(self) -> list[Pool]:
        """The others, which must end before anything is lent or made."""
        return [pool for pool in self.regions.values() if pool is not self.current]

    @property
    def all_holders(self) -> list[Session]:
        """Those whose process maps a pool, or is about to."""
        return [each for pool in self.regions.values() for each in self.holders(pool)]

    @property
    def leaving(self) -> list[Session]:
        """Those that wait until the memory which they gave up is free."""
        return self._in(S.LEAVING)

    # ------------------------------------------------------------------ what clients ask

    def on_mark(self, event: ev.Received, message: msg.MarkMsg) -> None:
        session = self.session(event)
        session.accept(message)
        self.region_of(session).note(session.claimant, message.mark)

    def on_discard(self, event: ev.Received, message: msg.DiscardMsg) -> None:
        session = self.session(event)
        session.accept(message)
        self.discard(self.region_of(session), f"{session.label} says: {message.why}")

    def on_borrow_pool(self, event: ev.Received, message: msg.BorrowPoolMsg) -> None:
        """A claim: refuse it if it is stale, else let it wait to be judged."""
        session = self._newcomer(event)
        self._check_token(Claimant(message.engine, message.incarnation, message.token, message.era))
        self._admit(session, event, message.wait_ms)
        self._heard(session.claimant)
        for older in self.waiting:
            error = self.stale(older.claimant)
            if error is not None:
                self._refuse(older, error)

    def on_take(self, event: ev.Received, message: msg.TakeMsg) -> None:
        """The shell has checked that the process holds the flock."""
        session = self.session(event)
        session.accept(message)
        pool = self.region_of(session)
        if pool.phase is not RegionPhase.SERVED:
            raise UnderstudyError(
                "gms.kv_stale_pool", f"pool {pool.id} was discarded meanwhile; borrow again"
            )
        session.move(message, self.now_ms)
        taken = msg.PoolTakenMsg(tuple(pool.slab_sizes), pool.index_bytes, not pool.has_begun)
        self.do(ev.SendRegion(session.id, event.request_id, pool.id, taken))

    def on_give_up(self, event: ev.Received, message: msg.GiveUpMsg) -> None:
        """An engine rests: free its memory once no process maps it. One whose token is stale may
        not: the pool is for the engine with the newer one.
        """
        session = self.session(event)
        session.accept(message)
        self._check_token(session.claimant)
        pool, by = self.region_of(session), session.claimant
        session.move(message, self.now_ms)
        session.request_id, session.deadline_ms = event.request_id, self.now_ms + message.wait_ms
        session.reason_message = "a process of this engine still maps it, or it is being freed"
        self.give_up(pool, by)

    def give_up(self, pool: Pool, by: Claimant) -> None:
        if pool.phase is not RegionPhase.SERVED:
            return  # one that was discarded before is on its way
        self._retire(pool, f"{by} rests")
        self.given_up_total += 1

    def on_drop(self, event: ev.Received, _: msg.DropMsg) -> None:
        """Whether a process without a session maps it, the shell has asked the kernel."""
        pool = self.current
        holders = [each.label for each in self.all_holders]
        waiting = [each.label for each in self.waiting]
        if holders or waiting:
            verb = "lent to" if holders else "being lent to"
            raise UnderstudyError(
                "gms.kv_held",
                f"the KV memory is {verb} {', '.join(holders or waiting)}; it can be dropped only"
                " while no engine uses it",
                holders=holders or waiting,
            )
        if self.unowned:
            raise UnderstudyError(*self.unowned[0].why)
        if pool is None:
            raise UnderstudyError("gms.no_kv_pool", "there is no KV memory to drop")
        if pool.phase is RegionPhase.MAKING:  # for a session that has left since
            raise UnderstudyError(*pool.why)
        answer = msg.DroppedMsg(pool.id, size_bytes=pool.memory_bytes)
        self.discard(pool, "an operator dropped it")
        self.do(ev.SendMessage(event.session, event.request_id, answer))

    def discard(self, pool: Pool, why: str) -> None:
        """Never lend `pool` again; harmless to repeat."""
        if pool.phase is RegionPhase.ORPHANED:  # once it is here
            pool.discarded, pool.adopting = why, None
            self.do(ev.MarkRetired(pool.id))
        elif pool.phase is RegionPhase.SERVED:
            self._retire(pool, why)
            self.discards_total += 1
            text = f"KV pool {pool.id} is discarded, and never lent again: {why}"
            self.record("gms.kv_discarded", text, "warning", pool=pool.id)

    def _retire(self, pool: Pool, why: str) -> None:
        pool.discarded, pool.adopting = why, None
        self.retire(pool)

    def _left(self, session: Session, why: str) -> None:
        """An engine whose last session ends while it adopts has died of the content, perhaps."""
        pool = self.regions.get(session.region or "")
        if pool is None or pool.adopting != session.claimant:
            return
        if any(each.claimant == pool.adopting for each in self.all_holders):
            return
        pool.adopting = None
        pool.failed_adoptions += 1
        if pool.failed_adoptions >= FAILED_ADOPTIONS_MAX:
            count = pool.failed_adoptions
            self.discard(pool, f"{count} engines in a row ended while they adopted its blocks")

    # ------------------------------------------------------------------ tokens

    def _heard(self, who: Claimant) -> None:
        """Remember its token, if it is the newest of its era."""
        known = self.newest.get(who.era)
        if who.era == msg.NO_ERA or (known is not None and known.token >= who.token):
            return
        self.newest.pop(who.era, None)
        while len(self.newest) >= ERAS_MAX:
            del self.newest[next(iter(self.newest))]
        self.newest[who.era] = who
        self.do(ev.KeepTokens(tuple(self.newest.values())))

    def _check_token(self, who: Claimant) -> None:
        error = self.stale(who)
        if error is not None:
            self.stale_refusals_total += 1
            raise error

    def stale(self, who: Claimant) -> UnderstudyError | None:
        newest = self.newest.get(who.era)
        if newest is None or who == newest or who.token > newest.token:
            return None
        return UnderstudyError(
            "gms.kv_stale_token",
            f"{who.engine} asks for KV memory under token {who.token}, but {newest.engine} has"
            f" done so under token {newest.token} of the same era: it has lost the lock and must"
            " exit",
            engine=who.engine,
            token=who.token,
            newest_token=newest.token,
        )

    # ------------------------------------------------------------------ survivors

    def on_hand_back(self, event: ev.Received, message: msg.HandBackMsg) -> None:
        """It maps that pool, so neither its token nor who else is here matters."""
        super().on_hand_back(event, message)
        session, held = self.sessions[event.session], message.pool
        assert held is not None
        self._heard(session.claimant)
        # Noted at once: it may be gone before the driver has checked what it brought.
        pool = self.regions[message.region]
        if held.mark:
            pool.note(session.claimant, held.mark)
        if held.discarded:
            self.discard(pool, f"{message.engine} says: {held.discarded}")

    def _check_survivor(self, message: msg.HandBackMsg) -> None:
        pool, held = self.regions.get(message.region), message.pool
        if pool is None or pool.phase not in (
            RegionPhase.ORPHANED,
            RegionPhase.SERVED,
            RegionPhase.RETIRED,
        ):
            raise UnderstudyError(
                "gms.kv_pool_gone",
                f"pool {message.region[:32]} is unknown: its file was removed while it was"
                " mapped. Its holders keep its memory until they exit",
            )
        sizes = tuple(pool.slab_sizes) or message.slab_sizes
        if (
            held is None
            or sum(message.slab_sizes) < held.size_bytes
            or sizes != message.slab_sizes
            or (pool.slab_sizes and not pool.fits(held))
        ):
            raise ProtocolError(
                "gms.bad_offer", f"the memory handed back as pool {pool.id} has other sizes"
            )

    def _judge_survivor(self, session: Session, message: msg.HandBackMsg) -> None:
        pool = self.region_of(session)
        if pool.phase is RegionPhase.ORPHANED:
            self._take_back(session, pool, message)
        else:
            self._register(session)

    def _recovered(self, pool: Pool, offer: msg.HandBackMsg, tensors: int) -> None:
        """The survivor that brought it may be gone again: the memory is here all the same."""
        held = offer.pool
        assert held is not None
        pool.claimed_bytes, pool.index_bytes = held.size_bytes, held.index_bytes
        pool.holder = claimant(offer)
        self.recoveries_total += 1
        text = f"KV pool {pool.id} was handed back by {pool.holder}"
        self.record("gms.kv_recovered", text, pool=pool.id)
        served = self._in_phase(RegionPhase.SERVED, RegionPhase.MAKING)
        other = next((each for each in served if each is not pool), None)
        if other is not None and not pool.discarded:
            pool.discarded = f"pool {other.id} has replaced it"
        if pool.discarded:
            self.discard(pool, pool.discarded)

    # ------------------------------------------------------------------ what has happened to pools

    def _called(self, effect: ev.Effect, result: Any, error: UnderstudyError | None) -> None:
        assert isinstance(effect, ev.MakePool)
        if error is not None:
            self.regions.pop(effect.region).turn("fail")
            self._not_made(error)
            return
        pool = self.regions[effect.region]
        pool.turn("serve")
        pool.slab_sizes, pool.is_free, self.full = list(result), True, None
        self.made_total += 1

    def _not_made(self, error: UnderstudyError) -> None:
        if error.code == "gms.device_full":
            self.full_waits_total += self.full is None
            self.full, self.retry_ms = error, self.now_ms + FULL_RETRY_MS
            return
        self.full = None
        for session in self.waiting:
            self._refuse(session, error)

    def region_free(self, id_: str, copy: ev.JournalRecord | None = None) -> None:
        super().region_free(id_, copy)
        pool = self.regions.get(id_)
        if pool is not None:
            pool.is_free = pool.phase is RegionPhase.SERVED and not self.is_held(pool)

    def _ended(self, pool: Pool) -> None:
        """Tell those who gave `pool` up that its memory is free, and all who watch."""
        why = f": {pool.discarded}" if pool.discarded else ""
        text = f"the memory of KV pool {pool.id} is free{why}"
        self.record("gms.kv_freed", text, pool=pool.id)
        for session in self.leaving:
            if session.region == pool.id:
                session.move("free", self.now_ms)
                self._send(session, msg.PoolFreedMsg(pool.id))
                del self.sessions[session.id]

    def _is_served_watched(self, pool: Pool) -> bool:
        return bool(self.waiting) and not self.is_held(pool)

    # ------------------------------------------------------------------ judging

    def _judge_waiting(self) -> None:
        for session in self.waiting:
            self._judge(session)
        for pool in self.regions.values():
            pool.is_free = False  # true only for those that were just judged

    def _judge(self, session: Session) -> None:
        """Grant the pool, make or discard one, refuse, or say what is waited for."""
        claim = session.request
        others = [b for b in self.all_holders if b.claimant != session.claimant]
        pool = self.current
        if others:
            names = ", ".join(dict.fromkeys(each.label for each in others))
            self._wait(session, "gms.kv_busy", f"the KV memory is still lent to {names}")
        elif self.unowned:
            self._wait(session, *self.unowned[0].why)
        elif pool is None:
            self._make(session, claim)
        elif pool.phase is RegionPhase.MAKING:
            self._wait_for_room(session, pool)
        elif not pool.fits(claim):
            self._misfit(session, claim, pool)
        elif pool.is_free and not pool.is_certain:
            self.discard(pool, "it is not known whether its last holder had zeroed it")
            self._wait(session, *pool.why)
        elif pool.is_free or self.is_held(pool):
            self._lend(session, pool)
        else:
            self._wait(session, *pool.why)

    def _misfit(self, session: Session, claim: msg.BorrowPoolMsg, pool: Pool) -> None:
        if self.is_held(pool):
            error = UnderstudyError(
                "gms.kv_size_differs",
                f"this engine's KV pool has {pool.claimed_bytes} bytes and an index of"
                f" {pool.index_bytes}; this process asks for {claim.size_bytes} and"
                f" {claim.index_bytes}: all processes of an engine must ask for the same",
            )
            self._refuse(session, error)
            return
        has, wants = size(pool.claimed_bytes), size(claim.size_bytes)
        self.discard(pool, f"{session.label} asks for {wants}, it has {has}")
        self._wait(session, *pool.why)

    def _lend(self, session: Session, pool: Pool) -> None:
        who = session.claimant
        is_news, pool.holder = pool.holder != who, who
        self.lent_total += is_news
        session.move("lend", self.now_ms)
        session.region, session.deadline_ms = pool.id, None
        session.reason = session.reason_message = ""
        self._send(session, msg.PoolGrantedMsg(pool.id))
        if is_news:
            text = f"KV pool {pool.id} is lent to {who}"
            self.record("gms.kv_lent", text, pool=pool.id, engine=who.engine, token=who.token)

    def _make(self, session: Session, claim: msg.BorrowPoolMsg) -> None:
        if self.full is not None and self.now_ms < self.retry_ms:
            self._wait(session, self.full.code, self.full.message)
            return
        pool = Pool(self._new_pool_id(), RegionPhase.MAKING)
        pool.claimed_bytes, pool.index_bytes = claim.size_bytes, claim.index_bytes
        self.regions[pool.id] = pool
        self.do(ev.MakePool(pool.id, claim.size_bytes, claim.index_bytes))
        self._wait_for_room(session, pool)

    def _wait_for_room(self, session: Session, pool: Pool) -> None:
        """Wait for a pool that is being made, and for memory if that has failed before."""
        code, text = (self.full.code, self.full.message) if self.full else pool.why
        self._wait(session, code, text)

    # ------------------------------------------------------------------ time

    def _deadlines(self) -> Iterable[float | None]:
        yield self.retry_ms if self.full is not None and self.waiting else None

    def _too_late(self, session: Session) -> UnderstudyError:
        waited, full = duration(self.now_ms - session.since_ms), self.full
        if full is not None and session.reason == full.code:
            return UnderstudyError(full.code, f"waited {waited}: {full.message}", **full.details)
        text = f"waited {waited} for the KV memory: {session.reason_message}"
        return UnderstudyError("gms.kv_busy", text, reason=session.reason)
