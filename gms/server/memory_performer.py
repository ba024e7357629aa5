"""What the performers of both machines of a device have in common: answers to sessions, and the
descriptors that survivors hand back.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from gms.core import effects as fx
from gms.server.driver_thread import DriverThread
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message


class MemoryPerformer(abc.ABC):
    """Performs effects. Closing a descriptor may free memory, which is for the closer's thread."""

    def __init__(
        self,
        device_name: str,
        connections: Mapping[int, Connection],
        log: EventLog,
        closer: DriverThread,
    ) -> None:
        self.protocol_errors_total = 0
        self._name, self._connections, self._log = device_name, connections, log
        self._closer = closer
        self._offered: dict[int, list[OwnedFd]] = {}  # by session, until they are adopted

    def perform(self, effects: fx.Effects) -> None:
        """Carry out every effect: one that fails costs the session that it answers, and never the
        effects behind it."""
        for effect in effects:
            try:
                self._perform(effect)
            except (UnderstudyError, OSError) as error:
                self._failed(effect, error)

    @abc.abstractmethod
    def _perform(self, effect: fx.DeviceEffect) -> None: ...

    def _failed(self, effect: fx.DeviceEffect, error: UnderstudyError | OSError) -> None:
        what = type(effect).__name__
        self._log.record("gms.effect", f"{what} failed: {error}", severity="error")
        if isinstance(effect, fx.Respond) and effect.session in self._connections:
            self._connections[effect.session].close(f"it cannot be answered: {error}")

    def take_offered(self, session: int, fds: Sequence[OwnedFd]) -> int:
        """Keep descriptors that a survivor hands back (taken); returns how many there are now."""
        kept = self._offered.setdefault(session, [])
        kept += [OwnedFd(fd.detach()) for fd in fds]
        return len(kept)

    def forget(self, session: int) -> None:
        """Close what the session has offered: it has ended, or its offer is not needed."""
        fds = self._offered.pop(session, [])
        if fds:
            self._closer.submit(lambda: close_all(fds))

    def close(self) -> None:
        """Close the descriptors that were not passed on yet."""
        for fds in self._offered.values():
            close_all(fds)

    def _respond(self, to: fx.Respond, message: Message, fds: Sequence[OwnedFd] = ()) -> None:
        """Send `message` with `fds` (taken), if that session is still there."""
        conn = self._connections.get(to.session)
        if conn is None:
            self._closer.submit(lambda: close_all(fds))
        else:
            conn.send(message, to.request_id, fds)

    def _refuse(self, effect: fx.RefuseRequest) -> None:
        # A client's fault that was found late, on the driver's thread: a manifest, an offer.
        self.protocol_errors_total += isinstance(effect.error, ProtocolError)
        conn = self._connections.get(effect.session)
        if conn is not None:
            conn.fault(effect.error, effect.request_id)

    def _record(self, effect: fx.RecordEvent) -> None:
        data = {"device_uuid": self._name, **effect.data}
        self._log.record(effect.type, effect.message, effect.severity, data)
