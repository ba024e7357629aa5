"""What a server on a Unix socket and one on TCP have in common: a bounded number of connections,
each of which must speak at once, and an answer to `hello` before the service hears of anything.
"""

from __future__ import annotations

import abc
import asyncio
import errno
import os
import socket
from typing import Any

from plumbing import __version__
from plumbing.errors import ProtocolError
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import FIRST_FRAME_DEADLINE_S, RETRY_S
from plumbing.wire.messages import Catalogue, HelloMsg, Message, WelcomeMsg
from plumbing.wire.sockets import no_descriptors


class Listener(abc.ABC):
    """Accepts, answers `hello`, and hands every other message to `handler`."""

    def __init__(
        self, catalogue: Catalogue, handler: Handler, service: str, connections_max: int
    ) -> None:
        self.connections: set[Connection] = set()
        self._catalogue = catalogue
        self._handler = handler
        self._service = service
        self._connections_max = connections_max
        self.problem: str | None = None  # why nobody new is let in
        self._sock: socket.socket | None = None
        self._silent: dict[Connection, asyncio.TimerHandle] = {}

    @abc.abstractmethod
    def _accepted(self, sock: socket.socket, name: Any) -> None:
        """Make a connection of `sock`, whose other end is called `name`; an `OSError` closes it and
        accepts no more for a while."""

    @abc.abstractmethod
    def _crowd(self, conn: Connection) -> str | None:
        """Why there are too many of the newcomer's kind, itself counted."""

    # ------------------------------------------------------------------ accepting

    def _listen(self, sock: socket.socket) -> None:
        """Own `sock`, which listens, and accept from now on."""
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._acceptable)

    def _stop_listening(self) -> None:
        assert self._sock is not None
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None

    async def _close_connections(self) -> None:
        for conn in list(self.connections):
            conn.close(f"{self._service} is stopping")
        await asyncio.sleep(0)  # the handlers hear of it from the loop

    def _accept_all(self) -> None:
        """Let in whoever waits in the backlog, which ends with its socket."""
        while self._acceptable():
            pass

    def _acceptable(self) -> bool:
        """Accept one; whether there was one, and room for it."""
        assert self._sock is not None
        try:
            sock, name = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            self._pause(error)
            return False
        try:
            self._accepted(sock, name)
            self.problem = None
        except OSError as error:  # it needed one descriptor more
            sock.close()
            self._pause(error)
            return False
        return True

    def _pause(self, error: OSError) -> None:
        """Out of descriptors: the newcomers wait in the backlog until somebody leaves."""
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            raise error
        self.problem = no_descriptors("let anybody new in", error).message
        loop = asyncio.get_running_loop()
        assert self._sock is not None
        loop.remove_reader(self._sock.fileno())

        def resume() -> None:
            if self._sock is not None:
                loop.add_reader(self._sock.fileno(), self._acceptable)

        loop.call_later(RETRY_S, resume)

    def _admit(self, conn: Connection) -> None:
        """Let a connection that was `opened` stay, or tell it why not."""
        if len(self.connections) > self._connections_max:
            why = (
                f"{self._service} has {self._connections_max} connections, which is its limit;"
                " close some (idle observers?) and try again"
            )
        elif (crowd := self._crowd(conn)) is not None:
            why = crowd
        else:
            loop = asyncio.get_running_loop()
            self._silent[conn] = loop.call_later(FIRST_FRAME_DEADLINE_S, self._silence, conn)
            return
        conn.fault(ProtocolError("wire.too_many_connections", why))

    def _silence(self, conn: Connection) -> None:
        conn.fault(
            ProtocolError(
                "wire.first_frame_deadline",
                f"nothing was said within {FIRST_FRAME_DEADLINE_S:g} s of connecting",
            )
        )

    def _has_spoken(self, conn: Connection) -> None:
        timer = self._silent.pop(conn, None)
        if timer is not None:
            timer.cancel()

    # ------------------------------------------------------------------ as the connections' handler

    def opened(self, conn: Connection) -> None:
        self.connections.add(conn)
        self._handler.opened(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        self._has_spoken(conn)
        if isinstance(message, HelloMsg):
            conn.send(WelcomeMsg(self._service, os.getpid(), __version__), request_id)
        else:
            self._handler.received(conn, message, request_id, fds)

    def closed(self, conn: Connection, reason: str) -> None:
        self._has_spoken(conn)
        self.connections.discard(conn)
        self._handler.closed(conn, reason)
