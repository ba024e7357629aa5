"""Four bugs planted in the lock machine: those that the design fears most.

One function per bug; it patches the real machine, or its input. `caught` is a regular expression
for the law's message. The rules of the design are in `lock_broken_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lockserver.core import events as ev
from lockserver.core import evidence
from lockserver.core.ledger import Ledger
from lockserver.core.lock import Lock, Signal
from lockserver.core.machine import LockMachine
from tests.sim.lock_shell import Shell

Patch = pytest.MonkeyPatch
LIVES = r"while .* lives|two active"


@dataclass(frozen=True)
class Rule:
    """`leave_out` breaks it; then some schedule must fail with `caught`."""

    name: str
    leave_out: Callable[[Patch], None]
    caught: str  # a regular expression


def grant_on_eof(patch: Patch) -> None:
    """A closed connection counts as a dead holder."""
    lose = LockMachine._lose

    def lose_at_once(self: LockMachine, lock: Lock, signal: Signal, now_ms: float) -> Any:
        yield from lose(self, lock, signal, now_ms)
        if signal is Signal.CONNECTION_CLOSED and lock.holder is not None:
            yield from self._free(lock, now_ms)

    patch.setattr(LockMachine, "_lose", lose_at_once)


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


def holder_on_file_ignored(patch: Patch) -> None:
    """A restarted server takes every lock to be free."""
    init = LockMachine.__init__

    def forget(self: LockMachine, record: ev.LockRecord, now_ms: float, **options: Any) -> None:
        init(self, replace(record, holders={}, unknown=frozenset()), now_ms, **options)

    patch.setattr(LockMachine, "__init__", forget)


def witness_ignored(patch: Patch) -> None:
    """Every witness looks free to the server."""
    moves = Shell.moves

    def probing(self: Shell) -> list[tuple[Any, Any]]:
        found = moves(self)
        if self.machine is not None:
            for lock, holder in evidence.probes_due(self.machine.locks, self.machine.supervisors):
                found.append((self.probe, (lock, self.world.trees[holder.incarnation])))
        return found

    patch.setattr(Shell, "moves", probing)


PLANTED = [
    Rule("grant-on-eof", grant_on_eof, rf"{LIVES}|supervisor lives"),
    Rule("grant-not-persisted", grant_not_persisted, "is not on disk"),
    Rule("holder-on-file-ignored", holder_on_file_ignored, LIVES),
    Rule("witness-ignored", witness_ignored, LIVES),
]


def hear(patch: Patch, change: Callable[[LockMachine, ev.Input], ev.Input]) -> None:
    """Feed the machine something else."""
    handle = LockMachine.handle

    def handle_changed(self: LockMachine, event: ev.Input, now_ms: float) -> list[ev.LockEffect]:
        return handle(self, change(self, event), now_ms)

    patch.setattr(LockMachine, "handle", handle_changed)
