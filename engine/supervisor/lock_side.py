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
With a TCP lock server there is no gateway: the supervisor binds the engine's own address when the
engine wakes and closes it once it is reaped, so clients of an inactive engine are refused, not kept
waiting. Over TCP the supervisor also looks for what an earlier supervisor of it left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.events import (
    EngineEvent,
    Failed,
    Granted,
    HandOver,
    Leave,
    Linger,
    OtherGranted,
    Succession,
)
from engine.supervisor.incarnation import Incarnation
from engine.supervisor.settings import EngineSettings
from lockserver.client import LockCallbacks, LockClient, witness
from lockserver.client import messages as lock_messages
from plumbing.errors import UnderstudyError, is_shortage
from plumbing.pod.models import ACTIVE
from plumbing.service import procfs
from plumbing.service.events import EventLog
from plumbing.text import duration
from plumbing.wire.fds import OwnedFd
from plumbing.wire.sockets import no_descriptors
from plumbing.wire.tcp_address import TcpAddress

# Refusals of a want that end this incarnation.
FATAL_REFUSALS = {
    "lock.stale_claim": "lock_lost",
    "lock.incarnation_ended": "lock_lost",
    "lock.witness_unproven": "witness_unproven",
    "lock.bad_want": "hand_over_refused",  # nothing else that this side sends can be refused so
}


# How soon to try again to get the listening socket: the last engine may hold the service address
# for a moment, or there is no descriptor left.
LISTENER_RETRY_MS = 50.0

