"""The supervisor's side of the lock: what it wants, what was granted, and the socket that the
backend accepts from.

Nothing is sent between a failure and the reaping, so a call of `tell` in that time is a bug. A
reconnect repeats the last want, which still protects the dying tree. What a grant leads to is
`engine/core`.

*Succession.* An engine that is told to end says so in its want, and waits until the lock server
knows of a successor that stays, or that there is none. The successor hears that the holder leaves,
waits `SETTLE_MS`, and confirms in its own want, unless it was told to end meanwhile. If a whole pod
is told to end, no engine confirms.

*Sockets.* The backend gets a private socket, bound anew for each wake. Its copy is the only one, so
its death breaks every connection that it has not accepted, at once; `remove` then unlinks the file.
With a TCP lock server there is no gateway, and the socket is at the engine's own address: clients
of an inactive engine are refused, not kept waiting. Over TCP the supervisor also looks for what an
earlier supervisor of the engine left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from typing import Any

from engine.core.events import Failed, Granted, HandOver, OtherGranted, Succession
from engine.core.lifecycle import Situation
from engine.schema import EngineOther
from engine.supervisor.hub import EngineHub, shortage
from engine.supervisor.incarnation import Incarnation
from lockserver.client import messages as lock_messages
from lockserver.client import witness
from lockserver.client.client import LockClient
from plumbing.errors import UnderstudyError, is_shortage
from plumbing.pod.models import lock_of
from plumbing.service import procfs
from plumbing.text import duration
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.tcp_address import TcpAddress

# Refusals of a want that end this incarnation.
FATAL_REFUSALS = {
    "lock.stale_claim": "lock_lost",
    "lock.incarnation_ended": "lock_lost",
    "lock.witness_unproven": "witness_unproven",
    "lock.bad_want": "hand_over_refused",  # nothing else that this side sends can be refused so
}
# How soon to try again to get the listening socket: the last engine may hold the service address
# for a moment, or there is no memory left.
LISTENER_RETRY_MS = 50.0
# A host tells all processes of a pod to end within milliseconds of each other; on a busy machine a
# process needs more to notice. The streams run on meanwhile.
SETTLE_MS = 200.0
# For the answer: `SETTLE_MS` and the time of a busy machine. Without one streams are finished. Also
# for the streams that wait for this engine: a gateway asks within some 100 ms of a grant.
ANSWER_MS = 1_000.0


class LockSide(LockClient):
    """Posts what the lock server reports."""

    def __init__(self, hub: EngineHub) -> None:
        settings = hub.settings
        super().__init__(
            settings.lockserver_socket,
            engine=settings.engine,
            lock=lock_of(settings.model),
            security=settings.lockserver_security,
        )
        self.other: EngineOther | None = None  # the last known grant to another engine
        self.has_standby = False  # as far as is known: another engine could be granted `active`
        self.is_continued = False  # … and could continue this one's streams in a drain
        path = None if settings.is_remote else settings.private_path
        self.listener = BackendListener(path, settings.service_address)
        self.address = self.listener.name  # where clients connect
        self._hub = hub
        self._now = Situation()  # as it was said last, and of which incarnation
        self._running: Incarnation | None = None
        self._succeeds = 0  # the token of the holder that this engine vouches for

    @property
    def first_problem(self) -> str | None:
        """What keeps this engine from getting the lock, or from serving under it."""
        return self.problem or self.listener.problem

    # ------------------------------------------------------------------ what is wanted

    def tell(self, now: Situation, running: Incarnation | None) -> None:
        """Say what is wanted `now`; `running` is None once it is reaped."""
        self._now, self._running = now, running
        if not now.token:
            self.has_standby = self.is_continued = False
        if now.has_told:
            self._succeeds = 0
        if running is None:
            self.listener.remove()
        self.repeat()

    def repeat(self) -> None:
        """Say again what is wanted; the client sends it if it is new."""
        now, named = self._now, self._running
        leaving: dict[str, Any] = {"is_leaving": now.has_told, "succeeds": self._succeeds}
        if named is None:
            self.set_want(None, **leaving)
            return
        has_gateway = not self._hub.settings.is_remote
        self.set_want(
            named.id,
            # One that leaves keeps what it has, and waits for nothing.
            is_wanted=now.in_line and (now.token > 0 or not now.has_told),
            token=now.token,
            continuation=named.prepared.continuation if named.prepared and has_gateway else "",
            over=now.over,  # for the rest of its life
            **leaving,
        )

    # ------------------------------------------------------------------ succession

    def await_successor(self) -> None:
        """Post `Succession` once the lock server has answered, or streams that wait for this engine
        have had their time."""
        self._hub.after("succession", ANSWER_MS, lambda: self._settled(resume=False))

    def _settled(self, *, resume: bool) -> None:
        """There is an answer: whether a successor stays. Ignored where none is waited for."""
        self._hub.post(Succession(resume))

    def leaving(self, token: int) -> None:
        """The holder under `token` was told to end: was this engine, too?"""
        if not self._now.has_told and token != self._succeeds:
            self._hub.after("vouch", SETTLE_MS, lambda: self._vouch(token))

    def _vouch(self, token: int) -> None:
        if not self._now.has_told:
            self._succeeds = token
            self.repeat()

    # ------------------------------------------------------------------ what the server reports

    def granted(self, incarnation: str, token: int) -> None:
        engine = incarnation.rpartition("-")[0]
        if engine == self._hub.settings.engine:
            self._hub.post(Granted(incarnation, token))
        else:
            self.other = EngineOther(engine, token)
            self._hub.post(OtherGranted(engine, token))

    def standby(self, news: lock_messages.StandbyMsg) -> None:
        self.has_standby, self.is_continued = news.is_ready, news.continues
        if news.is_settled:
            self._settled(resume=self.is_continued)

    def hand_over(self, message: lock_messages.HandOverMsg) -> None:
        self._hub.post(HandOver(message.incarnation, message.to, message.resume))

    def service(self, address: str) -> None:
        self.address = address

    def begin(self, conn: Connection) -> None:
        super().begin(conn)
        text = "connected to the lock server"
        self._hub.log.record("engine.lock", text, data={"connected": True})

    def lose(self, reason: str) -> None:
        super().lose(reason)
        # No engine is granted a lock by a server that is away.
        self.has_standby = self.is_continued = False
        self._settled(resume=False)
        lease = self.lease
        how_long = "continuing"
        if lease is not None and lease["is_held"]:
            how_long = f"continuing for {duration(lease['valid_for_ms'])} under the lease"
        text = f"lost the lock server ({reason}); {how_long} and reconnecting"
        self._hub.log.record("engine.lock", text, "warning", {"connected": False})

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        data = {"error_code": error.code}
        self._hub.log.record("engine.lock", f"refused: {error.message}", "error", data)
        cause = FATAL_REFUSALS.get(error.code)
        if cause is not None and self._now.in_line:
            self._end(cause, error.message)

    def lease_lost(self, reason: str) -> None:
        self._end("lease_lost", reason)

    def _end(self, cause: str, reason: str) -> None:
        if self._running is not None:
            self._hub.post(Failed(cause, reason))


BACKLOG = 4096  # as the lock server's: net.core.somaxconn's default


class BackendListener:
    """The socket that the backend accepts from, bound anew for each wake. `problem` is why it could
    not be bound at the last attempt."""

    def __init__(self, path: str | None, address: TcpAddress | None = None) -> None:
        """`path`: of the private socket, for a gateway. Else `address`, for clients, with a numeric
        host."""
        self.path, self._address = path, address
        self.name = str(address).partition("://")[2] if address is not None else None  # HOST:PORT
        self.problem: str | None = None
        self._is_ours = False

    def listen(self) -> OwnedFd | None:
        """The only copy of a fresh listening socket, in place of any other at `path`; None if there
        cannot be one for now: ask again."""
        self.remove_leftover()
        try:
            listening = self._bind()
        except OSError as error:
            if self.path is not None or self.problem is None:  # who holds a port is seen slowly
                self.problem = self._why(error)
            return None
        self.problem, self._is_ours = None, True
        return listening

    def remove(self) -> None:
        """Allow no more connections. Harmless to repeat. What we have not bound stays: a second
        supervisor of this engine, which is refused, must not take the first one's away."""
        self.problem = None
        if self._is_ours:
            self.remove_leftover()

    def remove_leftover(self) -> None:
        """Unlink what is at `path`, whatever bound it: only for the engine's one supervisor."""
        self._is_ours = False
        if self.path is not None:
            with contextlib.suppress(OSError):  # then `listen` fails, with the reason
                os.unlink(self.path)

    def _bind(self) -> OwnedFd:
        family = socket.AF_UNIX
        place: str | tuple[str, int] = self.path or ""
        if self._address is not None:
            place = (self._address.host, self._address.port)  # numeric: nothing is resolved
            family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            if self._address is not None:
                # Connections of the last engine may still be in TIME_WAIT; a second listener is
                # refused all the same.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            umask = os.umask(0o177)  # 0600 from the moment it exists
            try:
                sock.bind(place)
            finally:
                os.umask(umask)
            sock.listen(BACKLOG)
            return OwnedFd(sock.detach())

    def _why(self, error: OSError) -> str:
        if is_shortage(error):
            return shortage("open the listening socket", error)
        retries = "retrying until the waking budget is spent;"
        if self._address is None:
            return (
                f"cannot listen on {self.path}: {error.strerror}; {retries} make the directory"
                " writable, and remove whatever else has that name"
            )
        pid = procfs.listener_pid(self._address.port)
        who = f"; pid {pid} ({procfs.name(pid)}) listens on that port" if pid else ""
        return (
            f"cannot listen on {self.name}: {error.strerror}{who}; {retries} stop that process, or"
            " choose another --service-address"
        )


