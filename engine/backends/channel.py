"""A backend's end of the channel to its supervisor: requests in, replies out; and when a draining
backend is done.

Without a supervisor, or without a model, this process must not serve one more token. In which order
requests come is the lifecycle's (`engine/core`); each `BackendHandler` decides what one does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from engine import messages as msg
from plumbing.errors import ProtocolError, UnderstudyError, explain_shortage
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message

logger = logging.getLogger(__name__)


class BackendHandler(Protocol):
    """The requests to a prepared backend. Each may raise UnderstudyError."""

    async def wake(self, token: int, era: str, listening: OwnedFd) -> msg.WokenMsg:
        """Take KV memory; keep a copy of the listening socket for `serve`."""
        ...

    async def run_canary(self) -> msg.CanaryMsg:
        """Also after each wake, before anything else."""
        ...

    async def serve(self) -> None: ...

    @property
    def in_flight(self) -> int:
        """How many requests; immediately, whatever else is in progress."""
        ...

    async def drain(self, budget_s: float, *, resume: bool = False) -> None: ...

    async def rest(self, budget_s: float, *, keep_kv: bool) -> msg.RestedMsg:
        """Undo `wake` and what `drain` has set, in every process; see `DrainMsg`."""
        ...

    async def place_weights(self, budget_s: float, *, is_away: bool) -> msg.WeightsPlacedMsg:
        """Release the weights in every process, or map them again; see `PlaceWeightsMsg`."""
        ...


class Channel(Handler):
    """A connection to the supervisor, on the backend's loop. That may be blocked for minutes while
    the backend prepares: the kernel ends this process with its supervisor."""

    def __init__(self, sock: socket.socket) -> None:
        self.backend: BackendHandler | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._canary: asyncio.Task[msg.CanaryMsg] | None = None  # since it was woken
        self._conn = Connection(sock, msg.CHANNEL, self)

    def prepared(self, backend: BackendHandler, prepared: msg.PreparedMsg) -> None:
        """From now on `backend` takes requests."""
        self.backend = backend
        self._conn.send(prepared)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if self.backend is None:
            close_all(fds)
            raise ProtocolError("engine.backend_phase", f"{message.TYPE} arrived before `prepared`")
        if isinstance(message, msg.HealthMsg):  # immediately
            conn.send(msg.HealthyMsg(self.backend.in_flight), request_id)
            return
        task = asyncio.get_running_loop().create_task(
            self._answer(conn, self.backend, message, request_id, fds)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def closed(self, conn: Connection, reason: str) -> None:
        logger.error("lost the supervisor (%s); this backend exits", reason)
        os._exit(1)

    async def _answer(
        self,
        conn: Connection,
        backend: BackendHandler,
        message: Message,
        request_id: int,
        fds: list[OwnedFd],
    ) -> None:
        try:
            conn.send(await self._handle(backend, message, fds), request_id)
        except UnderstudyError as error:
            conn.fault(error, request_id, close=False)
        except Exception as error:  # a shortage, or a bug: the supervisor would wait for its budget
            logger.exception("%s failed", message.TYPE)
            why = explain_shortage(error.errno) if isinstance(error, OSError) else repr(error)
            fault = UnderstudyError("engine.backend_failed", why)
            fault.__cause__ = error  # a full disk is not this engine's fault
            conn.fault(fault, request_id, close=False)
        finally:
            close_all(fds)

    async def _handle(
        self, backend: BackendHandler, message: Message, fds: list[OwnedFd]
    ) -> Message:
        match message:
            case msg.WakeMsg():
                woken = await backend.wake(message.token, message.era, fds[0])
                self._canary = asyncio.ensure_future(backend.run_canary())
                return woken
            case msg.ServeMsg() if self._canary is not None:
                verdict = await self._canary
                if verdict.ok:
                    await backend.serve()
                return verdict
            case msg.RunCanaryMsg():
                return await backend.run_canary()
            case msg.DrainMsg():
                await backend.drain(message.budget_ms / 1000, resume=message.resume)
                if message.release_ms is None:
                    return msg.DrainedMsg()
                self._conn.send(msg.DrainedMsg())
                return await backend.rest(message.release_ms / 1000, keep_kv=message.keep_kv)
            case msg.PlaceWeightsMsg():
                budget_s = message.budget_ms / 1000
                return await backend.place_weights(budget_s, is_away=message.is_away)
        raise ProtocolError("engine.backend_phase", f"{message.TYPE} is not a request to a backend")


def is_private(listening: OwnedFd) -> bool:
    """Whether a gateway connects to this socket, and no client: see `WakeMsg`."""
    with socket.socket(fileno=os.dup(listening.fileno())) as sock:
        name = sock.getsockname()
    return isinstance(name, str) and name != ""


POLL_S = 0.02


async def until_done(
    transports: Callable[[], Iterable[asyncio.Transport | None]],
    is_idle: Callable[[], bool],
    budget_s: float,
) -> bool:
    """Wait until no request is in flight (`is_idle`), and the kernel has all that was written to
    the open connections; False if the budget was spent first."""
    loop = asyncio.get_running_loop()
    end = loop.time() + budget_s
    while not is_idle() or any(map(_has_unsent, transports())):
        if loop.time() >= end:
            return False
        await asyncio.sleep(min(POLL_S, max(0.0, end - loop.time())))
    return True


def _has_unsent(transport: asyncio.Transport | None) -> bool:
    if transport is None or transport.is_closing():
        return False
    return transport.get_write_buffer_size() > 0
