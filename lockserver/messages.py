"""The messages of the lock protocol: what a supervisor says, what the server answers.

`want` is the whole truth about one supervisor: it is sent first on every connection and again at
every change, and what it no longer names is over. `granted` is the server's answer, sent to the
holder and to every other supervisor, which is how one hears that it has lost. There is no release
and no acknowledgement: both follow from these two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from plumbing.part.observe import EventRecord as EventRecord
from plumbing.part.observe import Status as Status
from plumbing.part.observe import StatusReply as StatusReply
from plumbing.part.observe import Watch as Watch
from plumbing.wire.messages import Catalogue, Length, Message, Range

TOKEN_CLAIMED_MAX = 2**62  # leaves room above any claim, so that a wild one cannot exhaust tokens
SERVICES_MAX = 8  # listening sockets in one hand-back; the standard pod has one
LOCKS_MAX = 8  # locks named in one `want`
MEMBERS_MAX = 16  # nodes that one engine may span; all are filed in one slot of the state file
REASON_CHARS_MAX = 512
SWITCHOVER_MS_MAX = 24 * 3_600_000  # a long drain is a matter of hours at most

Token = Annotated[int, Range(1, 2**63 - 1)]
LockName = Annotated[str, Length(1, 32)]
EngineId = Annotated[str, Length(1, 63)]
IncarnationId = Annotated[str, Length(18, 80)]  # "<engine>-<16 hex>"


@dataclass(frozen=True, slots=True)
class Want(Message):
    """Supervisor → server: all that this supervisor is and wants.

    `incarnation` and `witness` are None between two launches; what was named before has then been
    reaped. `tokens` is what it believes it holds. `services` names the locks whose listening
    socket comes back with this message, one fd each, in that order.
    """

    TYPE: ClassVar[str] = "want"
    FDS: ClassVar[tuple[int, int]] = (0, SERVICES_MAX)
    supervisor: Annotated[str, Length(16, 16)]
    engine: EngineId
    incarnation: IncarnationId | None
    witness: Annotated[str, Length(1, 128)] | None
    locks: Annotated[tuple[str, ...], Length(0, LOCKS_MAX)]
    tokens: dict[str, Annotated[int, Range(1, TOKEN_CLAIMED_MAX)]]
    services: Annotated[tuple[str, ...], Length(0, SERVICES_MAX)] = ()
    # Over TCP only: which of the engine's nodes this is, and the count that it shares with `beat`:
    # larger in each message, so that an answer tells when what it answers was sent.
    member: Annotated[int, Range(0, MEMBERS_MAX - 1)] = 0
    members: Annotated[int, Range(1, MEMBERS_MAX)] = 1
    progress: Annotated[int, Range(0, 2**63 - 1)] = 0


@dataclass(frozen=True, slots=True)
class Granted(Message):
    """Server → every supervisor and observer: `incarnation` of `engine` holds `lock`.

    Said at a grant, and again with the same token when a restarted server has found its holder.
    """

    TYPE: ClassVar[str] = "granted"
    lock: LockName
    engine: EngineId
    incarnation: IncarnationId
    token: Token


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """Supervisor → server, every heartbeat: a counter that grows while the supervisor works."""

    TYPE: ClassVar[str] = "beat"
    progress: Annotated[int, Range(0, 2**63 - 1)]


@dataclass(frozen=True, slots=True)
class Service(Message):
    """Server → supervisor, with one fd: the listening socket of a lock, lent."""

    TYPE: ClassVar[str] = "service"
    FDS: ClassVar[tuple[int, int]] = (1, 1)
    lock: LockName
    address: str


@dataclass(frozen=True, slots=True)
class Renewed(Message):
    """Server → member, over TCP, for every `want` and `beat`: its lease runs anew from when the
    message that carried `progress` was **sent**, which the member knows by its own clock.

    `lease_ms` is what the server waits, with a margin, before it believes in the member's end.
    """

    TYPE: ClassVar[str] = "renewed"
    progress: Annotated[int, Range(0, 2**63 - 1)]
    lease_ms: Annotated[int, Range(1, 3_600_000)]


@dataclass(frozen=True, slots=True)
class MemberLost(Message):
    """Server → the other members, over TCP: one of the engine's nodes is gone, so `incarnation`
    (the receiver's own) can serve no more: kill its tree, reap it, come back with a new one."""

    TYPE: ClassVar[str] = "member_lost"
    engine: EngineId
    incarnation: IncarnationId
    member: Annotated[int, Range(0, MEMBERS_MAX - 1)]
    reason: Annotated[str, Length(0, REASON_CHARS_MAX)]


@dataclass(frozen=True, slots=True)
class SwitchOver(Message):
    """Operator → server: have the holder of `lock` hand it to `to` (None: to who waits first)."""

    TYPE: ClassVar[str] = "switch_over"
    lock: LockName
    to: EngineId | None
    timeout_ms: Annotated[int, Range(1, SWITCHOVER_MS_MAX)]


@dataclass(frozen=True, slots=True)
class SwitchedOver(Message):
    """Server → operator: `engine` holds the lock now; what refuses it is an error instead."""

    TYPE: ClassVar[str] = "switched_over"
    lock: LockName
    source: EngineId
    engine: EngineId
    token: Token
    took_ms: Annotated[int, Range(0, SWITCHOVER_MS_MAX)]


@dataclass(frozen=True, slots=True)
class HandOver(Message):
    """Server → holder: finish what is in flight, reap, give `lock` up, come back as a standby."""

    TYPE: ClassVar[str] = "hand_over"
    lock: LockName
    incarnation: IncarnationId
    to: EngineId


CATALOGUE = Catalogue(
    Want,
    Granted,
    Beat,
    Service,
    Renewed,
    MemberLost,
    HandOver,
    SwitchOver,
    SwitchedOver,
    Status,
    StatusReply,
    Watch,
    EventRecord,
)
