"""What the gateway needs of the lock server: the listening socket, and who holds the lock.

A borrower asks for no lock and has no token. While it accepts it keeps a copy of the socket and
hands it back to a server that has just connected: a restarted one has none, and while any copy
lives, connections wait in its backlog and none is refused.

The surprising things: a lost connection says nothing about the engines, so what was heard before
counts until something newer is; and a grant with an older token of the same era is never reported.
"""

from __future__ import annotations

import secrets

from lockserver.client.grants import GrantsConnection
from lockserver.messages import BorrowMsg, GrantedMsg, IdleMsg, ServiceMsg, YieldMsg
from lockserver.messages import Stage as Stage
from plumbing.errors import UnderstudyError
from plumbing.pod.models import model_of
from plumbing.service.clock import SystemClock
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from plumbing.wire.sockets import no_descriptors


class Borrower(GrantsConnection):
    """Keeps one gateway's connection to the lock server. A subclass says what follows from what it
    hears, without blocking."""

    def __init__(self, path: str, *, gateway: str | None = None) -> None:
        """Connect later, in `run`, and ask for the socket.

        Args:
            path: the lock server's Unix socket.
            gateway: this gateway's id, 16 hex digits; random unless given.
        """
        super().__init__(path)
        self.gateway = gateway or secrets.token_hex(8)
        self.stage = Stage.ASKS
        self._started_ms = SystemClock().now_ms()
        self._service: OwnedFd | None = None

    # ------------------------------------------------------------------ what is heard

    def lent(self, fd: OwnedFd, address: str) -> None:
        """A copy of the listening socket (taken), which no process may `shutdown()`: accept from
        it, in place of an earlier one, and set `Stage.ACCEPTS`."""
        fd.close()

    def must_yield(self) -> None:
        """Another gateway asks for the socket: accept no more, then set `Stage.YIELDS`."""

    def granted(self, model: str, engine: str, token: int, era: str) -> None:
        """`engine` holds the lock of `model`, "" in a pod without models. The same grant may come
        again."""

    def idle(self, model: str, reason: str, is_final: bool) -> None:
        """No engine is known to serve, and a sentence that says why. It proves nothing about the
        last holder: only a newer grant does. `is_final`: every engine was told to end, so that what
        the holder does not serve any more, none will."""

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        """The server refuses this gateway (`lock.no_service`), or cannot be believed
        (`lock.old_token`). Retried with back-off."""

    # ------------------------------------------------------------------ the socket

    def set_stage(self, stage: Stage) -> None:
        """Tell the server how far this gateway is with the socket. What no longer accepts keeps no
        copy of it."""
        self.stage = stage
        if stage is not Stage.ACCEPTS:
            self._drop_copy()
        if self.conn is not None:
            self.conn.send(self._message())

    def _message(self) -> BorrowMsg:
        return BorrowMsg(self.gateway, self.stage, self._started_ms)

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._drop_copy()

    def _drop_copy(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None

    def opened(self, conn: Connection) -> None:
        """As `Handler`'s.

        Raises:
            OSError: there is no descriptor for what must be handed back; nothing has changed.
        """
        copies = [] if self._service is None else [self._service.duplicate()]
        conn.send(self._message(), fds=copies)
        super().opened(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if isinstance(message, ServiceMsg):
            self.problem = None
            self._lent(message, fds)
        else:
            super().received(conn, message, request_id, fds)

    def hear(self, message: Message, request_id: int) -> None:
        self.problem = None
        match message:
            case GrantedMsg() if self.believes(message):
                model = model_of(message.lock)
                self.granted(model, message.engine, message.token, message.era)
            case IdleMsg():
                self.idle(model_of(message.lock), message.reason, message.is_final)
            case YieldMsg():
                self.must_yield()

    def _lent(self, message: ServiceMsg, fds: list[OwnedFd]) -> None:
        """Keep a copy to hand back, and give one away."""
        for fd in fds:
            try:
                copy = fd.duplicate()
            except OSError as error:
                fd.close()
                assert self.conn is not None
                self._refusal = no_descriptors("copy the listening socket", error).message
                self.conn.close("out of descriptors; borrowing again")  # … is lent again
                return
            self._drop_copy()
            self._service = fd
            self.lent(copy, message.address)
