"""One child of a gateway as its parent sees it: its process, the channel to it, its last beat.

Decides nothing: `gateway.core.children` does. The surprising thing: a child's last words may arrive
after its end was seen, so its counts are read until the channel ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Protocol

from gateway import messages as msg
from plumbing.pod.child_process import ChildProcess
from plumbing.pod.supervision import CpuTimes, Silence
from plumbing.service import procfs
from plumbing.service.clock import Clock
from plumbing.service.process import parent_environment
from plumbing.wire.connection import Connection, Handler, UnixConnection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message

COMMAND = (sys.executable, "-m", "gateway.server")
FINAL_READ_S = 1.0  # to read what a dead child has sent: it has all arrived already


class ChildOwner(Protocol):
    """Whom a child's link tells what it hears."""

    def beaten(self, link: ChildLink) -> None: ...

    def demanded(self, link: ChildLink, demand: msg.ModelDemandMsg) -> None: ...

    def happened(self, link: ChildLink, event: msg.GatewayEventMsg) -> None: ...

    def ended(self, link: ChildLink) -> None:
        """The process is reaped; `link.said` has its last words where it could not start."""

    def read_out(self, link: ChildLink) -> None:
        """The channel ended too: nothing more will be counted."""


class ChildLink(Handler):
    """A child and the channel to it."""

    def __init__(self, number: int, owner: ChildOwner, clock: Clock) -> None:
        self.number = number
        self.beat: msg.GatewayBeatMsg | None = None
        self.beaten_ms = 0.0
        self.accepting_since_ms: float | None = None
        self.said = ""  # why it could not go on, in its own words
        self.process: ChildProcess | None = None
        self.started_ms = clock.now_ms()
        self._owner, self._clock = owner, clock
        self._conn: Connection | None = None
        self._silence = Silence()
        self._looked_ms = self.started_ms
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def start(self, command: Sequence[str], settings: msg.ConfigureGatewayMsg) -> None:
        """Start the process and configure it.

        Raises:
            OSError: there is no room for a process or its descriptors; nothing is left of it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            conn = UnixConnection(ours, msg.CHANNEL, self)
            undo.pop_all()
            undo.callback(conn.close, "no process was started")
            more = {msg.CHANNEL_ENV: str(theirs.fileno()), **parent_environment()}
            environ = {**os.environ, **more}
            self.process = ChildProcess(command, environ, pass_fds=(theirs.fileno(),))
            undo.pop_all()
        self._conn = conn
        conn.send(settings)
        task = asyncio.get_running_loop().create_task(self._watch(self.process))
        self._tasks.add(task)

    def send(self, message: Message, fds: Sequence[OwnedFd] = ()) -> None:
        """Takes `fds`. What a child that is gone does not read is dropped."""
        if self._conn is None:
            close_all(fds)
            return
        self._conn.send(message, fds=fds)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def silent_ms(self) -> float:
        """For how long nothing was heard of it, not counting what is no fault of its own."""
        now_ms = self._clock.now_ms()
        elapsed_ms, self._looked_ms = now_ms - self._looked_ms, now_ms
        found = procfs.cpu_times(self.pid)
        self._silence.look(elapsed_ms, None if found is None else CpuTimes(*found))
        return self._silence.ms

    async def _watch(self, process: ChildProcess) -> None:
        await process.wait()
        if self.beat is None:  # what it says about its start decides; a successor waits for nothing
            await self._read_out()
        self._owner.ended(self)
        await self._read_out()
        if self._conn is not None:
            self._conn.close("the process is gone")
        self._owner.read_out(self)

    async def _read_out(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_READ_S):
                await self._closed.wait()

    # ------------------------------------------------------------------ as the wire's handler

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        self._silence.answered()
        match message:
            case msg.GatewayBeatMsg():
                was_accepting = self.beat is not None and self.beat.is_accepting
                self.beat, self.beaten_ms = message, self._clock.now_ms()
                if message.is_accepting != was_accepting:
                    self.accepting_since_ms = self.beaten_ms if message.is_accepting else None
                self._owner.beaten(self)
            case msg.ModelDemandMsg():
                self._owner.demanded(self, message)
            case msg.GatewayEventMsg():
                self._owner.happened(self, message)
            case FaultMsg():
                self.said = message.message

    def closed(self, conn: Connection, reason: str) -> None:
        """A child closes the channel as it exits; one that does not exit can no longer be led."""
        self._closed.set()
        if self.process is not None and self.process.returncode is None:
            asyncio.get_running_loop().call_later(FINAL_READ_S, self._end_it)

    def _end_it(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
