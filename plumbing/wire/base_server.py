"""What servers on Unix sockets and on TCP have in common: a bounded number of connections, a
deadline for the first message of each, and the answer to `hello`, which the service never sees.
"""

from __future__ import annotations

import abc
import asyncio
import os
import socket
from typing import Any

from plumbing import __version__
from plumbing.errors import ProtocolError
from plumbing.shortage import is_shortage
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, Reserve
from plumbing.wire.limits import FIRST_FRAME_DEADLINE_S, RETRY_S
from plumbing.wire.messages import Catalogue, HelloMsg, Message, WelcomeMsg
from plumbing.wire.sockets import no_descriptors


class BaseServer(abc.ABC):
    """Accepts connections, answers `hello`, and passes every other message to `handler`."""

    def __init__(
        self,
        catalogue: Catalogue,
        handler: Handler,
        service: str,
        connections_max: int,
        spare_fds: int = 0,
    ) -> None:
        """`spare_fds`: descriptors kept in reserve, to accept connections at the limit."""
        self.connections: set[Connection] = set()
        self.reserve = Reserve(spare_fds)
        self._catalogue = catalogue
        self._handler = handler
        self._service = service
        self._connections_max = connections_max
        self.problem: str | None = None  # why no new connection is accepted
        self._sock: socket.socket | None = None
        self._first_frame_deadlines: dict[Connection, asyncio.TimerHandle] = {}

    @abc.abstractmethod
    def _accepted(self, sock: socket.socket, name: Any) -> None:
        """Make a connection of `sock`; `name` is the address of its other end. After an `OSError`
        it is called again with the reserve; then `sock` is closed and accepting pauses."""

    @abc.abstractmethod
    def _over_quota(self, conn: Connection) -> str | None:
        """Why the peer of `conn` has too many connections, `conn` included; None if it has not."""

    def _listen(self, sock: socket.socket) -> None:
        """Own `sock`, a listening socket, and start accepting."""
        self._sock = sock
        self.reserve.refill()
        asyncio.get_running_loop().add_reader(sock.fileno(), self._acceptable)

    def _stop_listening(self) -> None:
        assert self._sock is not None
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None

    async def _close_connections(self) -> None:
        for conn in list(self.connections):
            conn.close(f"{self._service} is stopping")
        self.reserve.close()
        await asyncio.sleep(0)  # the loop calls the handlers' `closed`

    def _accept_all(self) -> None:
        """Accept every connection in the backlog, which is lost when the socket is closed."""
        while self._acceptable():
            pass

    def _acceptable(self) -> bool:
        """Accept one connection; False if there was none, or no room for it."""
        assert self._sock is not None
        try:
            sock, name = self.reserve.help(self._sock.accept)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            self.problem = None  # the kernel takes a descriptor before it looks: there is one
            return False
        except OSError as error:
            self._pause(error)
            return False
        try:
            self.reserve.help(lambda: self._accepted(sock, name))
            self.problem = None
        except OSError as error:  # it needed another descriptor
            sock.close()
            self._pause(error)
            return False
        return True

    def _pause(self, error: OSError) -> None:
        """Out of descriptors: new connections wait in the backlog until others are closed."""
        if not is_shortage(error):
            raise error
        self.problem = no_descriptors("accept new connections", error).message
        loop = asyncio.get_running_loop()
        assert self._sock is not None
        loop.remove_reader(self._sock.fileno())

        def resume() -> None:
            if self._sock is not None:
                loop.add_reader(self._sock.fileno(), self._acceptable)
                self._acceptable()  # also if nobody waits any more: is there room again?

        loop.call_later(RETRY_S, resume)

    def _admit(self, conn: Connection) -> None:
        """Keep a connection that was `opened`, or close it with an error."""
        if len(self.connections) > self._connections_max:
            why = (
                f"{self._service} has {self._connections_max} connections, its limit; close some"
                " (idle observers?) and try again"
            )
        elif (excess := self._over_quota(conn)) is not None:
            why = excess
        else:
            loop = asyncio.get_running_loop()
            self._first_frame_deadlines[conn] = loop.call_later(
                FIRST_FRAME_DEADLINE_S, self._first_frame_timed_out, conn
            )
            return
        conn.fault(ProtocolError("wire.too_many_connections", why))

    def _first_frame_timed_out(self, conn: Connection) -> None:
        conn.fault(
            ProtocolError(
                "wire.first_frame_deadline",
                f"no message arrived within {FIRST_FRAME_DEADLINE_S:g} s of connecting",
            )
        )

    def _cancel_first_frame_deadline(self, conn: Connection) -> None:
        timer = self._first_frame_deadlines.pop(conn, None)
        if timer is not None:
            timer.cancel()

    def opened(self, conn: Connection) -> None:
        self.connections.add(conn)
        self._handler.opened(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        self._cancel_first_frame_deadline(conn)
        if isinstance(message, HelloMsg):
            conn.send(WelcomeMsg(self._service, os.getpid(), __version__), request_id)
        else:
            self._handler.received(conn, message, request_id, fds)

    def closed(self, conn: Connection, reason: str) -> None:
        self._cancel_first_frame_deadline(conn)
        self.connections.discard(conn)
        self._handler.closed(conn, reason)
