"""Stand-ins for members over TCP: the messages of a supervisor, sent by hand, without a client.

As a program, with the arguments of `_main`: a member in its own process that sends heartbeats until
it is stopped or killed, requests `active`, claims what it is granted, and writes the messages it
receives to stdout as JSON lines. A line on stdin makes it reap.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from typing import Any

from lockserver.messages import CATALOGUE, BeatMsg, GrantedMsg, MemberLostMsg, RenewedMsg, WantMsg
from lockserver.witness import name_of, new_incarnation
from plumbing.errors import UnderstudyError
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import FaultMsg, Message
from plumbing.wire.tcp import Security, connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import auntil

BEAT_S = 0.05


class Member:
    """One member's connection; `connect` replaces it. Sends heartbeats while `beats` is true."""

    def __init__(
        self, address: str, security: Security, engine: str, member: int = 0, members: int = 1
    ) -> None:
        self.address, self.security = TcpAddress.parse(address), security
        self.engine, self.member, self.members = engine, member, members
        self.supervisor = secrets.token_hex(8)
        self.incarnation: str | None = None
        self.locks: tuple[str, ...] = ()
        self.tokens: dict[str, int] = {}
        self.heard: list[Message] = []
        self.ended: str | None = None
        self.beats = True
        self.progress = 0
        self.conn: Connection | None = None
        self._joined: Connection | None = None  # a heartbeat before the request is refused
        self._beating: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ sending

    async def connect(self) -> None:
        self.ended = None
        self.conn = await connect_tcp(self.address, CATALOGUE, self, self.security, 10.0)
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())

    async def join(self, *locks: str) -> str:
        """Connect and launch at once, because a connection that sends nothing is closed."""
        await self.connect()
        return self.launch(*locks)

    def launch(self, *locks: str) -> str:
        """Report a new incarnation at once: the last one is reaped."""
        self.incarnation, self.locks, self.tokens = new_incarnation(self.engine), locks, {}
        self.want()
        return self.incarnation

    def reap(self) -> None:
        self.incarnation, self.locks, self.tokens = None, (), {}
        self.want()

    def want(self) -> None:
        assert self.conn is not None
        self.progress += 1
        witness = name_of(self.incarnation) if self.incarnation else None
        self.conn.send(
            WantMsg(
                supervisor=self.supervisor,
                engine=self.engine,
                incarnation=self.incarnation,
                witness=witness,
                locks=self.locks,
                tokens=self.tokens,
                member=self.member,
                members=self.members,
                progress=self.progress,
            )
        )
        self._joined = self.conn

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            conn = self._joined
            if self.beats and conn is not None and conn is self.conn and not conn.is_closed:
                self.progress += 1
                conn.send(BeatMsg(self.progress))

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        if self.conn is not None:
            self.conn.close("the test is over")
            await auntil(lambda: self.ended, "the connection to end")

    # ------------------------------------------------------------------ receiving

    def opened(self, conn: Connection) -> None:
        pass

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if isinstance(message, GrantedMsg) and message.incarnation == self.incarnation:
            self.tokens = {message.lock: message.token}
        self.heard.append(message)

    def closed(self, conn: Connection, reason: str) -> None:
        if conn is self.conn:
            self.ended = reason

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def token(self) -> int:
        """The token of the last grant of `active` to this incarnation; 0 if there was none."""
        own = [m.token for m in self.of(GrantedMsg) if m.incarnation == self.incarnation]
        return own[-1] if own else 0

    async def granted(self) -> int:
        return await auntil(self.token, f"member {self.member} of {self.engine} to be granted")

    async def lost(self) -> MemberLostMsg:
        def found() -> MemberLostMsg | None:
            own = [m for m in self.of(MemberLostMsg) if m.incarnation == self.incarnation]
            return own[-1] if own else None

        return await auntil(found, f"member {self.member} of {self.engine} to hear of a loss")

    async def refused(self) -> str:
        fault = await auntil(lambda: self.of(FaultMsg), f"{self.engine} to be refused")
        return str(fault[-1].code)

    async def renewed(self) -> RenewedMsg:
        found = await auntil(lambda: self.of(RenewedMsg), "an answer")
        return found[-1]


class MemberProcess:
    """A `Member` in its own process."""

    def __init__(
        self, address: str, security: Security, engine: str, member: int, members: int
    ) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", __name__, address),
                *(security.cert, security.key, security.ca, engine),
                *(str(member), str(members)),
            ],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
        )
        self._read = b""
        self.incarnation: str = self.hear("launched")["incarnation"]

    def hear(self, kind: str) -> dict[str, Any]:
        """The next line of this kind; blocks until it arrives."""
        while True:
            line = self._line(kind)
            document: dict[str, Any] = json.loads(line)
            if document["kind"] == kind:
                return document

    def _line(self, kind: str) -> bytes:
        assert self.process.stdout is not None
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.process.stdout], [], [], 30.0)
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert data, f"the member was waited for in vain to say {kind}"
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line

    def granted(self) -> int:
        while True:
            heard = self.hear("granted")
            if heard["incarnation"] == self.incarnation:
                return int(heard["token"])

    def reap(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"reap\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stdin):
            assert stream is not None
            stream.close()


class _Telling(Member):
    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        super().received(conn, message, request_id, fds)
        if isinstance(message, GrantedMsg):
            tell("granted", incarnation=message.incarnation, token=message.token)
        elif isinstance(message, MemberLostMsg):
            tell("member_lost", incarnation=message.incarnation, member=message.member)
        elif isinstance(message, FaultMsg):
            tell("refused", code=message.code)


def tell(kind: str, **data: Any) -> None:
    print(json.dumps({"kind": kind, **data}), flush=True)


async def _main(
    address: str, cert: str, key: str, ca: str, engine: str, member: str, members: str
) -> None:
    me = _Telling(address, Security(cert, key, ca), engine, int(member), int(members))
    await me.connect()
    tell("launched", incarnation=me.launch("active"))
    loop = asyncio.get_running_loop()
    loop.add_reader(0, lambda: (os.read(0, 100), me.reap()))
    while True:
        if me.conn is None or me.conn.is_closed:
            with contextlib.suppress(UnderstudyError):  # it is being restarted
                await me.connect()
                me.want()
        await asyncio.sleep(BEAT_S)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