POLL_MS = 100.0  # between two looks at witnesses; holders usually end in milliseconds, or never


def predecessor(directory: str, engine: str) -> str | None:
    """Why `engine` cannot be launched yet: an earlier tree is alive, or cannot be looked for. The
    witnesses that no process holds are removed.

    On one host the lock server withholds the next grant until the last holder's witness is free.
    Over TCP it cannot see witnesses: a restarted supervisor looks itself, before its first launch,
    whether a process of the old tree is still alive and may use the device.
    """
    pattern = re.compile(rf"{witness.PREFIX}{re.escape(engine)}_[0-9a-f]{{16}}")
    try:
        for name in filter(pattern.fullmatch, sorted(os.listdir(directory))):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(path, follow_symlinks=False)
                if not witness.discard(path, found.st_dev, found.st_ino):
                    return _held(name, procfs.holders_of(found.st_dev, found.st_ino), engine)
    except OSError as error:
        what = f"look for processes of an earlier launch in {directory}"
        return f"not launched: {shortage(what, error)}"
    return None


def _held(name: str, pids: Sequence[int], engine: str) -> str:
    who = f"a process not visible here, with {name} open, is"
    if pids:
        who = f"pid {', '.join(map(str, pids))} is"
    return (
        f"not launched: {who} left from an earlier launch of {engine} and may use the device; kill"
        " it if it does not exit"
    )
