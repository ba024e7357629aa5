"""Watches the lock server: who holds `active:<model>`. While it is away, the last word counts.

Grants are pushed to every observer. That nobody holds a lock any more is in the status document
only, which is asked for when something has happened there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from lockserver.client import messages as lock
from lockserver.client.reconnect import NewestGrants, keep_connected
from plumbing.pod.models import ACTIVE, kind_of, lock_of, model_of
from plumbing.pod.paths import lockserver_socket
from plumbing.wire.connection import Connection, Handler, connect
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message

LOOK_S = 0.05  # between two looks at the status: it costs the lock server a walk through /proc


class PoolLockSide(Handler):
    """`on_holder(model, engine, token, era)`; nobody: "" and 0."""

    def __init__(
        self,
        directory: str,
        models: Collection[str],
        on_holder: Callable[[str, str, int, str], None],
    ) -> None:
        self.problem: str | None = "not connected yet"
        self.holders: dict[str, tuple[str, int, str]] = {}
        self._path, self._models, self._on_holder = lockserver_socket(directory), models, on_holder
        self._grants = NewestGrants()
        self._conn: Connection | None = None
        self._ended = asyncio.Event()
        self._due: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        return self._conn is not None

    async def run(self) -> None:
        """Stay connected until cancelled."""
        try:
            await keep_connected(self._connect, self._ended, self._failed)
        finally:
            if self._due is not None:
                self._due.cancel()
            if self._conn is not None:
                conn, self._conn = self._conn, None
                conn.close("the pool is ending")

    async def _connect(self) -> None:
        await connect(self._path, lock.CATALOGUE, self)

    def _failed(self, why: str) -> None:
        self.problem = why

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conn = conn
        conn.send(lock.WatchMsg(), 1)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case lock.StatusReplyMsg():
                self.problem = None
                self._look_at(message.document)
            case lock.GrantedMsg() if kind_of(message.lock) == ACTIVE:
                self._granted(message)
            case lock.EventMsg():
                self._look_soon()
            case FaultMsg():
                self.problem = message.message

    def closed(self, conn: Connection, reason: str) -> None:
        if conn is self._conn:
            self._conn = None
            self.problem = f"the connection ended: {reason}"
        self._ended.set()

    # ------------------------------------------------------------------ inside

    def _look_soon(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._due = None
        if self._conn is not None:
            self._conn.send(lock.StatusMsg(), 1)

    def _granted(self, grant: lock.GrantedMsg) -> None:
        refusal = self._grants.check(grant)
        if refusal is not None:
            self.problem = refusal.message
            return
        self._say(model_of(grant.lock), grant.engine, grant.token, grant.era)

    def _look_at(self, document: dict[str, Any]) -> None:
        locks, era = document["locks"], str(document["era"])
        missing = [name for name in self._models if lock_of(ACTIVE, name) not in locks]
        if missing:
            self.problem = (
                f"the lock server has no lock for {', '.join(missing)}: start it with the same pool"
                " file"
            )
        for model in self._models:
            found = locks.get(lock_of(ACTIVE, model), {}).get("holder")
            if found is None:
                self._say(model, "", 0, era)
                continue
            known = self._grants.newest(lock_of(ACTIVE, model))
            is_old = known is not None and known.era == era and found["token"] < known.token
            if not is_old:  # the document was written before the grant that has come meanwhile
                self._say(model, found["engine"], found["token"], era)

    def _say(self, model: str, engine: str, token: int, era: str) -> None:
        if model in self._models and self.holders.get(model) != (engine, token, era):
            self.holders[model] = (engine, token, era)
            self._on_holder(model, engine, token, era)