_Want = tuple[str | None, tuple[str, ...], dict[str, int], str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Other:
    """The last known grant of `active` to another engine."""

    engine: str
    token: int


class LockSide:
    """Reports through `post` (events of the lifecycle) and two plain callbacks."""

    def __init__(
        self,
        settings: EngineSettings,
        events: EventLog,
        *,
        post: Callable[[EngineEvent], None],
        on_loader: Callable[[str, int], None],
        after: Callable[[str, float, Callable[[], None]], None],
    ) -> None:
        self.other: Other | None = None
        self.has_standby = False  # as far as is known: another engine could be granted `active`
        self._continues = False  # … and the next one can continue this one's streams
        self.succession = SuccessionSide(post, after, self.repeat)
        self.listener: PrivateSocket | OwnListener = PrivateSocket(settings.private_path)
        self.address: str | None = None  # where clients connect
        if settings.is_remote:
            assert settings.service_address is not None  # or `settle` had refused
            self.listener = OwnListener(settings.service_address)
            self.address = self.listener.name
        self._refusal: str | None = None
        self._engine = settings.engine
        self._active, self._loader = settings.active_lock, settings.loader_lock
        self._events = events
        self._post = post
        self._on_loader = on_loader
        self._sent: tuple[_Want, bool, int] | None = None
        self._incarnation: Incarnation | None = None
        self._wants_active = False
        self._token = 0
        self._over = 0  # the last token that this incarnation has handed over in place
        self.client = LockClient(
            settings.lockserver_socket,
            LockCallbacks(
                on_granted=self._granted,
                on_leaving=self._leaving,
                on_standby=self._standby,
                on_service=self._lent,
                on_connected=self._connected,
                on_lost=self._lost,
                on_refused=self._refused,
                on_hand_over=self._hand_over,
                on_lease_lost=lambda reason: self._end("lease_lost", reason),
            ),
            engine=settings.engine,
            security=settings.lockserver_security,
        )

    @property
    def problem(self) -> str | None:
        """What keeps this engine from getting the lock, or from serving under it."""
        return self._refusal or self.client.unreachable or self.listener.problem

    @property
    def is_continued(self) -> bool:
        """Whether a drain may leave streams to the next engine."""
        return self._continues

    def era_of(self, token: int) -> str:
        """The era of a token under which `active` was granted."""
        return self.client.era_of(self._active, token)

    # ------------------------------------------------------------------ what is wanted

    def tell(self, incarnation: Incarnation | None, *, wants_active: bool) -> None:
        """`incarnation` is what runs now, None once it is reaped."""
        if incarnation is not self._incarnation:
            self._over = 0
        self._incarnation, self._wants_active, self._token = incarnation, wants_active, 0
        self.has_standby = self._continues = False
        if incarnation is None:
            self.listener.remove()
        self.repeat()

    def hold(self, token: int) -> None:
        """This incarnation holds `active` under `token`, and claims it if the server forgets."""
        self._token = token
        self.repeat()

    def hand_back(self, token: int) -> None:
        """This incarnation will never serve under `token` again, and waits for the lock anew. It
        is said for the rest of its life."""
        self._over = token
        self.tell(self._incarnation, wants_active=True)

    def repeat(self) -> None:
        """Send the want if it differs from the last one."""
        named = self._incarnation
        if named is None:
            want: _Want = (None, (), {}, "", {})
        else:
            wanted = {self._active: self._wants_active, self._loader: named.loading.wants_loader}
            tokens = {self._active: self._token, self._loader: named.loading.token}
            if self.succession.is_leaving:  # it keeps what it has, and waits for nothing
                wanted = {lock: wanted[lock] and tokens[lock] > 0 for lock in wanted}
            want = (
                named.id,
                tuple(lock for lock, is_wanted in wanted.items() if is_wanted),
                {lock: token for lock, token in tokens.items() if token},
                named.prepared.continuation if named.prepared is not None else "",
                {self._active: self._over} if self._over else {},
            )
        leaving, succeeds = self.succession.is_leaving, self.succession.succeeds
        if (want, leaving, succeeds) != self._sent:
            self._sent = want, leaving, succeeds
            incarnation, locks, held, continuation, over = want
            witness = named.witness_path if named else None
            self.client.set_want(
                *(incarnation, witness, locks, held, continuation, over), leaving, succeeds
            )

    # ------------------------------------------------------------------ what the server reports

    def _granted(self, lock: str, incarnation: str, token: int) -> None:
        engine = incarnation.rpartition("-")[0]
        if lock == self._loader:
            self._on_loader(incarnation, token)
        elif lock == self._active and engine == self._engine:
            self._post(Granted(incarnation, token))
        elif lock == self._active:
            self.other = Other(engine, token)
            self._post(OtherGranted(engine, token))

    def _leaving(self, lock: str, token: int) -> None:
        if lock == self._active:
            self.succession.may_succeed(token)

    def _standby(self, news: lock_messages.StandbyMsg) -> None:
        if news.lock == self._active:
            self.has_standby, self._continues = news.is_ready, news.continues
            if news.is_settled:
                self.succession.settled(resume=self.is_continued)

    def _hand_over(self, lock: str, incarnation: str, to: str, resume: bool) -> None:
        if lock == self._active:
            self._post(HandOver(incarnation, to, resume))

    def _lent(self, lock: str, address: str) -> None:
        if lock == ACTIVE:
            self.address = address

    def _connected(self) -> None:
        self._refusal = None
        self._events.record("engine.lock", "connected to the lock server", data={"connected": True})

    def _lost(self, reason: str) -> None:
        # No engine is granted a lock by a server that is away.
        self.has_standby = self._continues = False
        self.succession.settled(resume=False)
        lease = self.client.lease
        how_long = "continuing"
        if lease is not None and lease["is_held"]:
            how_long = f"continuing for {duration(lease['valid_for_ms'])} under the lease"
        self._events.record(
            "engine.lock",
            f"lost the lock server ({reason}); {how_long} and reconnecting",
            "warning",
            {"connected": False},
        )

    def _refused(self, error: UnderstudyError) -> None:
        self._refusal = error.message
        data = {"error_code": error.code}
        self._events.record("engine.lock", f"refused: {error.message}", "error", data)
        cause = FATAL_REFUSALS.get(error.code)
        if cause is not None and self._wants_active:
            self._end(cause, error.message)

    def _end(self, cause: str, reason: str) -> None:
        if self._incarnation is not None:
            self._post(Failed(cause, reason))


# A host tells all processes of a pod to end within milliseconds of each other; on a busy machine a
# process needs more to notice. The streams run on meanwhile.
SETTLE_MS = 200.0
# For the answer: `SETTLE_MS` and the time of a busy machine. Without one streams are finished.
ANSWER_MS = 1_000.0
# A gateway asks an engine within some 100 ms of its grant for the streams that wait for it.
LINGER_MS = 1_000.0


class SuccessionSide:
    """One supervisor's part in it; it posts `Succession`."""

    def __init__(
        self,
        post: Callable[[EngineEvent], None],
        after: Callable[[str, float, Callable[[], None]], None],
        on_change: Callable[[], None],
    ) -> None:
        """`after(name, ms, callback)` starts a timer; `on_change`: the want has changed."""
        self.is_leaving = False
        self.succeeds = 0  # the token of the holder that it vouches for
        self._post, self._after, self._on_change = post, after, on_change

    def perform(self, effect: Leave | Linger) -> None:
        """Say that this engine leaves, or wait for streams that wait for it."""
        if isinstance(effect, Linger):
            self._after("succession", LINGER_MS, lambda: self.settled(resume=False))
            return
        self.is_leaving, self.succeeds = True, 0
        if effect.asks:
            self._after("succession", ANSWER_MS, lambda: self.settled(resume=False))
        self._on_change()

    def settled(self, *, resume: bool) -> None:
        """There is an answer: whether a successor stays. Ignored where none is waited for."""
        self._post(Succession(resume))

    def may_succeed(self, token: int) -> None:
        """The holder under `token` was told to end: was this engine, too?"""
        if not self.is_leaving and token != self.succeeds:
            self._after("vouch", SETTLE_MS, lambda: self._vouch(token))

    def _vouch(self, token: int) -> None:
        if not self.is_leaving:
            self.succeeds = token
            self._on_change()


class PrivateSocket:
    """Where the backend answers the gateway. `problem` is why it could not be bound at the last
    attempt."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem: str | None = None
        self._is_ours = False

    def listen(self) -> OwnedFd | None:
        """A fresh listening socket at `path`, in place of any other; None if there cannot be one
        for now: ask again."""
        self.remove_leftover()
        try:
            listening = _listen(self.path)
        except OSError as error:
            self.problem = self._why(error)
            return None
        self._is_ours = True
        return listening

    def remove(self) -> None:
        """Let nobody connect any more. Harmless to repeat. What we have not bound stays: a second
        supervisor of this engine, which is refused, must not take the first one's away."""
        if self._is_ours:
            self.remove_leftover()

    def remove_leftover(self) -> None:
        """Unlink what is at `path`, whoever bound it: only for the engine's one supervisor."""
        self.problem, self._is_ours = None, False
        with contextlib.suppress(OSError):  # then `listen` fails, with the reason
            os.unlink(self.path)

    def _why(self, error: OSError) -> str:
        if is_shortage(error):
            return no_descriptors("open the private socket", error).message
        return (
            f"cannot listen on {self.path}: {error.strerror}; retrying until the waking budget is"
            " spent; make the directory writable, and remove whatever else has that name"
        )


def _listen(path: str) -> OwnedFd:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        umask = os.umask(0o177)  # 0600 from the moment it exists
        try:
            sock.bind(path)
        finally:
            os.umask(umask)
        sock.listen(BACKLOG)
        return OwnedFd(sock.detach())


BACKLOG = 4096  # as the lock server's: net.core.somaxconn's default
POLL_MS = 100.0  # between two looks at witnesses; holders usually end in milliseconds, or never


class OwnListener:
    """Where the backend answers clients, with a lock over TCP; as `PrivateSocket`."""

    path = None

    def __init__(self, address: TcpAddress) -> None:
        """`address` has a numeric host."""
        self.problem: str | None = None
        self._address = address
        self._sock: socket.socket | None = None

    @property
    def name(self) -> str:
        """HOST:PORT, for display."""
        return str(self._address).partition("://")[2]

    def listen(self) -> OwnedFd | None:
        """A copy of the listening socket, which is bound now if it is not yet; None if it cannot
        be for now: ask again."""
        try:
            if self._sock is None:
                self._sock = self._bind()
            copy = OwnedFd(os.dup(self._sock.fileno()))
        except OSError as error:
            if self.problem is None:  # finding who holds the port takes a while
                self.problem = self._why(error)
            return None
        self.problem = None
        return copy

    def remove_leftover(self) -> None:
        """A port leaves nothing behind."""

    def remove(self) -> None:
        """Refuse new clients at once: no other engine accepts here. Harmless to repeat."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.problem = None

    def _bind(self) -> socket.socket:
        name = (self._address.host, self._address.port)  # a numeric host: nothing is resolved
        family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Connections of the last engine may still be in TIME_WAIT; a second listener is refused
            # all the same.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(name)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def _why(self, error: OSError) -> str:
        if is_shortage(error):
            return no_descriptors("open the listening socket", error).message
        pid = procfs.listener_pid(self._address.port)
        who = f"; pid {pid} ({procfs.name(pid)}) listens on that port" if pid else ""
        return (
            f"cannot listen on {self.name}: {error.strerror}{who}; retrying until the waking budget"
            " is spent; stop that process, or choose another --service-address"
        )


def predecessor(directory: str, engine: str) -> str | None:
    """Why `engine` cannot be launched yet: an earlier tree is alive, or cannot be looked for."""
    try:
        return clear_witnesses(directory, engine)
    except OSError as error:
        what = f"look for processes of an earlier launch in {directory}"
        return f"not launched: {no_descriptors(what, error).message}"


def clear_witnesses(directory: str, engine: str) -> str | None:
    """Remove the witnesses of `engine` that no process holds; None, or who holds one.

    On one host the lock server withholds the next grant until the last holder's witness is free.
    Over TCP it cannot see witnesses: a restarted supervisor looks itself, before its first launch,
    whether a process of the old tree is still alive and may use the device.
    """
    pattern = re.compile(rf"{witness.PREFIX}{re.escape(engine)}_[0-9a-f]{{16}}")
    for name in sorted(os.listdir(directory)):
        if not pattern.fullmatch(name):
            continue
        path = os.path.join(directory, name)
        try:
            found = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not witness.discard(path, found.st_dev, found.st_ino):
            pids = ", ".join(str(pid) for pid in procfs.holders_of(found.st_dev, found.st_ino))
            who = f"pid {pids} is" if pids else f"a process not visible here, with {name} open, is"
            return (
                f"not launched: {who} left from an earlier launch of {engine} and may use the"
                " device; kill it if it does not exit"
            )
    return None
