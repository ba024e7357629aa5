"""Real backend processes for tests: alone, or under a stub supervisor with a real gms."""

from __future__ import annotations

import asyncio
import functools
import os
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine.backends import process
from engine.messages import (
    CHANNEL,
    CONTROL,
    AttachedMsg,
    BrokenMsg,
    FaultReportMsg,
    LoadMsg,
    MayLoadMsg,
    OkMsg,
    PreparedMsg,
    RegisterMsg,
    WokenMsg,
)
from gms.server.server import KvServer, WeightsServer
from gms.vmm.host import HostMemory
from lockserver.client import serving, witness
from plumbing.service.process import parent_environment
from plumbing.wire.connection import Connection, UnixConnection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message
from plumbing.wire.server import Server
from tests.helpers import auntil, free_witness

COMMAND = [sys.executable, "-m", "engine.backends.reference.main"]
DEADLINE_S = 60.0


class Supervisor:
    """A stub supervisor on the channel and the control socket; it grants everything at once."""

    def __init__(self, directory: Path, engine: str, load_mode: str) -> None:
        self.engine = engine
        self.registered: dict[str, int] = {}
        self.pidfds: dict[str, OwnedFd] = {}
        self.attached: list[AttachedMsg] = []
        self.notices: list[Message] = []
        self.is_channel_closed = False
        self.incarnation = witness.new_incarnation(engine)
        self.witness_path = free_witness(str(directory), self.incarnation)
        self.serving_path, self.serving_file = serving.create(str(directory), self.incarnation)
        self.control_path = str(directory / f"engine_{engine}.sock")
        self.backend: subprocess.Popen[bytes]
        self.woken: WokenMsg
        self.channel: Connection
        self._directory = directory
        self._load_mode = load_mode
        self._numbers = iter(range(1, 1000))
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._server = Server(self.control_path, CONTROL, self, service="engine")

    async def start(self, *arguments: str) -> None:
        await self._server.start()
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {
                **os.environ,
                **parent_environment(),
                process.CHANNEL_ENV: str(theirs.fileno()),
                process.WITNESS_ENV: self.witness_path,
                process.SERVING_ENV: self.serving_path,
                process.SERVING_ID_ENV: f"{self.serving_file.dev}:{self.serving_file.ino}",
                process.INCARNATION_ENV: self.incarnation,
                process.ENGINE_ID_ENV: self.engine,
                process.ENGINE_SOCKET_ENV: self.control_path,
                "GMS_SOCKET_DIR": str(self._directory),
            }
            self.backend = subprocess.Popen(  # noqa: ASYNC220 - it dies with its thread
                [*COMMAND, *arguments], env=environment, pass_fds=[theirs.fileno()]
            )
        self.channel = UnixConnection(ours, CHANNEL, self)

    async def stop(self) -> None:
        self.channel.close("the test is over")
        self.backend.kill()
        self.backend.wait()
        await self._all_gone()
        await self._server.close()

    async def _all_gone(self) -> None:
        """By pidfds: an orphan's place in /proc stays until its new parent reaps it."""
        for name, pidfd in self.pidfds.items():
            await auntil(functools.partial(_is_readable, pidfd), f"the {name} process to end")
            pidfd.close()
        self.pidfds.clear()

    def notice(self, kind: type[Any]) -> Any:
        return next((notice for notice in self.notices if isinstance(notice, kind)), None)

    async def prepared(self) -> PreparedMsg:
        await auntil(lambda: self.notices, "prepared", DEADLINE_S)
        found = self.notice(PreparedMsg)
        assert isinstance(found, PreparedMsg), self.notices
        return found

    async def fault_report(self) -> FaultReportMsg:
        await auntil(lambda: self.notice(FaultReportMsg), "a fault report", DEADLINE_S)
        report = self.notice(FaultReportMsg)
        assert isinstance(report, FaultReportMsg)
        return report

    async def ended(self) -> int:
        """The exit status of the backend, once both of its processes are gone."""
        await auntil(lambda: self.backend.poll() is not None, "the HTTP process to end")
        await self._all_gone()
        return self.backend.wait()

    async def ask(self, message: Message, *fds: OwnedFd) -> Message:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self.channel.send(message, number, fds)
        async with asyncio.timeout(DEADLINE_S):
            return await self._answers[number]

    # ------------------------------------------------------------------ wire.Handler

    def opened(self, conn: Connection) -> None:
        pass

    def closed(self, conn: Connection, reason: str) -> None:
        if conn is self.channel:
            self.is_channel_closed = True

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case RegisterMsg():
                self.registered[message.name] = message.pid
                self.pidfds[message.name] = OwnedFd(os.pidfd_open(message.pid))
                conn.send(OkMsg(), request_id)
            case MayLoadMsg():
                conn.send(LoadMsg(self._load_mode, 1), request_id)
            case AttachedMsg():
                self.attached.append(message)
                conn.send(OkMsg(), request_id)
            case BrokenMsg():
                self.notices.append(message)
                conn.send(OkMsg(), request_id)
            case _ if request_id:
                self._answers.pop(request_id).set_result(message)
            case _:
                self.notices.append(message)


@asynccontextmanager
async def memory_service(
    directory: Path, capacity_bytes: int = 64 << 20, device: str = "HOST-0"
) -> Any:
    server = WeightsServer(str(directory), device, HostMemory(), capacity_bytes)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def kv_service(directory: Path, device: str = "HOST-0") -> AsyncIterator[KvServer]:
    server = KvServer(str(directory), device, HostMemory(), None)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def supervisor(
    directory: Path, *arguments: str, engine: str = "engine-0", load_mode: str = "rw_or_ro"
) -> Any:
    stub = Supervisor(directory, engine, load_mode)
    await stub.start(*arguments)
    try:
        yield stub
    finally:
        await stub.stop()


def listening() -> tuple[socket.socket, str]:
    """The service socket as the lock server makes it, and its URL."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=128)
    sock.setblocking(False)
    return sock, f"http://127.0.0.1:{sock.getsockname()[1]}"


def lend(sock: socket.socket) -> OwnedFd:
    return OwnedFd(os.dup(sock.fileno()))


def is_fault(message: Message, code: str) -> bool:
    return isinstance(message, FaultMsg) and message.code == code


def _is_readable(fd: OwnedFd) -> bool:
    return bool(select.select([fd], [], [], 0)[0])
