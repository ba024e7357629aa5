"""The rules of docs/lock.md, each left out: the simulation must detect every one.

A function patches the real core, or what surrounds it, so that the rule does not hold; its
docstring says what happens instead. The engine's own rules are attributes of `Serving` and
`Departures`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from lockserver.core import events as ev
from lockserver.core import evidence, ledger, machine, recovery, supervisors
from lockserver.core.ledger import Ledger
from lockserver.core.lock import Lock, LockState, Signal, Waiter
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessState
from lockserver.core.supervisors import SupervisorRecord
from tests.sim.kit import Patch, PlantedRules
from tests.sim.lock.engines import Departures
from tests.sim.lock.faults import Faults
from tests.sim.lock.parts import Tree
from tests.sim.lock.server import Server
from tests.sim.lock.serving import Serving

LIVES = r"while .* lives|two active"
STUCK = "no engine serves|waits for the dead|is free while|was not given its grant"
TWO = "two terms|serves under"

FEARED = PlantedRules()  # what the design fears most
CORE = PlantedRules()
HAND_OVER = PlantedRules()  # promise 7, H1 to H18 in order
DEPARTURES = PlantedRules()


def hear(patch: Patch, change: Callable[[LockMachine, ev.Input], ev.Input]) -> None:
    """Feed the machine something else."""
    handle = LockMachine.handle

    def handle_changed(self: LockMachine, event: ev.Input, now_ms: float) -> list[ev.LockEffect]:
        return handle(self, change(self, event), now_ms)

    patch.setattr(LockMachine, "handle", handle_changed)


@FEARED.rule("grant-on-eof", rf"{LIVES}|supervisor lives")
def grant_on_eof(patch: Patch) -> None:
    """A closed connection counts as a dead holder."""
    lose = LockMachine._lose

    def lose_at_once(self: LockMachine, lock: Lock, signal: Signal, now_ms: float) -> Any:
        yield from lose(self, lock, signal, now_ms)
        if signal is Signal.CONNECTION_CLOSED and lock.holder is not None:
            yield from self._free(lock, now_ms)

    patch.setattr(LockMachine, "_lose", lose_at_once)


@FEARED.rule("grant-not-persisted", "is not on disk")
def grant_not_persisted(patch: Patch) -> None:
    """A grant is sent, but the state before it is written."""
    record = Ledger._record

    def without_grant(self: Ledger, locks: Any) -> ev.LockRecord:
        grant, self._grant = self._grant, None
        try:
            return record(self, locks)
        finally:
            self._grant = grant

    patch.setattr(Ledger, "_record", without_grant)


@FEARED.rule("holder-on-file-ignored", LIVES)
def holder_on_file_ignored(patch: Patch) -> None:
    """A restarted server takes every lock to be free."""
    init = LockMachine.__init__

    def forget(self: LockMachine, record: ev.LockRecord, now_ms: float, **options: Any) -> None:
        init(self, replace(record, holders={}, unknown=frozenset()), now_ms, **options)

    patch.setattr(LockMachine, "__init__", forget)


@FEARED.rule("witness-ignored", LIVES)
def witness_ignored(patch: Patch) -> None:
    """Every witness looks free to the server."""
    moves = Server.moves

    def probing(self: Server) -> list[tuple[Any, Any]]:
        found = moves(self)
        if self.machine is not None:
            for lock, holder in evidence.probes_due(self.machine.locks, self.machine.supervisors):
                found.append((self.probe, (lock, self.world.trees[holder.incarnation])))
        return found

    patch.setattr(Server, "moves", probing)


# ---------------------------------------------------------------------- rules of the core


def unseen_counts(patch: Patch, state: WitnessState) -> None:
    """What could not be looked at is taken for `state`."""

    def take(self: LockMachine, event: ev.Input) -> ev.Input:
        if isinstance(event, ev.Wanted) and event.witness_state is WitnessState.UNSEEN:
            return msgspec.structs.replace(event, witness_state=state)
        return event

    hear(patch, take)


@CORE.rule("newest-connection", "not given its grant|waits|does not wait")
def older_connection_counts(patch: Patch) -> None:
    """A late message from an older connection counts as new."""
    adopt = SupervisorRecord.adopt

    def forget_order(self: SupervisorRecord, want: ev.Wanted) -> None:
        adopt(self, want)
        self.newest = -1

    patch.setattr(SupervisorRecord, "adopt", forget_order)


@CORE.rule("old-eof", f"{STUCK}|supervisor lives|known dead|was there before")
def old_eof_counts(patch: Patch) -> None:
    """The end of a replaced connection counts as the end of the new one."""
    older: dict[LockMachine, dict[int, str]] = {}

    def confuse(self: LockMachine, event: ev.Input) -> ev.Input:
        mine = older.setdefault(self, {})
        if isinstance(event, ev.Wanted):
            mine[event.conn] = event.msg.supervisor
        elif isinstance(event, ev.ConnectionClosed) and event.conn in mine:
            known = self.supervisors.get(mine[event.conn])
            if known is not None and known.conn is not None:
                return ev.ConnectionClosed(known.conn)
        return event

    hear(patch, confuse)


# An incarnation that a want no longer names is not over.
CORE.put(
    "unnamed-is-over",
    f"{STUCK}|no longer asks",
    LockMachine,
    "_end_unnamed",
    lambda self, supervisor, now_ms: [],
)


@CORE.rule("claims-only-when-unreadable", f"{LIVES}|second one|on disk")
def any_claim_is_believed(patch: Patch) -> None:
    """A claim with a token is believed although the state file was readable."""
    ask = LockMachine._ask

    def believe(
        self: LockMachine, lock: Lock, want: ev.Wanted, refused: bool, now_ms: float
    ) -> Any:
        is_other = lock.holder is None or lock.holder.incarnation != want.msg.incarnation
        if lock.name in want.msg.tokens and is_other and want.witness_state is WitnessState.HELD:
            lock.state, lock.holder = LockState.RECOVERING, None
            lock.is_ended = False
        yield from ask(self, lock, want, refused, now_ms)

    patch.setattr(LockMachine, "_ask", believe)


@CORE.rule("held-witness-to-ask", "asked with a free witness")
def free_witness_is_let_in(patch: Patch) -> None:
    """Every requester that was looked at counts as alive."""

    def as_held(self: LockMachine, event: ev.Input) -> ev.Input:
        if isinstance(event, ev.Wanted) and event.witness_state is not WitnessState.UNSEEN:
            return msgspec.structs.replace(event, witness_state=WitnessState.HELD)
        return event

    hear(patch, as_held)


@CORE.rule("unseen-lets-nobody-in", "does not wait, or is known dead")
def unseen_is_held(patch: Patch) -> None:
    """A requester whose witness could not be looked at counts as alive."""
    unseen_counts(patch, WitnessState.HELD)


@CORE.rule("unseen-puts-nobody-out", "refused without a look")
def unseen_is_unproven(patch: Patch) -> None:
    """A requester whose witness could not be looked at is refused."""
    unseen_counts(patch, WitnessState.UNPROVEN)


# A witness that was found free can still be joined.
CORE.put("seal", LIVES, Server, "seal", lambda self, tree: None)


@CORE.rule("witness-in-every-process-on-a-device", LIVES)
def helper_opens_a_device(patch: Patch) -> None:
    """A process of the tree that does not hold the witness opens the device."""
    start = Faults.start_helper

    def start_on_device(self: Faults, tree: Tree) -> None:
        start(self, tree)
        tree.has_helper_on_device = True

    patch.setattr(Faults, "start_helper", start_on_device)


@CORE.rule("same-grant-again", "was not given its grant")
def grant_is_not_repeated(patch: Patch) -> None:
    """A holder that asks again is not sent its grant again."""
    confirm = LockMachine._confirm

    def confirm_silently(self: LockMachine, lock: Lock, conn: int, now_ms: float) -> Any:
        effects = confirm(self, lock, conn, now_ms)
        return (effect for effect in effects if not isinstance(effect, ev.SendGrant))

    patch.setattr(LockMachine, "_confirm", confirm_silently)


@CORE.rule("silent-waiter-passed-over", "granted in its silence")
def silent_waiter_is_granted(patch: Patch) -> None:
    """The first waiter is granted the lock even if it is silent."""

    def first(waiters: list[Waiter], silent: Any, preferred: str | None = None) -> Waiter | None:
        return waiters[0] if waiters else None

    patch.setattr(ledger, "next_waiter", first)


@CORE.rule("fifo", "was there before")
def last_comes_first(patch: Patch) -> None:
    """The newest waiter is granted."""
    first = ledger.next_waiter

    def last(waiters: list[Waiter], silent: Any, preferred: str | None = None) -> Waiter | None:
        return first(waiters[::-1], silent)

    patch.setattr(ledger, "next_waiter", last)


@CORE.rule("silent-holder-is-tried", "waits for the dead")
def silent_holder_is_not_tried(patch: Patch) -> None:
    """A free witness of a silent holder does not free the lock."""
    decisive = evidence.is_decisive

    def unless_silent(lock: Lock, supervisors: Any) -> bool:
        known = supervisors.get(lock.holder.supervisor) if lock.holder is not None else None
        return decisive(lock, supervisors) and (known is None or lock.is_ended)

    patch.setattr(evidence, "is_decisive", unless_silent)


@CORE.rule("silent-holder-keeps-it", LIVES)
def silent_holder_is_gone(patch: Patch) -> None:
    """Silence counts as death."""
    fall_silent = evidence.fall_silent

    def fall(locks: Any, supervisors: Any, heard_before_ms: float) -> Any:
        yield from fall_silent(locks, supervisors, heard_before_ms)
        for lock in locks.values():
            known = supervisors.get(lock.holder.supervisor) if lock.holder is not None else None
            if known is not None and known.is_silent:
                lock.fire(Signal.EVIDENCE_GONE, heard_before_ms)

    patch.setattr(evidence, "fall_silent", fall)


@CORE.rule("no-window", LIVES)
def the_window_ends(patch: Patch) -> None:
    """A holder that is silent for some time after a restart has lost the lock."""

    def give_up(locks: Any, now_ms: float, window_end_ms: float) -> Any:
        for lock in locks.values():
            if lock.state is LockState.RECOVERING and now_ms > window_end_ms - 8000:
                lock.fire(Signal.EVIDENCE_GONE, now_ms)
        return ()

    patch.setattr(evidence, "report_overdue", give_up)


# After a stall of the server, every supervisor counts as silent.
CORE.put(
    "stall-is-forgiven",
    "is free while|lives and is heard",
    evidence,
    "forgive",
    lambda supervisors, now_ms: None,
)


@CORE.rule("lost-file-is-unknown", LIVES)
def lost_file_is_an_empty_one(patch: Patch) -> None:
    """Unreadable state counts as "no holder"."""
    init = LockMachine.__init__

    def forget(self: LockMachine, record: ev.LockRecord, now_ms: float, **options: Any) -> None:
        init(self, replace(record, unknown=frozenset()), now_ms, **options)

    patch.setattr(LockMachine, "__init__", forget)


@CORE.rule("strangers-count", LIVES)
def strangers_do_not_count(patch: Patch) -> None:
    """With the state lost, witnesses of engines that are not connected are ignored."""
    frees = recovery.scan_frees
    patch.setattr(
        recovery,
        "scan_frees",
        lambda locks, known, held, serving=(): frees(locks, known, (), serving),
    )


# A disconnected waiter keeps its place in the queue.
CORE.put(
    "disconnected-leave",
    "known dead|KeyError|AssertionError",
    LockMachine,
    "_leave_queues",
    lambda self, supervisor_id: None,
)


@CORE.rule("one-supervisor", "two supervisors")
def twins_are_let_in(patch: Patch) -> None:
    """A second supervisor of an engine is accepted."""
    for module in (machine, supervisors):
        patch.setattr(module, "twins_of", lambda want, supervisors: [])


# A free witness alone proves that a holder is gone.
CORE.put(
    "pidfd",
    "while its supervisor lives",
    evidence,
    "is_decisive",
    lambda lock, supervisors: lock.holder is not None,
)


@CORE.rule("written-before-sent", "is not on disk")
def unwritten_grant_is_sent(patch: Patch) -> None:
    """A grant is sent although its write failed."""

    def ignore(self: LockMachine, event: ev.Input) -> ev.Input:
        return ev.Persisted() if isinstance(event, ev.PersistFailed) else event

    hear(patch, ignore)


# A failed write is not retried.
CORE.put("written-again", STUCK, ledger, "RETRY_MS", 1e12)


@CORE.rule("witness-kept-while-on-file", "witness is removed")
def witness_is_removed_early(patch: Patch) -> None:
    """An ended incarnation's witness is removed while the file still names it."""
    end = Ledger.end

    def forget(self: Ledger, witness: Any) -> None:
        end(self, witness)
        early.append(witness)

    early: list[Any] = []
    handle = LockMachine.handle

    def handle_hastily(self: LockMachine, event: ev.Input, now_ms: float) -> list[ev.LockEffect]:
        effects = handle(self, event, now_ms)
        gone, early[:] = tuple(early), []
        return [ev.Discard(gone), *effects]

    patch.setattr(Ledger, "end", forget)
    patch.setattr(LockMachine, "handle", handle_hastily)


