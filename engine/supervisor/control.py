"""The control socket: where backends register and where people ask, drain and rehearse deaths.

Owns who may be answered what and when. Must not know what follows from a request: `Desk` does.
The surprising thing: `kill supervisor` is answered before it happens, every other kill after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from engine.messages import (
    CONTROL,
    Attached,
    Broken,
    Kill,
    Killing,
    Leave,
    Leftover,
    Load,
    MayLoad,
    Ok,
    Register,
    Registered,
    StatusMsg,
    StatusReplyMsg,
    WatchMsg,
)
from plumbing.errors import ProtocolError
from plumbing.part.observers import Observers
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server


class Desk(Protocol):
    """What the control socket needs of the supervisor. Each may raise `UnderstudyError`;
    descriptors are lent."""

    def status(self) -> dict[str, Any]: ...

    def leave(self, cause: str) -> str: ...

    def rehearse(self, message: Kill) -> Killing: ...

    def end_at_once(self) -> None: ...

    def register(self, message: Register, lifeline: int | None) -> None: ...

    def may_load(self, message: MayLoad, reply: Callable[[Load], None]) -> None: ...

    def attached(self, message: Attached) -> None: ...

    def broken(self, message: Broken) -> None: ...

    def leftover(self, message: Leftover) -> None: ...


class Control:
    """Serves `path` for `desk`."""

    def __init__(self, path: str, desk: Desk, events: EventLog) -> None:
        self._desk = desk
        self._observers = Observers(events, desk.status)
        self.server = Server(path, CONTROL, self, service="engine")

    def opened(self, conn: Connection) -> None:
        pass

    def closed(self, conn: Connection, reason: str) -> None:
        self._observers.leave(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        try:
            self._answer(conn, message, request_id, fds)
        finally:
            close_all(fds)

    def _answer(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        match message:
            case Register():
                self._check_pid(conn, message.pid)
                self._desk.register(message, fds[0].fileno() if fds else None)
                conn.send(Registered(), request_id)
            case MayLoad():
                self._desk.may_load(message, lambda load: conn.send(load, request_id))
            case Attached():
                self._desk.attached(message)
                conn.send(Ok(), request_id)
            case Broken():
                self._desk.broken(message)
                conn.send(Ok(), request_id)
            case Leftover():
                self._desk.leftover(message)
                conn.send(Ok(), request_id)
            case StatusMsg():
                conn.send(StatusReplyMsg(self._desk.status()), request_id)
            case WatchMsg():
                self._observers.join(conn, message.since, request_id)
            case Leave():
                conn.send(Ok(self._desk.leave("drain")), request_id)
            case Kill():
                conn.send(self._desk.rehearse(message), request_id)
                if message.target == "supervisor":
                    self._desk.end_at_once()
            case _:
                raise ProtocolError(
                    "engine.not_a_request", f"{message.TYPE} is not for an engine to answer"
                )

    def _check_pid(self, conn: Connection, pid: int) -> None:
        # 0 is what the kernel says of a peer in another PID namespace.
        if conn.peer.pid not in (0, pid):
            raise ProtocolError(
                "engine.false_pid", f"pid {conn.peer.pid} registers itself as pid {pid}"
            )
