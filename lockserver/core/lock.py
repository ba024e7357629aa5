"""Which locks there are, and one lock with its four states and its queue.

A pod, or each of its models, has one lock, `active`, whose holder serves the model. This is the
table of what may change a lock:

    free ──granted──▶ held ──not wanted, process gone, connection closed──▶ releasing
     ▲                 ▲ │ ◀──────── confirmed (its own want) ───────────────┘ ▲ │
     │                 │ └───────────── handed over ───────────────────────────┘ │
     │                 └── confirmed, claimed ── recovering                      │
     └────────────────── evidence gone ◀───────────┴────────────────────────────┘

No engine is granted a lock in `releasing` or `recovering`, however long that takes. The only way to
`free` is EVIDENCE_GONE: `machine.py` decides what may give that signal, on one host a witness that
the server itself locked and sealed. `held` may go to `free` directly: a silent
holder whose witness is free is dead, even if another process keeps its connection open.

A holder that hands over in place says so and lives on. From then on, and only then, its serving
file is evidence too. If its supervisor says later that it has been reaped, the witness alone counts
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lockserver.core.events import NOTHING_FILED, Holder, LockRecord
from lockserver.messages import StandbyMsg
from plumbing.errors import InvariantError
from plumbing.pod.models import ACTIVE, lock_of
from plumbing.transitions import Table


def locks_of(models: Sequence[str], record: LockRecord = NOTHING_FILED) -> tuple[str, ...]:
    """The locks of these models; of a pod without models, if there are none. Also those that are
    held on file although the settings no longer have them: while it lives, its lock is not
    forgotten."""
    filed = (name for name in record.holders if name.startswith(ACTIVE))  # older ones had another
    return tuple(dict.fromkeys((*map(lock_of, models or ("",)), *filed)))


@dataclass(frozen=True, slots=True)
class Waiter:
    """One incarnation's place in a lock's queue."""

    supervisor: str
    engine: str
    incarnation: str
    since_ms: float


class LockState(StrEnum):
    FREE = "free"
    HELD = "held"
    RELEASING = "releasing"
    RECOVERING = "recovering"


class Signal(StrEnum):
    GRANTED = "granted"
    CONFIRMED = "confirmed"
    CLAIMED = "claimed"
    NOT_WANTED = "not_wanted"
    HANDED_OVER = "handed_over"  # the holder says so, and lives on
    PROCESS_GONE = "process_gone"
    CONNECTION_CLOSED = "connection_closed"
    EVIDENCE_GONE = "evidence_gone"


LOST = (
    Signal.NOT_WANTED,
    Signal.HANDED_OVER,
    Signal.PROCESS_GONE,
    Signal.CONNECTION_CLOSED,
)
TABLE = Table(
    {
        (LockState.FREE, Signal.GRANTED): LockState.HELD,
        **{(LockState.HELD, signal): LockState.RELEASING for signal in LOST},
        (LockState.HELD, Signal.EVIDENCE_GONE): LockState.FREE,
        (LockState.RELEASING, Signal.CONFIRMED): LockState.HELD,
        (LockState.RELEASING, Signal.EVIDENCE_GONE): LockState.FREE,
        (LockState.RECOVERING, Signal.CONFIRMED): LockState.HELD,
        (LockState.RECOVERING, Signal.CLAIMED): LockState.HELD,
        (LockState.RECOVERING, Signal.NOT_WANTED): LockState.RELEASING,
        (LockState.RECOVERING, Signal.HANDED_OVER): LockState.RELEASING,
        (LockState.RECOVERING, Signal.EVIDENCE_GONE): LockState.FREE,
    },
    stays={LockState.HELD: (Signal.CONFIRMED,), LockState.RELEASING: LOST},
    start=(LockState.FREE, LockState.RECOVERING),
)


class IllegalLockTransition(InvariantError):
    """A signal that the table does not have for this state. The state is unchanged."""


@dataclass(slots=True)
class Lock:
    """One lock and its queue."""

    name: str
    state: LockState = LockState.FREE
    holder: Holder | None = None
    waiters: list[Waiter] = field(default_factory=list)
    is_ended: bool = False  # its supervisor says that the holder has ended it: never confirmed
    is_handed_over: bool = False  # ... in place: its serving file is evidence as well
    cause: str | None = None  # why it is not simply held
    lost_ms: float | None = None  # when the last holder was lost, and when its end was certain
    fenced_ms: float | None = None
    is_reported: bool = False  # what this state waits for has been reported
    previous: Holder | None = None
    preferred: str | None = None  # the engine that a switchover wants the next grant to go to
    told: tuple[int, int, StandbyMsg] | None = None  # the last one; its connection and token

    @property
    def is_unknown(self) -> bool:
        """An engine may hold it, but the state file does not say which."""
        return self.state is LockState.RECOVERING and self.holder is None

    @property
    def may_serve(self) -> bool:
        """Whether an engine that holds it may be alive and accepting connections.

        A cut connection and a restart of this server prove nothing about the holder's backend.
        """
        return self.state in (LockState.HELD, LockState.RECOVERING) or (
            self.state is LockState.RELEASING and self.cause == Signal.CONNECTION_CLOSED
        )

    def is_held_by(self, incarnation: str | None) -> bool:
        """Whether this incarnation is the holder, in whatever state."""
        return self.holder is not None and self.holder.incarnation == incarnation

    def remove_waiter(self, supervisor: str, but: str | None = None) -> None:
        """Take this supervisor out of the queue, unless it waits as incarnation `but`."""
        self.waiters = [
            each
            for each in self.waiters
            if each.supervisor != supervisor or each.incarnation == but
        ]

    def fire(self, signal: Signal, now_ms: float, holder: Holder | None = None) -> None:
        """Apply one signal; `holder` comes with GRANTED and CLAIMED, and only with these.

        Raises:
            IllegalLockTransition: nothing has changed.
        """
        target = TABLE.target(self.state, signal)
        names_holder = signal in (Signal.GRANTED, Signal.CLAIMED)
        is_lawful = names_holder == (holder is not None)
        if signal in (Signal.CONFIRMED, Signal.HANDED_OVER):
            is_lawful = is_lawful and self.holder is not None and not self.is_ended
        if signal is Signal.CLAIMED:
            is_lawful = is_lawful and self.is_unknown
        if target is None or not is_lawful:
            raise IllegalLockTransition(f"lock {self.name}: {signal} in state {self.state}")
        self._enter(target, signal, now_ms, holder)

    def _enter(
        self, target: LockState, signal: Signal, now_ms: float, holder: Holder | None
    ) -> None:
        if target is LockState.HELD:
            self.holder, self.told = holder or self.holder, None
            self.cause, self.is_reported = None, False
            self.lost_ms = self.fenced_ms = None
        elif target is LockState.RELEASING:
            self.lost_ms = now_ms if self.lost_ms is None else self.lost_ms
            if not self.is_ended:  # the supervisor's own want outweighs its connection
                self.cause = str(signal)
            if signal in (Signal.NOT_WANTED, Signal.HANDED_OVER):
                self.is_ended, self.cause = True, str(signal)
                self.is_handed_over = signal is Signal.HANDED_OVER
        else:
            self.lost_ms = now_ms if self.lost_ms is None else self.lost_ms
            self.fenced_ms = now_ms
            self.previous, self.holder = self.holder, None
            self.is_ended, self.is_handed_over = False, False
            self.cause, self.is_reported = None, False
        self.state = target