# ---------------------------------------------------------------------- a hand-over in place


@HAND_OVER.rule("server-waits-for-the-word", "without its word")
def no_word(patch: Patch) -> None:
    """The serving file is tried although its holder has not said that it handed over."""

    def every(locks: Any) -> Any:
        return [
            (lock.name, lock.holder)
            for lock in locks.values()
            if lock.is_fenced and lock.holder is not None and lock.holder.serving is not None
        ]

    patch.setattr(evidence, "handed_over", every)


# A serving file that was found free can still be joined for the token that is over.
HAND_OVER.put("server-seals", TWO, Server, "seal_serving", lambda self, tree, token: None, seed=35)


@HAND_OVER.rule("server-never-unseals", TWO, 265)
def seal_is_taken_off(patch: Patch) -> None:
    """The next grant takes the seal off."""
    handle = LockMachine.handle

    def reset(self: LockMachine, event: Any, now_ms: float) -> Any:
        effects = handle(self, event, now_ms)
        grants = (effect for effect in effects if isinstance(effect, ev.SendGrant))
        unsealed.extend(grant.holder.incarnation for grant in grants)
        return effects

    unsealed: list[str] = []
    perform = Server.perform

    def perform_and_reset(self: Server, effects: Any) -> None:
        while unsealed:
            self.world.trees[unsealed.pop()].length = 0
        perform(self, effects)

    patch.setattr(LockMachine, "handle", reset)
    patch.setattr(Server, "perform", perform_and_reset)


