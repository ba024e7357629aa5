"""What one server says of itself: the status document, and what was found at the start.

Reads everything, changes nothing.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from lockserver.core.machine import LockMachine
from lockserver.server.directory import LockDirectory
from lockserver.server.event_outbox import EventOutbox
from lockserver.server.remote import Remote
from lockserver.server.service_desk import ServiceDesk
from lockserver.state_file import LockStateFile
from lockserver.status import document
from lockserver.status import document as status
from plumbing.service.clock import Clock, rfc3339
from plumbing.service.events import Event, EventLog

LAST_GRANTS = 20


@dataclass(frozen=True)
class Report:
    """Where the facts are."""

    directory: str
    started: datetime
    clock: Clock
    machine: LockMachine
    remote: Remote
    desk: ServiceDesk
    place: LockDirectory
    teller: EventOutbox
    events: EventLog
    last_grants: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=LAST_GRANTS))

    def document(self) -> dict[str, Any]:
        """The status document, the same for the CLI, `/status` and observers."""
        self.teller.catch_up()
        machine, members = self.machine, self.remote.members
        here = status.Here(
            machine, members, self.desk.sockets, self.place, self.clock, self.directory
        )
        return {
            "schema": status.SCHEMA,
            **self.events.newest(),
            "server": {
                "pid": os.getpid(),
                "since": rfc3339(self.started),
                "dir": self.directory,
                "online": True,
            },
            "token": machine.ledger.token,
            "problem": machine.ledger.problem or self.place.problem or self.remote.problem,
            "locks": status.lock_documents(here),
            "tcp": self.remote.document(),
            "members": document.member_documents(members, self.clock.now_ms()),
            "supervisors": status.supervisor_documents(machine, self.clock),
            "supervisors_total": len(machine.supervisors),
            "service": self.desk.documents(),
            "last_grants": list(self.last_grants),
        }

    def start(self, state: LockStateFile) -> None:
        """What was found on disk, and which addresses are away."""
        self.events.subscribe(self._keep_grant)
        loaded = state.loaded
        if loaded.problem is not None:
            kept = f"; kept aside as {loaded.aside}" if loaded.aside else ""
            message = f"{state.path}: {loaded.problem}{kept}"
            self.events.record("lock.state_lost", message, "error", {"aside": loaded.aside})
        for service in self.desk.sockets.values():
            if service.problem is not None:
                message = f"waiting for {service.address} to be handed back: {service.problem}"
                self.events.record("lock.service_away", message, "warning", {"lock": service.lock})

    def _keep_grant(self, event: Event) -> None:
        if event.type == "lock.granted":
            self.last_grants.append({**event.data, "ts": rfc3339(event.ts)})
