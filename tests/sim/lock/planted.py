"""The rules of docs/lock.md, each left out: the simulation must detect every one.

A function stands for one rule: it takes the place of one function of the real core, or of what
surrounds it, and its docstring says what happens without the rule. `real` is the function that it
replaces. The engine's own rules are attributes of `Serving` and `Departures`.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core import machine, recovery, supervisors
from lockserver.core.lock import Lock, LockState, Signal
from lockserver.core.machine import Ledger, LockMachine
from lockserver.core.names import ServingFile, WitnessState
from lockserver.core.supervisors import SupervisorRecord
from lockserver.messages import GrantedMsg
from tests.sim.kit import Patch, PlantedRules
from tests.sim.lock.engines import Departures, Tree
from tests.sim.lock.faults import Faults
from tests.sim.lock.server import Server
from tests.sim.lock.serving import Serving

LIVES = r"while .* lives|two active"
STUCK = "no engine serves|waits for the dead|is free while|was not given its grant"
TWO = "two terms|serves under"
ORDER = f"{STUCK}|supervisor lives|known dead|was there before"

FEARED = PlantedRules()  # what the design fears most
CORE = PlantedRules()
HAND_OVER = PlantedRules()  # promise 7, H1 to H18 in order
DEPARTURES = PlantedRules()


@FEARED.instead("grant-on-eof", rf"{LIVES}|supervisor lives", LockMachine, "_lose")
def grant_on_eof(real: Any, self: LockMachine, lock: Lock, signal: Signal, now_ms: float) -> Any:
    """A closed connection counts as a dead holder."""
    yield from real(self, lock, signal, now_ms)
    if signal is Signal.CONNECTION_CLOSED and lock.holder is not None:
        yield from self._free(lock, now_ms)


@FEARED.instead("grant-not-persisted", "is not on disk", Ledger, "_record")
def grant_not_persisted(real: Any, self: Ledger, locks: Any, granted: Any) -> ev.LockRecord:
    """A grant is sent, but the state before it is written."""
    return real(self, locks, None)


@FEARED.instead("holder-on-file-ignored", LIVES, LockMachine, "__init__")
def holder_on_file_ignored(real: Any, self: LockMachine, record: Any, *now: Any, **more: Any):
    """A restarted server takes every lock to be free."""
    real(self, replace(record, holders={}, unknown=frozenset()), *now, **more)


@FEARED.instead("witness-ignored", LIVES, Server, "moves")
def witness_ignored(real: Any, self: Server) -> list[tuple[Any, Any]]:
    """Every witness looks free to the server."""
    found = real(self)
    if self.machine is not None:
        for lock, incarnation, file, _ in recovery.evidence_due(
            self.machine.locks, self.machine.supervisors
        ):
            if not isinstance(file, ServingFile):
                found.append((self.probe, (lock, self.world.trees[incarnation])))
    return found


# ---------------------------------------------------------------------- rules of the core


def older_connection_counts(real: Any, self: SupervisorRecord, want: ev.Wanted) -> bool:
    """A late message from an older connection counts as new."""
    return False


CORE.instead(
    "newest-connection", "not given its grant|waits|does not wait", SupervisorRecord, "has_outrun"
)(older_connection_counts)


@CORE.rule("old-eof", ORDER)
def old_eof_counts(patch: Patch) -> None:
    """The end of a replaced connection counts as the end of the new one."""
    older: dict[LockMachine, dict[int, str]] = {}
    wanted, closed = LockMachine.wanted, LockMachine.connection_closed

    def note(self: LockMachine, now_ms: float, want: ev.Wanted) -> list[ev.LockEffect]:
        older.setdefault(self, {})[want.conn] = want.msg.supervisor
        return wanted(self, now_ms, want)

    def confuse(self: LockMachine, now_ms: float, conn: int) -> list[ev.LockEffect]:
        known = self.supervisors.get(older.get(self, {}).get(conn, ""))
        is_back = known is not None and known.conn is not None
        return closed(self, now_ms, known.conn if is_back else conn)

    patch.setattr(LockMachine, "wanted", note)
    patch.setattr(LockMachine, "connection_closed", confuse)


@CORE.instead("unnamed-is-over", f"{STUCK}|no longer asks", LockMachine, "_end_unnamed")
def unnamed_lives_on(real: Any, self: LockMachine, supervisor: Any, now_ms: float) -> list[Any]:
    """An incarnation that a want no longer names is not over."""
    return []


@CORE.instead("claims-only-when-unreadable", f"{LIVES}|second one|on disk", LockMachine, "_ask")
def any_claim_is_believed(real: Any, self: LockMachine, want: ev.Wanted, now_ms: float) -> Any:
    """A claim with a token is believed although the state file was readable."""
    lock = self.locks[want.msg.lock]
    is_other = lock.holder is None or lock.holder.incarnation != want.msg.incarnation
    if want.msg.token and is_other and want.witness_state is WitnessState.HELD:
        lock.state, lock.holder = LockState.RECOVERING, None
        lock.is_ended = False
    yield from real(self, want, now_ms)


@CORE.instead("held-witness-to-ask", "asked with a free witness", LockMachine, "wanted")
def free_witness_is_let_in(real: Any, self: LockMachine, now_ms: float, want: ev.Wanted) -> Any:
    """Every requester that was looked at counts as alive."""
    return real(self, now_ms, replace(want, witness_state=WitnessState.HELD))


# A witness that was found free can still be joined.
CORE.put("seal", LIVES, Server, "seal", lambda self, tree: None)


@CORE.instead("witness-in-every-process-on-a-device", LIVES, Faults, "start_helper")
def helper_opens_a_device(real: Any, self: Faults, tree: Tree) -> None:
    """A process of the tree that does not hold the witness opens the device."""
    real(self, tree)
    tree.has_helper_on_device = True


@CORE.instead("same-grant-again", "was not given its grant", LockMachine, "_confirm")
def grant_is_not_repeated(real: Any, *asked: Any) -> Any:
    """A holder that asks again is not sent its grant again."""
    return (effect for effect in real(*asked) if not isinstance(effect, ev.Send))


@CORE.instead("silent-waiter-passed-over", "granted in its silence", machine, "next_of")
def silent_waiter_is_granted(real: Any, lock: Lock, supervisors: Any) -> Any:
    """The first waiter is granted the lock even if it is silent."""
    return next(iter(lock.waiters), None)


@CORE.instead("fifo", "was there before", machine, "next_of")
def last_comes_first(real: Any, lock: Lock, supervisors: Any) -> Any:
    """The newest waiter is granted."""
    heard = (each for each in lock.waiters[::-1] if not supervisors[each.supervisor].is_silent)
    return next(heard, None)


@CORE.instead("silent-holder-is-tried", "waits for the dead", recovery, "is_decisive")
def silent_holder_is_not_tried(real: Any, lock: Lock, supervisors: Any) -> bool:
    """A free witness of a silent holder does not free the lock."""
    known = supervisors.get(lock.holder.supervisor) if lock.holder is not None else None
    return real(lock, supervisors) and (known is None or lock.is_ended)


@CORE.instead("silent-holder-keeps-it", LIVES, recovery, "fall_silent")
def silent_holder_is_gone(real: Any, locks: Any, supervisors: Any, heard_before_ms: float) -> Any:
    """Silence counts as death."""
    yield from real(locks, supervisors, heard_before_ms)
    for lock in locks.values():
        known = supervisors.get(lock.holder.supervisor) if lock.holder is not None else None
        if known is not None and known.is_silent:
            lock.fire(Signal.EVIDENCE_GONE, heard_before_ms)


@CORE.instead("no-window", LIVES, recovery, "report_overdue")
def the_window_ends(real: Any, locks: Any, now_ms: float, window_end_ms: float) -> Any:
    """A holder that is silent for some time after a restart has lost the lock."""
    for lock in locks.values():
        if lock.state is LockState.RECOVERING and now_ms > window_end_ms - 8000:
            lock.fire(Signal.EVIDENCE_GONE, now_ms)
    return ()


@CORE.instead("stall-is-forgiven", "is free while|lives and is heard", recovery, "forgive")
def stall_is_silence(real: Any, supervisors: Any, now_ms: float) -> None:
    """After a stall of the server, every supervisor counts as silent."""


@CORE.instead("lost-file-is-unknown", LIVES, LockMachine, "__init__")
def lost_file_is_an_empty_one(real: Any, self: LockMachine, record: Any, *now: Any, **more: Any):
    """Unreadable state counts as "no holder"."""
    real(self, replace(record, unknown=frozenset()), *now, **more)


@CORE.instead("strangers-count", LIVES, recovery, "scan_frees")
def strangers_do_not_count(real: Any, locks: Any, known: Any, held: Any, serving: Any = ()) -> Any:
    """With the state lost, witnesses of engines that are not connected are ignored."""
    return real(locks, known, (), serving)


GONE = "known dead|KeyError|AssertionError"


@CORE.instead("disconnected-leave", GONE, LockMachine, "_leave_queue")
def the_disconnected_wait_on(real: Any, self: LockMachine, supervisor: Any) -> None:
    """A disconnected waiter keeps its place in the queue."""


@CORE.rule("one-supervisor", "two supervisors")
def twins_are_let_in(patch: Patch) -> None:
    """A second supervisor of an engine is accepted."""
    for module in (machine, supervisors):
        patch.setattr(module, "twins_of", lambda want, supervisors: [])


@CORE.instead("pidfd", "while its supervisor lives", recovery, "is_decisive")
def the_process_does_not_count(real: Any, lock: Lock, supervisors: Any) -> bool:
    """A free witness alone proves that a holder is gone."""
    return lock.holder is not None


@CORE.instead("written-before-sent", "is not on disk", Ledger, "__init__")
def unwritten_grant_is_sent(real: Any, self: Ledger, record: Any, write: Any) -> None:
    """A grant is sent although its write failed."""
    real(self, record, lambda due: write(due) and None)


# A failed write is not retried.
CORE.put("written-again", STUCK, machine, "RETRY_MS", 1e12)


# ---------------------------------------------------------------------- a hand-over in place


@HAND_OVER.instead("server-waits-for-the-word", "without its word", recovery, "evidence_due")
def no_word(real: Any, locks: Any, known: Any) -> Any:
    """The serving file is tried although its holder has not said that it handed over."""
    held = [(lock.name, lock.holder) for lock in locks.values() if lock.holder is not None]
    return [each for each in real(locks, known) if not isinstance(each.file, ServingFile)] + [
        recovery.DueEvidence(name, holder.incarnation, holder.serving, holder.token)
        for name, holder in held
        if holder.serving is not None
    ]


@HAND_OVER.instead("server-seals", TWO, Server, "seal_serving", seed=35)
def no_seal(real: Any, self: Server, tree: Tree, token: int) -> None:
    """A serving file that was found free can still be joined for the token that is over."""


@HAND_OVER.instead("server-never-unseals", TWO, Server, "perform", seed=1660)
def seal_is_taken_off(real: Any, self: Server, effects: Any) -> None:
    """The next grant takes the seal off."""
    for effect in effects:
        if isinstance(getattr(effect, "message", None), GrantedMsg):
            self.world.trees[effect.message.incarnation].length = 0
    real(self, effects)


@HAND_OVER.instead("server-tries-the-filed-file", TWO, Server, "is_filed", seed=320)
def any_file_will_do(real: Any, self: Server, tree: Tree, file: ServingFile) -> bool:
    """Whatever file has the serving file's name is evidence."""
    return True


