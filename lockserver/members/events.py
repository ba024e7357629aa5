"""The inputs and outputs that only the members core has: plain values, no behaviour."""

from __future__ import annotations

from lockserver.core.events import Input, LockEffect
from lockserver.messages import WantMsg
from plumbing.wire.messages import Message


class MemberOpened(Input, frozen=True):
    """A new connection, whose member is not known yet."""

    conn: int


class MemberWanted(Input, frozen=True):
    """One member's complete want. `name`: its identity by the transport, for status."""

    conn: int
    msg: WantMsg
    name: str = ""


class Feed(LockEffect, frozen=True):
    """An event for the lock machine."""

    event: Input


class SendMsg(LockEffect, frozen=True):
    conn: int
    message: Message
