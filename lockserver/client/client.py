"""What an engine's supervisor needs of the lock: one connection kept alive, one truth told.

Owns reconnecting, the heartbeat, and the copies of lent service sockets that are handed back after
a restart of the server. Must not know why something is wanted; `set_want` is told.

The surprising things: the current want is the first message on every connection, and it is all
that is ever said; a lost grant, a cut connection and a restarted server are mended by saying it
again. A lost connection is no lost lock: on one host the witness protects its holder, over TCP its
lease does, so `on_lost` asks for patience, not for anybody's death; `on_lease_lost` does ask for
it. While a supervisor reaps its tree it must not call `set_want`: over TCP, too, another
incarnation or none says that the last one is gone, and ends the watch over it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockserver import messages, witness
from lockserver.client.lease import Ender, LeaseWatch
from lockserver.messages import (
    CATALOGUE,
    Beat,
    Granted,
    HandOver,
    MemberLost,
    Renewed,
    Service,
    Want,
)
from plumbing.errors import RemoteError, UnderstudyError
from plumbing.wire.client import connect
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Fault, Message
from plumbing.wire.tcp.address import SCHEME, TcpAddress

if TYPE_CHECKING:
    from plumbing.wire.tcp.security import Security

__all__ = ["HEARTBEAT_MS", "LockClient", "messages", "witness"]

HEARTBEAT_MS = 500  # six of them fit into the server's silent_ms of 3 s
CONNECT_DEADLINE_S = 5.0
# Over TCP a lost packet may make one attempt hang: there must be time for another within a lease.
TCP_CONNECT_DEADLINE_S = 1.5
RETRY_MS_MIN = 10.0  # a restarted server is found again within a few of these
RETRY_MS_MAX = 500.0
FENCED = frozenset({"active"})  # the locks that nobody may act on once their lease has run out


def _ignore(*_: object) -> None:
    """The default of every callback."""


@dataclass(frozen=True, slots=True)
class _Truth:
    """The current want, without who says it."""

    incarnation: str | None = None
    witness: str | None = None
    locks: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)


class LockClient:
    """Keeps one supervisor's connection to the lock server.

    Callbacks run on the loop and must not block:

    - `on_granted(lock, incarnation, token)`: `incarnation` (anybody's) holds `lock`. The same
      grant may come again. Another's grant of a lock that one believes to hold means: lost.
    - `on_service(lock, address, fd)`: the listening socket of `lock`; takes `fd`. Comes on every
      connection that did not hand it back. Never `shutdown()` it: that ends it for everybody.
    - `on_refused(error)`: the server refuses this want (`lock.stale_claim`: the lock is lost, kill
      the tree; `lock.engine_id_taken`, …). The same want is tried again with back-off.
    - `on_hand_over(lock, incarnation, to)`: `incarnation`, which holds `lock`, is to finish, reap
      and give it up to engine `to`. May come again.
    - `on_connected()`, `on_lost(reason)`.

    Over TCP alone; the incarnation's tree must be killed and reaped at once:

    - `on_lease_lost(reason)`: the server could not be heard for too long while `active` was held.
      Comes once per incarnation. A little later the kernel ends this process, unless `set_want`
      says before then that it is reaped, or the server is heard.
    - `on_member_lost(reason)`: another of the nodes that this engine spans is gone, or this one was
      given up by the server. May come again.
    """

    def __init__(
        self,
        address: str,
        *,
        engine: str,
        supervisor: str | None = None,
        security: Security | None = None,
        member: int = 0,
        members: int = 1,
        on_granted: Callable[[str, str, int], object] = _ignore,
        on_service: Callable[[str, str, OwnedFd], object] | None = None,
        on_connected: Callable[[], object] = _ignore,
        on_lost: Callable[[str], object] = _ignore,
        on_refused: Callable[[UnderstudyError], object] = _ignore,
        on_hand_over: Callable[[str, str, str], object] = _ignore,
        on_lease_lost: Callable[[str], object] = _ignore,
        on_member_lost: Callable[[str], object] = _ignore,
        heartbeat_ms: float = HEARTBEAT_MS,
        ender: Ender | None = None,
    ) -> None:
        """`address` is the path of a Unix socket, or tcp://HOST:PORT with its `security`. `ender`
        stands in for the kernel's timer in tests.

        Raises:
            UnderstudyError: `lock.no_dead_man`: over TCP, and this process cannot have a timer.
        """
        self.address = address
        self.engine = engine
        self.unreachable: str | None = None  # why the last attempt to connect failed
        self.supervisor = supervisor or secrets.token_hex(8)
        self._on_granted = on_granted
        self._on_service = on_service
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._on_hand_over = on_hand_over
        self._on_member_lost = on_member_lost
        self._security = security
        self._member = member
        self._members = members
        self._lease: LeaseWatch | None = None
        if address.startswith(SCHEME):
            self._lease = LeaseWatch(on_lease_lost, ender)
        self._must_repeat = False  # a grant came that could not be acted on
        self._heartbeat_ms = heartbeat_ms
        self._truth = _Truth()
        self._services: dict[str, OwnedFd] = {}
        self._conn: Connection | None = None
        self._ended = asyncio.Event()
        self._progress = 0

    @property
    def is_connected(self) -> bool:
        return self._conn is not None

    @property
    def lease(self) -> dict[str, Any] | None:
        """For status, over TCP: how long the lease is good for, when the server was heard."""
        return None if self._lease is None else self._lease.document()

    def set_want(
        self,
        incarnation: str | None,
        witness: str | None,
        locks: Sequence[str] = (),
        tokens: Mapping[str, int] | None = None,
    ) -> None:
        """The whole truth from now on; said at once if it is new, and first on each connection.

        Args:
            incarnation: None between two launches: the last one has been reaped.
            witness: the witness's file name inside the directory (a path's directory is ignored).
            tokens: by lock, what this incarnation believes it holds.
        """
        name = witness.rpartition("/")[2] if witness is not None else None
        truth = _Truth(incarnation, name, tuple(locks), dict(tokens or {}))
        if truth == self._truth:
            return  # a holder that answers each grant with its token must not go round for ever
        if self._lease is not None and incarnation != self._truth.incarnation:
            self._lease.begin()
        self._truth = truth
        if self._conn is not None:
            self._conn.send(self._want())

    async def run(self) -> None:
        """Stay connected until cancelled."""
        retry_ms = RETRY_MS_MIN
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat())
                while True:
                    self._ended.clear()
                    try:
                        await self._connect()
                    except UnderstudyError as error:  # unreachable: tried again below
                        self.unreachable = error.message
                    else:
                        loop = asyncio.get_running_loop()
                        begun = loop.time()
                        await self._ended.wait()
                        if (loop.time() - begun) * 1000 > RETRY_MS_MAX:
                            retry_ms = RETRY_MS_MIN
                    await asyncio.sleep(retry_ms / 1000)
                    retry_ms = min(retry_ms * 2, RETRY_MS_MAX)
        finally:
            if self._conn is not None:
                self._conn.close("the supervisor is ending")
                self._conn = None
            if self._lease is not None:
                self._lease.close()
            close_all(self._services.values())
            self._services.clear()

    async def _connect(self) -> None:
        if not self.address.startswith(SCHEME):
            await connect(self.address, CATALOGUE, self, CONNECT_DEADLINE_S)
            return
        from plumbing.wire.tcp.server import connect_tcp  # who uses the Unix socket needs no TLS

        where = TcpAddress.parse(self.address)
        await connect_tcp(where, CATALOGUE, self, self._security, TCP_CONNECT_DEADLINE_S)

    async def _beat(self) -> None:
        lease = self._lease
        while True:
            usual_ms = self._heartbeat_ms
            await asyncio.sleep((lease.beat_ms(usual_ms) if lease else usual_ms) / 1000)
            if self._conn is None:
                continue
            if lease is not None and lease.is_silent():
                self._conn.close("the lock server answers nothing; connecting anew")
            elif self._must_repeat:
                self._conn.send(self._want())
            else:
                self._conn.send(Beat(self._next_progress()))

    def _next_progress(self) -> int:
        """The number of the message that is about to be sent, from when its answer counts."""
        self._progress += 1
        if self._lease is not None and self._truth.incarnation is not None:
            self._lease.sent(self._progress)
        return self._progress

    def _want(self, services: tuple[str, ...] = ()) -> Want:
        truth, self._must_repeat = self._truth, False
        return Want(
            supervisor=self.supervisor,
            engine=self.engine,
            incarnation=truth.incarnation,
            witness=truth.witness,
            locks=truth.locks,
            tokens=dict(truth.tokens),
            services=services,
            member=self._member,
            members=self._members,
            progress=self._next_progress(),
        )

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conn, self.unreachable = conn, None
        if self._lease is not None:
            self._lease.opened()
        copies = [fd.duplicate() for fd in self._services.values()]
        conn.send(self._want(tuple(self._services)), fds=copies)
        self._on_connected()

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if self._lease is not None:
            self._lease.heard()
        if isinstance(message, Granted):
            self._granted(message)
        elif isinstance(message, Renewed) and self._lease is not None:
            self._lease.renewed(message)
        elif isinstance(message, MemberLost):
            if message.incarnation == self._truth.incarnation:
                is_own = message.member == self._member
                who = "this supervisor" if is_own else f"member {message.member} of this engine"
                self._on_member_lost(f"the lock server has lost {who}: {message.reason}")
        elif isinstance(message, Service):
            self._borrow(message, fds[0])
        elif isinstance(message, HandOver):
            self._on_hand_over(message.lock, message.incarnation, message.to)
        elif isinstance(message, Fault):
            self._on_refused(RemoteError(message.code, message.message, **message.details))

    def closed(self, conn: Connection, reason: str) -> None:
        if self._conn is conn:
            self._conn = None
            if self._lease is not None:
                self._lease.cut()
            self._on_lost(reason)
        self._ended.set()

    def _granted(self, message: Granted) -> None:
        """Anybody's grant is news; our own is acted on only under a lease that runs."""
        if self._lease is not None and message.incarnation == self._truth.incarnation:
            if not self._lease.may_act():
                self._must_repeat = True
                return
            if message.lock in FENCED:
                self._lease.hold()
        self._on_granted(message.lock, message.incarnation, message.token)

    def _borrow(self, message: Service, fd: OwnedFd) -> None:
        """Keep one copy to hand back after a restart of the server; give the engine another."""
        known = self._services.pop(message.lock, None)
        if known is not None:
            known.close()
        self._services[message.lock] = fd
        if self._on_service is not None:
            self._on_service(message.lock, message.address, fd.duplicate())
