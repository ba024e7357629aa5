"""The rules of the lock's design, each left out: the simulation must detect every one.

One function per rule; it patches the real core (or what surrounds it) so that the rule does not
hold. docs/lock.md and the docstring of `machine.py` explain why each rule exists.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from lockserver.core import events as ev
from lockserver.core import evidence, ledger, machine, supervisors
from lockserver.core.ledger import Ledger
from lockserver.core.lock import Lock, LockState, Signal, Waiter
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessState
from lockserver.core.supervisors import SupervisorRecord
from tests.sim.lock_faults import Faults
from tests.sim.lock_parts import Tree
from tests.sim.lock_planted import LIVES, Patch, Rule, hear
from tests.sim.lock_shell import Shell

STUCK = "no engine serves|waits for the dead|is free while|was not given its grant"


def older_connection_counts(patch: Patch) -> None:
    """A late message from an older connection counts as new."""
    adopt = SupervisorRecord.adopt

    def forget_order(self: SupervisorRecord, want: ev.Wanted) -> None:
        adopt(self, want)
        self.newest = -1

    patch.setattr(SupervisorRecord, "adopt", forget_order)


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


def unnamed_lives_on(patch: Patch) -> None:
    """An incarnation that a want no longer names is not over."""
    patch.setattr(LockMachine, "_end_unnamed", lambda self, supervisor, now_ms: [])


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


def free_witness_is_let_in(patch: Patch) -> None:
    """Every requester that was looked at counts as alive."""

    def as_held(self: LockMachine, event: ev.Input) -> ev.Input:
        if isinstance(event, ev.Wanted) and event.witness_state is not WitnessState.UNSEEN:
            return msgspec.structs.replace(event, witness_state=WitnessState.HELD)
        return event

    hear(patch, as_held)


def unseen_counts(patch: Patch, state: WitnessState) -> None:
    """What could not be looked at is taken for `state`."""

    def take(self: LockMachine, event: ev.Input) -> ev.Input:
        if isinstance(event, ev.Wanted) and event.witness_state is WitnessState.UNSEEN:
            return msgspec.structs.replace(event, witness_state=state)
        return event

    hear(patch, take)


def unseen_is_held(patch: Patch) -> None:
    """A requester whose witness could not be looked at counts as alive."""
    unseen_counts(patch, WitnessState.HELD)


def unseen_is_unproven(patch: Patch) -> None:
    """A requester whose witness could not be looked at is refused."""
    unseen_counts(patch, WitnessState.UNPROVEN)


def no_seal(patch: Patch) -> None:
    """A witness that was found free can still be joined."""
    patch.setattr(Shell, "seal", lambda self, tree: None)


def helper_opens_a_device(patch: Patch) -> None:
    """A process of the tree that does not hold the witness opens the device."""
    start = Faults.start_helper

    def start_on_device(self: Faults, tree: Tree) -> None:
        start(self, tree)
        tree.has_helper_on_device = True

    patch.setattr(Faults, "start_helper", start_on_device)


def grant_is_not_repeated(patch: Patch) -> None:
    """A holder that asks again is not sent its grant again."""
    confirm = LockMachine._confirm

    def confirm_silently(self: LockMachine, lock: Lock, conn: int, now_ms: float) -> Any:
        effects = confirm(self, lock, conn, now_ms)
        return (effect for effect in effects if not isinstance(effect, ev.SendGrant))

    patch.setattr(LockMachine, "_confirm", confirm_silently)


def silent_waiter_is_granted(patch: Patch) -> None:
    """The first waiter is granted the lock even if it is silent."""

    def first(waiters: list[Waiter], silent: Any, preferred: str | None = None) -> Waiter | None:
        return waiters[0] if waiters else None

    patch.setattr(ledger, "next_waiter", first)


def last_comes_first(patch: Patch) -> None:
    """The newest waiter is granted."""
    first = ledger.next_waiter

    def last(waiters: list[Waiter], silent: Any, preferred: str | None = None) -> Waiter | None:
        return first(waiters[::-1], silent)

    patch.setattr(ledger, "next_waiter", last)


def silent_holder_is_not_tried(patch: Patch) -> None:
    """A free witness of a silent holder does not free the lock."""
    decisive = evidence.is_decisive

    def unless_silent(lock: Lock, supervisors: Any) -> bool:
        known = supervisors.get(lock.holder.supervisor) if lock.holder is not None else None
        return decisive(lock, supervisors) and (known is None or lock.is_ended)

    patch.setattr(evidence, "is_decisive", unless_silent)


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


def the_window_ends(patch: Patch) -> None:
    """A holder that is silent for some time after a restart has lost the lock."""

    def give_up(locks: Any, now_ms: float, window_end_ms: float) -> Any:
        for lock in locks.values():
            if lock.state is LockState.RECOVERING and now_ms > window_end_ms - 8000:
                lock.fire(Signal.EVIDENCE_GONE, now_ms)
        return ()

    patch.setattr(evidence, "report_overdue", give_up)


def stall_is_silence(patch: Patch) -> None:
    """After a stall of the server, every supervisor counts as silent."""
    patch.setattr(evidence, "forgive", lambda supervisors, now_ms: None)


def lost_file_is_an_empty_one(patch: Patch) -> None:
    """Unreadable state counts as "no holder"."""
    init = LockMachine.__init__

    def forget(self: LockMachine, record: ev.LockRecord, now_ms: float, **options: Any) -> None:
        init(self, replace(record, unknown=frozenset()), now_ms, **options)

    patch.setattr(LockMachine, "__init__", forget)


def strangers_do_not_count(patch: Patch) -> None:
    """With the state lost, witnesses of engines that are not connected are ignored."""
    frees = evidence.scan_frees
    patch.setattr(
        evidence,
        "scan_frees",
        lambda locks, known, held, serving=(): frees(locks, known, (), serving),
    )


def the_disconnected_wait_on(patch: Patch) -> None:
    """A disconnected waiter keeps its place in the queue."""
    patch.setattr(LockMachine, "_leave_queues", lambda self, supervisor_id: None)


def twins_are_let_in(patch: Patch) -> None:
    """A second supervisor of an engine is accepted."""
    for module in (machine, supervisors):
        patch.setattr(module, "twins_of", lambda want, supervisors: [])


def the_process_does_not_count(patch: Patch) -> None:
    """A free witness alone proves that a holder is gone."""
    patch.setattr(evidence, "is_decisive", lambda lock, supervisors: lock.holder is not None)


def unwritten_grant_is_sent(patch: Patch) -> None:
    """A grant is sent although its write failed."""

    def ignore(self: LockMachine, event: ev.Input) -> ev.Input:
        return ev.Persisted() if isinstance(event, ev.PersistFailed) else event

    hear(patch, ignore)


def failed_write_is_final(patch: Patch) -> None:
    """A failed write is not retried."""
    patch.setattr(ledger, "RETRY_MS", 1e12)


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


MODEL = [
    Rule("newest-connection", older_connection_counts, "not given its grant|waits|does not wait"),
    Rule("old-eof", old_eof_counts, f"{STUCK}|supervisor lives|known dead|was there before"),
    Rule("unnamed-is-over", unnamed_lives_on, f"{STUCK}|no longer asks"),
    Rule("claims-only-when-unreadable", any_claim_is_believed, f"{LIVES}|second one|on disk"),
    Rule("held-witness-to-ask", free_witness_is_let_in, "asked with a free witness"),
    Rule("unseen-lets-nobody-in", unseen_is_held, "does not wait, or is known dead"),
    Rule("unseen-puts-nobody-out", unseen_is_unproven, "refused without a look"),
    Rule("seal", no_seal, LIVES),
    Rule("witness-in-every-process-on-a-device", helper_opens_a_device, LIVES),
    Rule("same-grant-again", grant_is_not_repeated, "was not given its grant"),
    Rule("silent-waiter-passed-over", silent_waiter_is_granted, "granted in its silence"),
    Rule("fifo", last_comes_first, "was there before"),
    Rule("silent-holder-is-tried", silent_holder_is_not_tried, "waits for the dead"),
    Rule("silent-holder-keeps-it", silent_holder_is_gone, LIVES),
    Rule("no-window", the_window_ends, LIVES),
    Rule("stall-is-forgiven", stall_is_silence, "is free while|lives and is heard"),
    Rule("lost-file-is-unknown", lost_file_is_an_empty_one, LIVES),
    Rule("strangers-count", strangers_do_not_count, LIVES),
    Rule("disconnected-leave", the_disconnected_wait_on, "known dead|KeyError|AssertionError"),
    Rule("one-supervisor", twins_are_let_in, "two supervisors"),
    Rule("pidfd", the_process_does_not_count, "while its supervisor lives"),
    Rule("written-before-sent", unwritten_grant_is_sent, "is not on disk"),
    Rule("written-again", failed_write_is_final, STUCK),
    Rule("witness-kept-while-on-file", witness_is_removed_early, "witness is removed"),
]
