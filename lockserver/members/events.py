"""The inputs and outputs of the members core: plain values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockserver.core.events import (
    Close,
    Happened,
    Input,
    RefuseConnection,
    SendHandOver,
    TimePassed,
)


@dataclass(frozen=True, slots=True)
class MemberOpened:
    """A new connection, whose member is not known yet."""

    conn: int


@dataclass(frozen=True, slots=True)
class MemberWanted:
    """One member's complete want. `name`: its identity by the transport, for status."""

    conn: int
    supervisor: str
    engine: str
    member: int
    members: int
    incarnation: str | None
    witness: str | None
    locks: tuple[str, ...]
    tokens: Mapping[str, int]
    progress: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class MemberBeaten:
    conn: int
    progress: int


@dataclass(frozen=True, slots=True)
class MemberClosed:
    conn: int


MemberInput = MemberOpened | MemberWanted | MemberBeaten | MemberClosed | TimePassed


@dataclass(frozen=True, slots=True)
class Feed:
    """An event for the lock machine."""

    event: Input


@dataclass(frozen=True, slots=True)
class SendRenewed:
    conn: int
    progress: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class SendMemberLost:
    """`incarnation` is the receiver's own; `member` is the one that is gone."""

    conn: int
    engine: str
    incarnation: str
    member: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendGranted:
    """A grant, with the receiver's own incarnation if it is its engine's."""

    conn: int
    lock: str
    engine: str
    incarnation: str
    token: int


MemberOutput = (
    Feed
    | SendRenewed
    | SendMemberLost
    | SendGranted
    | SendHandOver
    | RefuseConnection
    | Close
    | Happened
)
