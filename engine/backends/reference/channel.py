"""The backend's end of the channel to its supervisor: frames in, answers out.

Owns nothing but the translation, and the end: without a supervisor, or without a model, this
process must not serve one more token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import NoReturn

from engine.backends.reference.backend import Backend
from engine.backends.reference.link import Failed, Ready
from engine.messages import (
    CHANNEL,
    Canary,
    Drain,
    Drained,
    FaultReport,
    Health,
    Prepared,
    RunCanary,
    Serve,
    Serving,
    Wake,
    Woken,
)
from understudy.errors import ProtocolError, UnderstudyError
from understudy.wire.client import from_socket
from understudy.wire.connection import Connection
from understudy.wire.fds import OwnedFd, close_all
from understudy.wire.messages import Message

logger = logging.getLogger(__name__)


class Channel:
    """A connection to the supervisor; made on the loop."""

    def __init__(self, sock: socket.socket) -> None:
        self.backend: Backend | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._conn = from_socket(sock, CHANNEL, self)

    def prepared(self, ready: Ready) -> None:
        self._conn.send(
            Prepared(
                weights_bytes=ready.weights_bytes,
                kv_bytes=ready.kv_bytes,
                epoch=ready.epoch,
                identity=ready.identity,
            )
        )

    def end(self, failed: Failed) -> NoReturn:
        """Say why, and end at once: what is under way has no model, or nobody who owns it."""
        logger.error("%s [%s]", failed.message, failed.code)
        self._conn.send(fault_report(failed))
        os._exit(1)

    # ------------------------------------------------------------------ wire.Handler

    def opened(self, conn: Connection) -> None:
        pass

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if self.backend is None:
            close_all(fds)
            raise ProtocolError("engine.backend_phase", f"{message.TYPE} came before `prepared`")
        if isinstance(message, Health):  # at once, whatever else is under way
            conn.send(self.backend.health(), request_id)
            return
        task = asyncio.get_running_loop().create_task(
            self._answer(conn, self.backend, message, request_id, fds)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def closed(self, conn: Connection, reason: str) -> None:
        logger.error("the supervisor is gone (%s); this backend ends", reason)
        os._exit(1)

    async def _answer(
        self,
        conn: Connection,
        backend: Backend,
        message: Message,
        request_id: int,
        fds: list[OwnedFd],
    ) -> None:
        try:
            conn.send(await _handle(backend, message, fds), request_id)
        except UnderstudyError as error:
            conn.fault(error, request_id, close=False)
        finally:
            close_all(fds)


async def _handle(backend: Backend, message: Message, fds: list[OwnedFd]) -> Message:
    match message:
        case Wake():
            return Woken(await backend.wake(message.engine, message.token, fds[0]))
        case RunCanary():
            checked = await backend.run_canary()
            return Canary(checked.ok, checked.detail)
        case Serve():
            backend.serve()
            return Serving()
        case Drain():
            await backend.drain(message.budget_ms / 1000)
            return Drained()
    raise ProtocolError("engine.backend_phase", f"{message.TYPE} is not for a backend")


def fault_report(failed: Failed) -> FaultReport:
    """For the supervisor: 2 for a wrong argument, else 1."""
    return FaultReport(
        failed.code, failed.message, failed.permanent, 2 if failed.exit_code == 2 else 1
    )
