"""The supervisor's side of the lock: what is wanted, what was granted, the listening socket.

Owns composing the one truth that `want` says, and the listening socket: one copy of what the lock
server lends, or over TCP, where nothing can be lent, a socket of our own. Must not know what a
grant leads to. The surprising thing: between a failure and the reaping nothing is said, so whoever
calls `tell` in that time has a bug; a reconnect repeats the old truth, which still protects the
dying tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.events import Event, Failed, Granted, HandOver, OtherGranted
from engine.supervisor.launch import Launch
from engine.supervisor.own_listener import OwnListener
from engine.supervisor.settings import Settings
from lockserver.client import LockCallbacks, LockClient
from plumbing.errors import UnderstudyError
from plumbing.service.events import EventLog
from plumbing.wire.fds import OwnedFd

ACTIVE = "active"
LOADER = "loader"

# Refusals of a want after which this incarnation has no business left.
FATAL_REFUSALS = {
    "lock.stale_claim": "lock_lost",
    "lock.incarnation_ended": "lock_lost",
    "lock.witness_unproven": "witness_unproven",
}


@dataclass(frozen=True, slots=True)
class Other:
    """Another engine's grant of `active`, the last one heard of."""

    engine: str
    token: int


class LockSide:
    """Speaks through `post` (events of the lifecycle) and three plain callbacks."""

    def __init__(
        self,
        settings: Settings,
        events: EventLog,
        *,
        post: Callable[[Event], None],
        on_loader: Callable[[str, int], None],
        on_listener: Callable[[], None],
    ) -> None:
        self.other: Other | None = None
        self.own = OwnListener(settings.service_address) if settings.is_remote else None
        self.address = self.own.name if self.own is not None else None
        self._refusal: str | None = None
        self._engine = settings.engine
        self._events = events
        self._post = post
        self._on_loader = on_loader
        self._on_listener = on_listener
        self._listener: OwnedFd | None = None
        self._said: object = None
        self._launch: Launch | None = None
        self._wants_active = False
        self._token = 0
        self.client = LockClient(
            settings.lockserver_socket,
            LockCallbacks(
                on_granted=self._granted,
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
        """What keeps this engine from the lock, or from serving under it."""
        return self._refusal or self.client.unreachable or (self.own.problem if self.own else None)

    # ------------------------------------------------------------------ saying

    def tell(self, launch: Launch | None, *, wants_active: bool) -> None:
        """`launch` is what runs now, None once it is reaped."""
        self._launch, self._wants_active, self._token = launch, wants_active, 0
        if launch is None and self.own is not None:
            self.own.close()
        self.repeat()

    def hold(self, token: int) -> None:
        """This incarnation holds `active` under `token`: claim it if the server should forget."""
        self._token = token
        self.repeat()

    def repeat(self) -> None:
        """Say the truth if it is another than was said last."""
        launch = self._launch
        tokens: dict[str, int] = {}
        if launch is None:
            locks: tuple[str, ...] = ()
        else:
            locks = ((ACTIVE,) if self._wants_active else ()) + (
                (LOADER,) if launch.loading.wants_loader else ()
            )
            if self._token:
                tokens[ACTIVE] = self._token
            if launch.loading.token:
                tokens[LOADER] = launch.loading.token
        incarnation = launch.incarnation if launch is not None else None
        witness = launch.witness_path if launch is not None else None
        truth = (incarnation, locks, tokens)
        if truth != self._said:
            self._said = truth
            self.client.set_want(incarnation, witness, locks, tokens)

    # ------------------------------------------------------------------ the socket

    def borrow_listener(self) -> OwnedFd | None:
        """A copy of the listening socket, the caller's own; None if none is lent yet, or ours
        cannot be bound yet."""
        if self.own is not None:
            return self.own.copy()
        return self._listener.duplicate() if self._listener is not None else None

    def stop_listening(self) -> None:
        """The backend accepts no more. Of a socket of our own nobody else ever will: who comes now
        is better refused at once. A lent one is for the next engine."""
        if self.own is not None:
            self.own.close()

    def close(self) -> None:
        if self.own is not None:
            self.own.close()
        self._return_listener()

    def _return_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # ------------------------------------------------------------------ hearing

    def _granted(self, lock: str, incarnation: str, token: int) -> None:
        engine = incarnation.rpartition("-")[0]
        if lock == LOADER:
            self._on_loader(incarnation, token)
        elif lock == ACTIVE and engine == self._engine:
            self._post(Granted(incarnation, token))
        elif lock == ACTIVE:
            self.other = Other(engine, token)
            self._post(OtherGranted(engine, token))

    def _hand_over(self, lock: str, incarnation: str, to: str) -> None:
        if lock == ACTIVE:
            self._post(HandOver(incarnation, to))

    def _lent(self, lock: str, address: str, listener: OwnedFd) -> None:
        if lock != ACTIVE:
            listener.close()
            return
        self._return_listener()
        self._listener, self.address = listener, address
        self._on_listener()

    def _connected(self) -> None:
        self._refusal = None
        self._events.record("engine.lock", "connected to the lock server", data={"connected": True})

    def _lost(self, reason: str) -> None:
        lease = self.client.lease
        how_long = "going on"
        if lease is not None and lease["is_held"]:
            how_long = f"going on for {lease['valid_for_ms']:.0f} ms, as the lease allows,"
        self._events.record(
            "engine.lock",
            f"the lock server is gone ({reason}); {how_long} and reconnecting",
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
        """This incarnation has no business left, if there is one."""
        if self._launch is not None:
            self._post(Failed(cause, reason))
