"""The supervisor's side of the lock: what is wanted, what was granted, the listening socket.

Owns the content of `want`, and which socket the backend accepts from: the lent one, behind a
gateway a private one, and over TCP, where the lock server can lend nothing, one of our own. The
lent socket is that of `active`, whatever the model. Must not know what a grant leads to. The
surprising thing: nothing is sent between a failure and the reaping, so a call of `tell` in that
time is a bug; a reconnect repeats the last want, which still protects the dying tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.events import EngineEvent, Failed, Granted, HandOver, OtherGranted
from engine.supervisor.incarnation import Incarnation
from engine.supervisor.over_tcp import OwnListener
from engine.supervisor.private_socket import PrivateSocket
from engine.supervisor.settings import EngineSettings
from engine.supervisor.succession import SuccessionSide
from lockserver.client import LockCallbacks, LockClient
from lockserver.client import messages as lock_messages
from plumbing.errors import UnderstudyError
from plumbing.pod.models import ACTIVE
from plumbing.service.events import EventLog
from plumbing.text import duration
from plumbing.wire.fds import OwnedFd
from plumbing.wire.sockets import no_descriptors

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
        on_listener: Callable[[], None],
        after: Callable[[str, float, Callable[[], None]], None],
    ) -> None:
        self.other: Other | None = None
        self.has_standby = False  # as far as is known: another engine could be granted `active`
        self._continues = False  # … and the next one can continue this one's streams
        self.private = PrivateSocket(settings.private_path)
        self.succession = SuccessionSide(post, after, self.repeat)
        self.own = OwnListener(settings.service_address) if settings.is_remote else None
        self.address = self.own.name if self.own is not None else None
        self._refusal: str | None = None
        self._engine = settings.engine
        self._active, self._loader = settings.active_lock, settings.loader_lock
        self._events = events
        self._post = post
        self._on_loader = on_loader
        self._on_listener = on_listener
        self._shortage: str | None = None
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
                on_member_lost=lambda reason: self._end("member_lost", reason),
            ),
            engine=settings.engine,
            security=settings.lockserver_security,
            member=(settings.member, settings.members),
        )

    @property
    def problem(self) -> str | None:
        """What keeps this engine from getting the lock, or from serving under it."""
        own = self.own.problem if self.own is not None else None
        socket = self._shortage or self.private.problem or own
        return self._refusal or self.client.unreachable or socket

    @property
    def is_behind_gateway(self) -> bool:
        """Whether a gateway accepts from the lent socket, as far as the lock server has said."""
        return self.own is None and not self.client.is_to_accept(ACTIVE)

    @property
    def is_continued(self) -> bool:
        """Whether a drain may leave streams to the next engine."""
        return self._continues and self.is_behind_gateway

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
        if incarnation is None and self.own is not None:
            self.own.close()
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

    # ------------------------------------------------------------------ the socket

    def borrow_listener(self) -> OwnedFd | None:
        """A copy of the listening socket, which the caller owns; None if none is lent yet, or ours
        cannot be bound yet, or there is no descriptor for it: ask again."""
        if self.own is not None:
            return self.own.copy()
        if self.is_behind_gateway:
            return self.private.listen()
        try:
            listener = self.client.service(ACTIVE)
        except OSError as error:
            self._shortage = no_descriptors("copy the listening socket", error).message
            return None
        self._shortage = None
        return listener

    def stop_listening(self) -> None:
        """The backend stops accepting, or is dead. On a socket of our own no other engine will
        accept: new clients are better refused at once. A lent one is for the next engine. Harmless
        to repeat."""
        self.private.remove()
        if self.own is not None:
            self.own.close()

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
            self._on_listener()

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
