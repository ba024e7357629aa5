"""What the gateway needs of the lock server: the listening socket, and who holds the lock.

A borrower asks for no lock and has no token. While it accepts it keeps a copy of the socket and
hands it back to a server that has just connected: a restarted one has none, and while any copy
lives, connections wait in its backlog and none is refused.

The surprising things: a lost connection says nothing about the engines, so what was heard before
counts until something newer is; and a grant with an older token of the same era is never reported.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from lockserver.client.reconnect import NewestGrants, Reconnecting, ignore
from lockserver.messages import CATALOGUE, BorrowMsg, GrantedMsg, IdleMsg, ServiceMsg, YieldMsg
from lockserver.messages import Stage as Stage
from plumbing.errors import RemoteError, UnderstudyError
from plumbing.pod.models import kind_of, model_of
from plumbing.service.clock import SystemClock
from plumbing.wire.connection import Connection, connect
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import CONNECT_DEADLINE_S
from plumbing.wire.messages import FaultMsg, Message
from plumbing.wire.sockets import no_descriptors


def _close(fd: OwnedFd, address: str) -> None:
    fd.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowerCallbacks:
    """What a `Borrower` calls, on its loop; none may block.

    - `on_service(fd, address)`: a copy of the listening socket, which the callee owns and must
      never `shutdown()`: accept from it, in place of an earlier one, and set `Stage.ACCEPTS`.
    - `on_yield()`: another gateway asks for the socket: accept no more, then set `Stage.YIELDS`.
    - `on_granted(model, engine, token, era)`: `engine` holds the lock of `model`, "" in a pod
      without models. The same grant may arrive again.
    - `on_idle(model, reason, is_final)`: no engine is known to serve, and a sentence that says why.
      It proves nothing about the last holder: only a newer grant does. `is_final`: every engine was
      told to end, so that what the holder does not serve any more, none will.
    - `on_connected()`, `on_lost(reason)`.
    - `on_refused(error)`: the server refuses this gateway (`lock.no_service`), or cannot be
      believed (`lock.old_token`). Retried with back-off.
    """

    on_service: Callable[[OwnedFd, str], object] = _close
    on_yield: Callable[[], object] = ignore
    on_granted: Callable[[str, str, int, str], object] = ignore
    on_idle: Callable[[str, str, bool], object] = ignore
    on_connected: Callable[[], object] = ignore
    on_lost: Callable[[str], object] = ignore
    on_refused: Callable[[UnderstudyError], object] = ignore


class Borrower(Reconnecting):
    """Keeps one gateway's connection to the lock server."""

    def __init__(
        self,
        path: str,
        callbacks: BorrowerCallbacks = BorrowerCallbacks(),
        *,
        lock: str = "active",
        gateway: str | None = None,
    ) -> None:
        """Connect later, in `run`, and ask for the socket.

        Args:
            path: the lock server's Unix socket.
            gateway: this gateway's id, 16 hex digits; random unless given.
        """
        super().__init__()
        self.path, self.lock = path, lock
        self.gateway = gateway or secrets.token_hex(8)
        self.stage = Stage.ASKS
        self._started_ms = SystemClock().now_ms()
        self._callbacks = callbacks
        self._service: OwnedFd | None = None
        self._grants = NewestGrants()

    def set_stage(self, stage: Stage) -> None:
        """Tell the server how far this gateway is with the socket. What no longer accepts keeps no
        copy of it."""
        self.stage = stage
        if stage is not Stage.ACCEPTS:
            self._drop()
        if self._conn is not None:
            self._conn.send(self._message())

    def _message(self) -> BorrowMsg:
        return BorrowMsg(self.lock, self.gateway, self.stage, self._started_ms)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        try:
            await super().run()
        finally:
            self._drop()

    def _drop(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None

    async def _connect(self) -> None:
        await connect(self.path, CATALOGUE, self, CONNECT_DEADLINE_S)

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        """As `Handler`'s.

        Raises:
            OSError: there is no descriptor for what must be handed back; nothing has changed.
        """
        copies = [] if self._service is None else [self._service.duplicate()]
        self._conn = conn
        conn.send(self._message(), fds=copies)
        self._callbacks.on_connected()

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if not isinstance(message, FaultMsg):
            self.problem = None
        match message:
            case GrantedMsg() if kind_of(message.lock) == self.lock:
                self._granted(message)
            case IdleMsg() if kind_of(message.lock) == self.lock:
                model = model_of(message.lock)
                self._callbacks.on_idle(model, message.reason, message.is_final)
            case ServiceMsg():
                self._lent(message, fds)
            case YieldMsg():
                self._callbacks.on_yield()
            case FaultMsg():
                self._refused(RemoteError(message.code, message.message, **message.details))

    def _lost(self, reason: str) -> None:
        self._callbacks.on_lost(reason)

    def _granted(self, message: GrantedMsg) -> None:
        refusal = self._grants.check(message)
        if refusal is not None:
            self._refused(refusal)
            return
        who = message.engine, message.token, message.era
        self._callbacks.on_granted(model_of(message.lock), *who)

    def _refused(self, error: UnderstudyError) -> None:
        self.problem = error.message
        self._callbacks.on_refused(error)

    def _lent(self, message: ServiceMsg, fds: list[OwnedFd]) -> None:
        """Keep a copy to hand back, and give one away."""
        for fd in fds:
            try:
                copy = fd.duplicate()
            except OSError as error:
                fd.close()
                assert self._conn is not None
                self._failed(no_descriptors("copy the listening socket", error).message)
                self._conn.close("out of descriptors; borrowing again")  # … is lent again
                return
            self._drop()
            self._service = fd
            self._callbacks.on_service(copy, message.address)
