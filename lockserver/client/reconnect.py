"""A connection that is made again whenever it ends, and which grants heard on it are believed."""

from __future__ import annotations

import abc
import asyncio

from lockserver.messages import NO_ERA, GrantedMsg
from plumbing.errors import UnderstudyError
from plumbing.wire.connection import Connection, keep_connected

HEARTBEAT_MS = 500  # six of them fit into the server's silent_ms of 3 s


def ignore(*_: object) -> None:
    """The default of every callback."""


class Reconnecting(abc.ABC):
    """One connection to the lock server, made again whenever it ends; as the wire's handler."""

    def __init__(self) -> None:
        self.problem: str | None = None  # why there is no connection, or why it is of no use
        self._conn: Connection | None = None
        self._ended = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        return self._conn is not None

    async def run(self) -> None:
        """Stay connected until cancelled."""
        try:
            await keep_connected(self._connect, self._ended, self._failed)
        finally:
            if self._conn is not None:
                self._conn.close("this process is ending")
                self._conn = None

    @abc.abstractmethod
    async def _connect(self) -> None: ...

    @abc.abstractmethod
    def _lost(self, reason: str) -> None:
        """The connection has ended."""

    def _failed(self, why: str) -> None:
        self.problem = why

    def closed(self, conn: Connection, reason: str) -> None:
        if self._conn is conn:
            self._conn = None
            self.problem = self.problem or f"the connection ended: {reason}"
            self._lost(reason)
        self._ended.set()


class NewestGrants:
    """The newest grant of each lock. Tokens compare within an era only: a grant of another era, by
    a server that has lost all of its state, replaces what was known."""

    def __init__(self) -> None:
        self._newest: dict[str, GrantedMsg] = {}

    def newest(self, lock: str) -> GrantedMsg | None:
        """The newest grant of `lock` that was believed."""
        return self._newest.get(lock)

    def check(self, grant: GrantedMsg) -> UnderstudyError | None:
        """Remember `grant`, or why it must not be believed."""
        known = self._newest.get(grant.lock)
        is_comparable = known is not None and known.era == grant.era != NO_ERA
        if known is None or not is_comparable or grant.token >= known.token:
            self._newest[grant.lock] = grant
            return None
        return UnderstudyError(
            "lock.old_token",
            f"the lock server says that {grant.engine} holds {grant.lock} under token"
            f" {grant.token}, but {known.engine} has held it under token {known.token} of the same"
            " era: its state file is an old copy. Stop the lock server, move lockserver.json away"
            " and start it again: engines that serve show it their tokens",
            engine=grant.engine,
            token=grant.token,
            known_token=known.token,
        )