# Whatever file has the serving file's name is evidence.
HAND_OVER.put(
    "server-tries-the-filed-file",
    TWO,
    Server,
    "is_filed",
    lambda self, tree, holder: True,
    seed=320,
)


HAND_OVER.put("over-in-each-want", STUCK, Serving, "says_over", False)


HAND_OVER.rule("newest-connection", f"{STUCK}|not given its grant", 250)(older_connection_counts)


@HAND_OVER.rule("reaped-needs-the-witness", "without its word", 5)
def reaped_is_handed_over(patch: Patch) -> None:
    """The serving file proves that a tree is gone."""
    fire = Lock.fire

    def fire_and_believe(self: Lock, signal: Signal, now_ms: float, holder: Any = None) -> None:
        fire(self, signal, now_ms, holder)
        if signal is Signal.NOT_WANTED:
            self.is_handed_over = True

    patch.setattr(Lock, "fire", fire_and_believe)


@HAND_OVER.rule("lost-state-scans-serving-files", TWO, 965)
def serving_files_are_not_scanned(patch: Patch) -> None:
    """After a lost state, only witnesses count."""
    frees = recovery.scan_frees
    patch.setattr(
        recovery, "scan_frees", lambda locks, known, held, serving=(): frees(locks, known, held)
    )


HAND_OVER.put("join-first", TWO, Serving, "joins_first", False, seed=15)
HAND_OVER.put("join-the-own-file", TWO, Serving, "knows_its_file", False, seed=955)
HAND_OVER.put("leave-last", TWO, Serving, "leaves_last", False, seed=15)
HAND_OVER.put("close-never-unlock", TWO, Serving, "closes", False, seed=485)
HAND_OVER.put("low-descriptor", TWO, Serving, "on_low_descriptor", False, seed=310)
HAND_OVER.put("accepter-joins", TWO, Serving, "accepter_joins", False, seed=15)
HAND_OVER.put("look-in-proc", TWO, Serving, "looks_in_proc", False, seed=725)
HAND_OVER.put("only-from-active", TWO, Serving, "only_when_active", False, seed=17190)
HAND_OVER.put("ignore-old-grants", "which is over", Serving, "ignores_old_grants", False, seed=20)
HAND_OVER.put("give-way", STUCK, Serving, "gives_way", False, seed=55)


