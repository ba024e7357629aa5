"""What the lock machine is told, its effects, and what is filed of a holder: values, no
behaviour.

The shell (`server.py`, or a simulation) calls the machine's entries; effects go back to it, in
order. None has an answer.

A holder over TCP is filed with the length of its lease, and has no witness that this server could
lock: it is filed with device and inode 0, which no file has.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Annotated, Any

import msgspec

from lockserver.core.names import ServingFile, WitnessFile, WitnessState, name_of, serving_name_of
from lockserver.messages import (
    NO_ERA,
    GrantedMsg,
    HandOverMsg,
    RenewedMsg,
    StandbyMsg,
    SwitchedOverMsg,
    WantMsg,
)
from plumbing.errors import UnderstudyError

LEASE_MS_MAX = 3_600_000


def unlockable_witness(incarnation: str) -> WitnessFile:
    """The stand-in for a witness: a readable name, and a file that cannot exist."""
    return WitnessFile(name_of(incarnation), 0, 0)


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """The holder of a lock, as it is filed: enough to find the evidence again after a restart."""

    engine: str
    incarnation: str
    supervisor: str
    dev: int  # of its witness
    ino: int
    token: int
    since_mono_ms: float
    # Over TCP: the length of its lease, the evidence in place of the witness.
    lease_ms: Annotated[int, msgspec.Meta(ge=1, le=LEASE_MS_MAX)] | None = None
    # The evidence if it hands over in place: its serving file's device and inode.
    serving_id: tuple[int, int] | None = msgspec.field(name="serving", default=None)

    @property
    def witness(self) -> WitnessFile:
        return WitnessFile(name_of(self.incarnation), self.dev, self.ino)

    @property
    def serving(self) -> ServingFile | None:
        if self.serving_id is None:
            return None
        return ServingFile(serving_name_of(self.incarnation), *self.serving_id)


class LockRecord(msgspec.Struct, frozen=True):
    """The record on disk: the token, the holders, and the locks whose holder is unknown.

    `era`: which series of tokens this is; another one once no slot of the file could be read.
    """

    token: int = 0
    holders: Mapping[str, Holder] = {}
    unknown: frozenset[str] = frozenset()
    era: str = NO_ERA


NOTHING_FILED = LockRecord()

# ---------------------------------------------------------------------- what is told


class Wanted(msgspec.Struct, frozen=True):
    """A supervisor's complete want, with what the shell saw of its witness and its process."""

    conn: int  # grows with every connection that is accepted
    msg: WantMsg
    witness_file: WitnessFile | None = None
    witness_state: WitnessState = WitnessState.UNPROVEN
    pid: int = 0
    process: str = "none"  # where the pidfd came from; "lease": over TCP; "none": there is none
    lease_ms: int | None = None  # over TCP, from `Leases`: the evidence, in place of a witness file
    serving: ServingFile | None = None  # this incarnation's, if there is one


class SwitchOverAsked(msgspec.Struct, frozen=True):
    """A request to hand `lock` over to engine `to`, or to the first one waiting. `ask`: what the
    shell calls it. `drain`: no stream may be left for the next engine to continue."""

    ask: Hashable
    pid: int
    lock: str
    to: str | None
    timeout_ms: float
    drain: bool = False


# ---------------------------------------------------------------------- effects


class LockEffect(msgspec.Struct, frozen=True):
    """What the shell must do, at once and in order."""


class Send(LockEffect, frozen=True):
    conn: int
    message: GrantedMsg | StandbyMsg | HandOverMsg | RenewedMsg


class Announce(LockEffect, frozen=True):
    """Send the grant to every connected supervisor of this lock but the holder's, every gateway and
    observer."""

    supervisor: str  # the holder's
    message: GrantedMsg


class RefuseConnection(LockEffect, frozen=True):
    """Send an error frame and close."""

    conn: int
    code: str
    message: str
    details: Mapping[str, Any] = {}


class Close(LockEffect, frozen=True):
    conn: int
    reason: str


class Forget(LockEffect, frozen=True):
    """This supervisor's process no longer matters: stop watching it."""

    supervisor: str


class AnswerSwitchOver(LockEffect, frozen=True):
    """Tell who requested a switchover how it ended, or why it was not begun."""

    ask: Hashable
    answer: SwitchedOverMsg | UnderstudyError


class Happened(LockEffect, frozen=True):
    """An event to record."""

    type: str
    message: str
    severity: str = "info"
    data: Mapping[str, Any] = {}


def grant_of(lock: str, holder: Holder, era: str, *, is_leaving: bool = False) -> GrantedMsg:
    """The message that says who holds the lock."""
    who = holder.engine, holder.incarnation, holder.token
    return GrantedMsg(lock, *who, era, is_leaving)