HAND_OVER.put("over-in-each-want", STUCK, Serving, "says_over", False)
HAND_OVER.instead(
    "newest-connection", f"{STUCK}|not given its grant", SupervisorRecord, "has_outrun", seed=250
)(older_connection_counts)


@HAND_OVER.instead("reaped-needs-the-witness", "without its word", Lock, "fire", seed=5)
def reaped_is_handed_over(real: Any, self: Lock, signal: Signal, *more: Any, **named: Any) -> None:
    """The serving file proves that a tree is gone."""
    real(self, signal, *more, **named)
    if signal is Signal.NOT_WANTED:
        self.is_handed_over = True


@HAND_OVER.instead("lost-state-scans-serving-files", TWO, recovery, "scan_frees", seed=965)
def serving_files_are_not_scanned(
    real: Any, locks: Any, known: Any, held: Any, serving: Any = ()
) -> Any:
    """After a lost state, only witnesses count."""
    return real(locks, known, held)


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

LEAVES = "is granted, and leaves"
VOUCHES = "vouches, and was told to end"
UNVOUCHED = "no engine vouched for them"


@DEPARTURES.rule("leaver-is-not-granted", LEAVES)
def leaver_is_granted(patch: Patch) -> None:
    """An engine that leaves keeps its place in the queue."""
    patch.setattr(SupervisorRecord, "may_wait", property(lambda self: self.said.is_wanted))


class Everything(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@DEPARTURES.instead("successor-knows", "none vouched", SupervisorRecord, "adopt")
def any_waiter_is_a_successor(real: Any, self: SupervisorRecord, want: ev.Wanted) -> None:
    """Whoever waits counts as a successor, whether or not it knows that the holder leaves."""
    msg = replace(want.msg, succeeds=Everything())
    real(self, replace(want, msg=msg))


DEPARTURES.put("vouch-only-untold", VOUCHES, Departures, "vouches_untold", False)
DEPARTURES.put("settled-answer", UNVOUCHED, Departures, "waits_for_settled", False)