# ---------------------------------------------------------------------- told to end


@DEPARTURES.rule("leaver-is-not-granted", "is granted, and leaves")
def leaver_is_granted(patch: Patch) -> None:
    """An engine that leaves keeps its place in the queue."""

    def wait(self: LockMachine, event: ev.Input) -> ev.Input:
        if isinstance(event, ev.Wanted):
            leavers.discard(event.msg.supervisor)
        return event

    leavers: set[str] = set()
    hear(patch, wait)
    patch.setattr(SupervisorRecord, "may_wait_for", lambda self, lock: lock in self.locks)


@DEPARTURES.rule("successor-knows", "none vouched")
def any_waiter_is_a_successor(patch: Patch) -> None:
    """Whoever waits counts as a successor, whether or not it knows that the holder leaves."""
    adopt = SupervisorRecord.adopt

    class Everything(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    def vouch(self: SupervisorRecord, want: ev.Wanted) -> None:
        adopt(self, want)
        self.succeeds = Everything()

    patch.setattr(SupervisorRecord, "adopt", vouch)


DEPARTURES.put(
    "vouch-only-untold", "vouches, and was told to end", Departures, "vouches_untold", False
)
DEPARTURES.put(
    "settled-answer", "no engine vouched for them", Departures, "waits_for_settled", False
)
