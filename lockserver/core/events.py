"""The inputs and effects of the lock machine, and what is filed of a holder: values, no behaviour.

Inputs come from the shell (`server.py`, or a simulation); effects go back to it, in order. The only
effect with an answer is `Persist`: the shell hands in `Persisted` or `PersistFailed` before
anything else, so that nothing is ever sent that is not on disk.

A holder over TCP is filed with the length of its lease, and has no witness that this server could
lock. It is filed with device and inode 0, which no file has: a server that does not know leases and
reads this file finds the witness unproven, makes no grant and reports why. That is why the file's
schema is the same as without leases; a new number would look like a lost state to it, and after a
lost state a lock is free as soon as no local process holds a witness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lockserver.core.names import (
    ServingFile,
    WitnessFile,
    WitnessState,
    name_of,
    serving_name_of,
)
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


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lock, as it is filed: enough to find the evidence again after a restart."""

    engine: str
    incarnation: str
    supervisor: str
    witness: WitnessFile
    token: int
    since_mono_ms: float
    lease_ms: int | None = None  # over TCP: its lease is the evidence, in place of the witness
    serving: ServingFile | None = None  # the evidence if it hands over in place

    def to_dict(self) -> dict[str, Any]:
        serving = {} if self.serving is None else {"serving": [self.serving.dev, self.serving.ino]}
        return {
            "engine": self.engine,
            "incarnation": self.incarnation,
            "supervisor": self.supervisor,
            "witness": self.witness.name,
            "dev": self.witness.dev,
            "ino": self.witness.ino,
            "token": self.token,
            "since_mono_ms": self.since_mono_ms,
            **({} if self.lease_ms is None else {"lease": {"ms": self.lease_ms}}),
            **serving,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Holder:
        """The holder that `to_dict` wrote; KeyError, TypeError or ValueError if malformed."""
        lease, serving = raw.get("lease"), raw.get("serving")
        return cls(
            engine=str(raw["engine"]),
            incarnation=str(raw["incarnation"]),
            supervisor=str(raw["supervisor"]),
            witness=WitnessFile(str(raw["witness"]), int(raw["dev"]), int(raw["ino"])),
            token=int(raw["token"]),
            since_mono_ms=float(raw["since_mono_ms"]),
            lease_ms=None if lease is None else _lease_ms(lease["ms"]),
            serving=None if serving is None else _serving(str(raw["incarnation"]), *serving),
        )


def _lease_ms(ms: int) -> int:
    if not 1 <= int(ms) <= LEASE_MS_MAX:
        raise ValueError(f"invalid lease: {ms} ms")
    return int(ms)


def _serving(incarnation: str, dev: int, ino: int) -> ServingFile:
    return ServingFile(serving_name_of(incarnation), int(dev), int(ino))


@dataclass(frozen=True, slots=True)
class LockRecord:
    """The record on disk: the token, the holders, and the locks whose holder is unknown.

    `era`: which series of tokens this is; another one once no slot of the file could be read.
    """

    token: int = 0
    holders: Mapping[str, Holder] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()
    era: str = NO_ERA


# ---------------------------------------------------------------------- inputs


class Input(msgspec.Struct, frozen=True):
    """What has happened."""


class Wanted(Input, frozen=True):
    """A supervisor's complete want, with what the shell saw of its witness and its process."""

    conn: int  # grows with every connection that is accepted
    msg: WantMsg
    witness_file: WitnessFile | None = None
    witness_state: WitnessState = WitnessState.UNPROVEN
    pid: int = 0
    process: str = "none"  # where the pidfd came from; "lease": over TCP; "none": there is none
    lease_ms: int | None = None  # over TCP, from `Leases`: the evidence, in place of a witness file
    serving: ServingFile | None = None  # this incarnation's, if there is one


class Beaten(Input, frozen=True):
    conn: int
    progress: int


class ConnectionClosed(Input, frozen=True):
    conn: int


class ProcessGone(Input, frozen=True):
    """The pidfd of a supervisor has become readable."""

    supervisor: str


class WitnessFree(Input, frozen=True):
    """The witness that `probes_due` named was found free and has been sealed."""

    lock: str
    incarnation: str


class ServingFileFree(Input, frozen=True):
    """The serving file that `handed_over` named was found free and has been sealed at `token`."""

    lock: str
    incarnation: str
    token: int


class DirectoryScanned(Input, frozen=True):
    """The witnesses and serving files in the directory that are held. Unknown witnesses that are
    free have been sealed, and so have serving files, at `sealed`, if one look could settle it."""

    held: frozenset[str]
    serving: frozenset[str] = frozenset()
    sealed: int = 0


class Persisted(Input, frozen=True):
    pass


class PersistFailed(Input, frozen=True):
    reason: str


class TimePassed(Input, frozen=True):
    """Time has passed; handed in several times per `silent_ms`."""


class SwitchOverAsked(Input, frozen=True):
    """A request to hand `lock` over to engine `to`, or to the first one waiting.

    `whole`: the waiting incarnations whose processes were all found alive just now. `drain`: no
    stream may be left for the next engine to continue.
    """

    ask: int
    pid: int
    lock: str
    to: str | None
    timeout_ms: float
    whole: frozenset[str]
    drain: bool = False


# ---------------------------------------------------------------------- effects


class LockEffect(msgspec.Struct, frozen=True):
    """What the shell must do, at once and in order."""


class Send(LockEffect, frozen=True):
    conn: int
    message: GrantedMsg | StandbyMsg | HandOverMsg | RenewedMsg


class Announce(LockEffect, frozen=True):
    """Send the grant to every connected supervisor but the holder's, every gateway and observer."""

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


class Persist(LockEffect, frozen=True):
    record: LockRecord


class Forget(LockEffect, frozen=True):
    """This supervisor's process no longer matters: stop watching it."""

    supervisor: str


class AnswerSwitchOver(LockEffect, frozen=True):
    """Tell who requested a switchover how it ended, or why it was not begun."""

    ask: int
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
