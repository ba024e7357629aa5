"""The main program of a gateway's child: `python -m gateway.server`, started by `gateway serve`.

Owns the channel to the parent: what the parent says reaches `ClientListener`, and what they say of
themselves goes back, as beats. It decides nothing about requests. It dies with its parent, and
exits when the channel ends.

The surprising thing: everything is imported and configured before the first beat, since that beat
says "I could accept now"; a spare then waits, for weeks if need be.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from gateway import messages as msg
from gateway.server.client_listener import ClientListener, Parent
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.pod.cli import run_async
from plumbing.service import log
from plumbing.service.process import arm_from_environment
from plumbing.wire.connection import Connection, Handler, UnixConnection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from pool.client.link import DemandPace

ORPHANED = 1  # the exit code when the parent is gone

logger = logging.getLogger(__name__)


MakeListener = Callable[[msg.ConfigureGatewayMsg, Parent], ClientListener]


class ParentLink(Handler):
    """The channel: the first message configures, and every other one goes to the listener."""

    def __init__(self, make_listener: MakeListener) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.closed_event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._make_listener = make_listener
        self._listener: ClientListener | None = None
        self._conn: UnixConnection | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._progress = 0
        self._is_beat_due = False
        self._demand: msg.ModelDemandMsg | None = None  # what was said last
        self._demand_due: asyncio.TimerHandle | None = None
        self._demand_pace = DemandPace()

    # ------------------------------------------------------------------ as the listener's parent

    def happened(self, event: msg.GatewayEventMsg) -> None:
        if self._conn is not None:
            self._conn.send(event)

    def beat_now(self) -> None:
        if not self._is_beat_due:
            self._is_beat_due = True
            self._loop.call_soon(self._beat)

    def demand_changed(self) -> None:
        if self._demand_due is None:
            at_s = self._demand_pace.next_s(self._loop.time())
            self._demand_due = self._loop.call_at(at_s, self._tell_demand)

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        assert isinstance(conn, UnixConnection)
        self._conn = conn

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if isinstance(message, msg.ConfigureGatewayMsg):
            self._configure(message)
            return
        listener = self._listener
        if listener is None:
            close_all(fds)
            raise ProtocolError("gateway.not_configured", f"{message.TYPE} came before configure")
        match message:
            case msg.AcceptMsg():
                listener.accept(fds[0], message.address)
                self.beat_now()
            case msg.NewsMsg():
                listener.told(message.event)
                self.beat_now()
            case msg.ModelDoorsMsg():
                listener.set_model_doors(message)
                self._tell_demand()
            case msg.StopMsg():
                stopping = self._loop.create_task(self._stop(listener, message.budget_ms))
                self._stopping.add(stopping)
                self.beat_now()
            case _:
                raise ProtocolError("gateway.not_for_a_child", f"a child accepts no {message.TYPE}")

    def closed(self, conn: Connection, reason: str) -> None:
        """Nobody could stop this process now, and its successor may accept already."""
        self._conn = None
        self.closed_event.set()
        if not self.ended.done():
            logger.error("lost the gateway's parent process (%s); this child exits", reason)
            self.ended.set_result(ORPHANED)

    # ------------------------------------------------------------------ inside

    def _configure(self, settings: msg.ConfigureGatewayMsg) -> None:
        try:
            self._listener = self._make_listener(settings, self)
        except UnderstudyError as error:
            assert self._conn is not None
            self._conn.fault(error)
            self.ended.set_result(error.exit_code)
            return
        gc.collect()
        gc.freeze()  # what is imported stays: no later collection scans it while streams wait
        self._beat_regularly()

    def _beat_regularly(self) -> None:
        self._tell_demand()
        self._beat()
        self._loop.call_later(msg.BEAT_MS / 1000, self._beat_regularly)

    def _tell_demand(self) -> None:
        """What there is for the models of a pool, if it is not what was said last."""
        if self._demand_due is not None:
            self._demand_due.cancel()
            self._demand_due = None
        if self._conn is None or self._listener is None or self._conn.is_backed_up:
            return
        demand = self._listener.demand()
        if demand is not None and demand != self._demand:
            self._demand = demand
            self._demand_pace.said(self._loop.time())
            self._conn.send(demand)

    def _beat(self) -> None:
        self._is_beat_due = False
        if self._conn is None or self._listener is None:
            return
        self._progress += 1
        if not self._conn.is_backed_up:  # else the parent is stopped, and has enough to read
            self._conn.send(self._listener.beat(self._progress))

    async def _stop(self, listener: ClientListener, budget_ms: float) -> None:
        await listener.stop(budget_ms)
        self._tell_demand()
        self._beat()  # the last word: what was counted
        if self._conn is not None:
            self._conn.close_soon("this child has finished")
        if not self.ended.done():
            self.ended.set_result(0)


async def serve(make_listener: MakeListener) -> int:
    """Be a child until told to stop; the exit code."""
    sock = socket.socket(fileno=int(os.environ.pop(msg.CHANNEL_ENV)))
    os.set_inheritable(sock.fileno(), False)
    link = ParentLink(make_listener)
    conn = UnixConnection(sock, msg.CHANNEL, link)
    try:
        return await link.ended
    finally:
        conn.close_soon("this child exits")
        await link.closed_event.wait()  # its last words are sent, or late


def run(make_listener: MakeListener) -> None:
    """The whole life of a child process."""
    arm_from_environment()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A terminal or an init system may send it to the whole group; the parent decides.
        signal.signal(signum, signal.SIG_IGN)
    log.configure("gateway", pid=os.getpid())
    sys.exit(run_async(lambda: serve(make_listener)))
