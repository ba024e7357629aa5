"""What this server cannot do for lack of descriptors or memory: looked for with every tick.

Each desk repeats what it could not do. Here the reserves are filled again, and what is still not
done is counted, recorded and shown, so that no shortage goes unnoticed while it lasts.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockserver.core.machine import LockMachine
from lockserver.server.gateway_desk import GatewayDesk
from lockserver.server.service_desk import ServiceDesk
from lockserver.server.witness_desk import WitnessDesk
from lockserver.status.waits import Undone, Who
from plumbing.service.events import EventLog
from plumbing.wire.fds import Reserve
from plumbing.wire.sockets import no_descriptors

NO_MEMORY = "the kernel has no memory for it"
OVER_MS = 1000.0  # without another one: at the limit, a shortage comes and goes with each client


class Shortage:
    """`problem`: why something cannot be done now, or None."""

    def __init__(
        self,
        machine: LockMachine,
        services: ServiceDesk,
        gateways: GatewayDesk,
        witnesses: WitnessDesk,
        reserves: Sequence[Reserve],
        events: EventLog,
    ) -> None:
        self.problem: str | None = None
        self.since_ms = self._last_ms = 0.0
        self._machine, self._services, self._witnesses = machine, services, witnesses
        self._gateways = gateways
        self._reserves, self._events = reserves, events

    def tick(self, now_ms: float) -> None:
        for reserve in self._reserves:
            reserve.refill()
        why = self._why()
        if why is not None:
            self._last_ms = now_ms
            if self.problem is None:
                self.since_ms = now_ms
                self._events.record("lock.shortage", why, "warning")
            self.problem = why
        elif self.problem is not None and now_ms - self._last_ms >= OVER_MS:
            self.problem = None
            self._events.record("lock.shortage_over", "descriptors are available again")

    def _why(self) -> str | None:
        errors = [each.error for each in self._reserves if each.error is not None]
        if errors:
            return no_descriptors("keep descriptors in reserve", errors[0]).message
        is_behind = self._witnesses.is_behind or any(
            map(self._services.unlent, self._services.sockets)
        )
        return NO_MEMORY if is_behind else None

    def undone(self) -> Undone | None:
        """What is not done yet, for the status; None if nothing."""
        unlent = {}
        for lock in self._services.sockets:
            who = self._unlent(self._services.unlent(lock))
            if who:
                unlent[lock] = who
        unseen = [(want.msg.engine, want.msg.incarnation) for want in self._witnesses.unseen]
        if not unlent and not unseen:
            return None
        return Undone(self.problem or NO_MEMORY, self.since_ms, unlent, unseen)

    def _unlent(self, conns: Sequence[int]) -> list[Who]:
        """Who cannot serve without a copy. Beside a gateway, engines can."""
        if self._services.has_gateway:
            gateways = self._gateways.gateways.values()
            return [(f"gateway {each.id}", None) for each in gateways if each.conn.id in conns]
        supervisors = self._machine.supervisors.values()
        return [(each.engine, each.incarnation) for each in supervisors if each.conn in conns]
