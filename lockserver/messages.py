"""The messages of the lock protocol: what a supervisor says, what the server answers.

`want` is the whole truth about one supervisor: it is sent first on every connection and again at
every change, and what it no longer names is over. `granted` is the server's answer, sent to the
holder and to every other supervisor, which is how one hears that it has lost. There is no release
and no acknowledgement: both follow from these two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from understudy.wire.messages import Catalogue, Length, Message, Range
from understudy.wire.observe import EventRecord as EventRecord
from understudy.wire.observe import Status as Status
from understudy.wire.observe import StatusReply as StatusReply
from understudy.wire.observe import Watch as Watch

TOKEN_CLAIMED_MAX = 2**62  # leaves room above any claim, so that a wild one cannot exhaust tokens
SERVICES_MAX = 8  # listening sockets in one hand-back; the standard pod has one
LOCKS_MAX = 8  # locks named in one `want`

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


@dataclass(frozen=True, slots=True)
class Granted(Message):
    """Server → every supervisor and observer: `incarnation` of `engine` holds `lock`."""

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


CATALOGUE = Catalogue(Want, Granted, Beat, Service, Status, StatusReply, Watch, EventRecord)
