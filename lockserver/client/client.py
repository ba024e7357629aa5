"""What an engine's supervisor needs of the lock: one connection kept alive, one want kept sent.

The surprising things: the current want is the first message on every connection, and nothing else
is ever sent but heartbeats; a lost grant, a cut connection and a restarted server are all fixed by
sending it again. A lost connection is not a lost lock: on one host the witness protects its holder,
over TCP its lease does. So `lose` asks for patience; only `lease_lost` asks for the tree to be
killed. While a supervisor reaps its tree it must not call `set_want`: naming another incarnation
or none states that the last one is gone, and over TCP ends the watch over it.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from lockserver.client.grants import GrantsConnection
from lockserver.client.lease import DeadMan, LeaseWatch
from lockserver.messages import (
    CATALOGUE,
    NO_ERA,
    BeatMsg,
    GrantedMsg,
    HandOverMsg,
    RenewedMsg,
    ServiceMsg,
    StandbyMsg,
    WantMsg,
)
from plumbing.errors import UnderstudyError
from plumbing.pod.models import ACTIVE
from plumbing.wire.connection import Connection
from plumbing.wire.messages import Message
from plumbing.wire.tcp_address import SCHEME, TcpAddress

if TYPE_CHECKING:
    from plumbing.wire.tcp import Security

HEARTBEAT_MS = 500  # six of them fit into the server's silent_ms of 3 s
# Over TCP a lost packet may make one attempt hang: there must be time for another within a lease.
TCP_CONNECT_DEADLINE_S = 1.5


class LockClient(GrantsConnection):
    """Keeps one supervisor's connection to the lock server. A subclass says what follows from what
    it hears, without blocking; `begin` and `lose` say when it is connected."""

    def __init__(
        self,
        address: str,
        *,
        engine: str,
        lock: str = ACTIVE,
        supervisor: str | None = None,
        security: Security | None = None,
        heartbeat_ms: float = HEARTBEAT_MS,
        ender: DeadMan | None = None,
    ) -> None:
        """Connect later, in `run`.

        Args:
            address: the path of a Unix socket, or tcp://HOST:PORT with its `security`.
            lock: of the engine's model; of others nothing is heard.
            supervisor: this process's id, 16 hex digits; random unless given.
            ender: stands in for the kernel's timer in tests.

        Raises:
            UnderstudyError: `lock.no_dead_man`: over TCP, and this process cannot have a timer.
        """
        super().__init__(address)
        self.engine, self.lock = engine, lock
        self.supervisor = supervisor or secrets.token_hex(8)
        self._security = security
        self._lease: LeaseWatch | None = None
        if address.startswith(SCHEME):
            self._lease = LeaseWatch(self.lease_lost, ender)
        self._must_repeat = False  # a grant arrived that could not be acted on
        self._heartbeat_ms = heartbeat_ms
        # Without `progress`, which belongs to one sending.
        self._want = WantMsg(self.supervisor, engine, None, lock)
        self._progress = 0

    # ------------------------------------------------------------------ what is heard

    def granted(self, incarnation: str, token: int) -> None:
        """`incarnation` (of any engine) holds the lock. The same grant may arrive again. A grant to
        another of what this engine believes to hold means that it is lost. An older token than one
        that was heard before is refused, not reported."""

    def leaving(self, token: int) -> None:
        """The holder, another engine, was told to end."""

    def standby(self, news: StandbyMsg) -> None:
        """Whether another engine could be granted the lock that this one holds, and continue its
        streams; what was said before counts until the connection is lost."""

    def service(self, address: str) -> None:
        """Where clients connect."""

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        """The server refuses this want (`lock.stale_claim`: the lock is lost, kill the tree;
        `lock.engine_id_taken`, …), or cannot be believed (`lock.old_token`). The same want is
        retried with back-off."""

    def hand_over(self, message: HandOverMsg) -> None:
        """Hand the lock over. May arrive again."""

    def lease_lost(self, reason: str) -> None:
        """Over TCP, the server could not be heard for too long while the lock was held: the
        incarnation's tree must be killed and reaped at once. Called once per incarnation. A little
        later the kernel ends this process, unless `set_want` states before then that the tree is
        reaped, or the server is heard."""

    # ------------------------------------------------------------------ what is wanted

    @property
    def lease(self) -> dict[str, Any] | None:
        """For status, over TCP: how long the lease is good for, when the server was heard."""
        return None if self._lease is None else self._lease.document()

    def set_want(
        self,
        incarnation: str | None,
        *,
        is_wanted: bool = False,
        token: int = 0,
        **more: Any,
    ) -> None:
        """Replace the whole want; sent at once if new, and first on each connection. The fields are
        those of `WantMsg`, which has defaults for `more`. Grants up to the token `over` are not
        reported."""
        who = self.supervisor, self.engine, incarnation, self.lock
        want = WantMsg(*who, is_wanted, token, **more)
        if want == self._want:
            return  # else a holder that answers each grant with its token would loop forever
        if self._lease is not None and incarnation != self._want.incarnation:
            self._lease.begin()
        self._want = want
        if self.conn is not None:
            self.conn.send(self._message())

    def era_of(self, token: int) -> str:
        """The era of the newest grant that was heard, if `token` is its token."""
        grant = self.newest.get(self.lock)
        return grant.era if grant is not None and grant.token == token else NO_ERA

    async def run(self) -> None:
        """Stay connected until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat())
                await super().run()
        finally:
            if self._lease is not None:
                self._lease.close()

    async def _connect(self) -> None:
        if not self.path.startswith(SCHEME):
            await super()._connect()
            return
        from plumbing.wire.tcp import connect_tcp  # the Unix socket needs no TLS

        where = TcpAddress.parse(self.path)
        assert self._security is not None, "over TCP the caller has certificates"
        await connect_tcp(where, CATALOGUE, self, self._security, TCP_CONNECT_DEADLINE_S)

    async def _beat(self) -> None:
        lease = self._lease
        while True:
            usual_ms = self._heartbeat_ms
            await asyncio.sleep((lease.beat_ms(usual_ms) if lease else usual_ms) / 1000)
            if self.conn is None:
                continue
            if lease is not None and lease.is_silent():
                self.conn.close("the lock server does not answer; reconnecting")
            elif self._must_repeat:
                self.conn.send(self._message())
            else:
                self.conn.send(BeatMsg(self._next_progress()))

    def _next_progress(self) -> int:
        """The number of the message that is about to be sent; a lease counts from here."""
        self._progress += 1
        if self._lease is not None and self._want.incarnation is not None:
            self._lease.sent(self._progress)
        return self._progress

    def _message(self) -> WantMsg:
        self._must_repeat = False
        return replace(self._want, progress=self._next_progress())

    # ------------------------------------------------------------------ as the wire's handler

    def begin(self, conn: Connection) -> None:
        self.problem = None
        if self._lease is not None:
            self._lease.heard()
        conn.send(self._message())

    def hear(self, message: Message, request_id: int) -> None:
        if self._lease is not None:
            self._lease.heard()
        match message:
            case GrantedMsg() if message.lock == self.lock and self.believes(message):
                self._granted(message)
            case StandbyMsg() if message.incarnation == self._want.incarnation:
                self.standby(message)
            case RenewedMsg() if self._lease is not None:
                self._lease.renewed(message.progress, message.lease_ms)
            case ServiceMsg(address):
                self.service(address)
            case HandOverMsg():
                self.hand_over(message)

    def lose(self, reason: str) -> None:
        if self._lease is not None:
            self._lease.cut()

    def _granted(self, message: GrantedMsg) -> None:
        """Report any grant that can be believed; act on our own only under a valid lease."""
        is_own = message.incarnation == self._want.incarnation
        if is_own and message.token <= self._want.over:
            return  # sent before the server had heard of the hand-over
        if self._lease is not None and is_own:
            if not self._lease.may_act():
                self._must_repeat = True
                return
            self._lease.hold()
        self.granted(message.incarnation, message.token)
        if message.is_leaving and not is_own:
            self.leaving(message.token)
