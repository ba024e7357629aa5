"""The status document of a running server. Reads everything, and changes nothing.

Its fields are the structs of `lockserver/schema.py`: a new field is declared there and gets its
value here, or in `status/online.py` if it is a lock's or a supervisor's; and in
`status/offline.py`, if it is known without a server.
"""

from __future__ import annotations

import os
from collections import deque
from itertools import islice
from typing import Any

from msgspec import convert, to_builtins

from lockserver import schema
from lockserver.server.parts import Parts
from lockserver.status.online import SCHEMA, lock_status, supervisor_status
from lockserver.status.reasons import Here
from plumbing.service.clock import rfc3339
from plumbing.service.events import Event
from plumbing.service.notify import restarts

SUPERVISORS_NAMED_MAX = 100
LAST_GRANTS = 20
DIRECT, GATEWAY = "direct", "gateway"  # who accepts connections: engines (over TCP), a gateway


class LockReport:
    """Reports on `parts`; keeps the last grants."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._last_grants: deque[schema.LockLastGrant] = deque(maxlen=LAST_GRANTS)
        parts.events.subscribe(self._keep_grant)

    def document(self, http_problem: str | None = None) -> dict[str, Any]:
        """The status document, the same for the CLI, `/status` and observers."""
        with self._parts.reserve:  # it looks at witnesses and at /proc
            self._parts.outbox.flush()
            document: dict[str, Any] = to_builtins(self._status(http_problem))
            return document

    def _status(self, http_problem: str | None) -> schema.LockserverStatus:
        parts = self._parts
        machine, directory, clock = parts.machine, parts.directory, parts.clock
        here = Here(
            machine,
            clock,
            parts.settings.directory,
            away=parts.gateways.away(),
            unreachable=directory.unreachable,
            undone=parts.shortage.undone(),
            no_gateway=parts.gateways.missing,
        )
        sources = (machine.ledger, directory, parts.remote, parts.shortage, parts.gateways)
        problems = (*(each.problem for each in sources), http_problem)
        return schema.LockserverStatus(
            schema=SCHEMA,
            **parts.events.newest(),
            server=schema.LockServerFields(
                pid=os.getpid(),
                since=rfc3339(parts.started),
                dir=parts.settings.directory,
                online=True,
                restarts=restarts(),
            ),
            models=list(parts.settings.models),
            mode=GATEWAY if parts.settings.listen is None else DIRECT,
            era=machine.ledger.era,
            token=machine.ledger.token,
            problem=next(filter(None, problems), None),
            locks={name: lock_status(lock, here) for name, lock in machine.locks.items()},
            tcp=convert(parts.remote.document(), schema.LockTcp | None),
            supervisors=[
                supervisor_status(each, parts.conn_of(each), here)
                for each in islice(machine.supervisors.values(), SUPERVISORS_NAMED_MAX)
            ],
            supervisors_total=len(machine.supervisors),
            service=convert(parts.gateways.services(), dict[str, schema.LockService]),
            gateways=convert(parts.gateways.documents(), list[schema.LockGateway]),
            last_grants=list(self._last_grants),
        )

    def record_start(self) -> None:
        """Record what was wrong on disk, and which service addresses are in use."""
        events, state = self._parts.events, self._parts.state
        if state.loaded.problem is not None:
            kept = f"; moved to {state.loaded.aside}" if state.loaded.aside else ""
            message = f"{state.path}: {state.loaded.problem}{kept}"
            events.record("lock.state_lost", message, "error", {"aside": state.loaded.aside})
        for lock, (address, problem) in self._parts.gateways.away().items():
            message = f"waiting for a gateway to hand {address} back: {problem}"
            events.record("lock.service_away", message, "warning", {"lock": lock})

    def _keep_grant(self, event: Event) -> None:
        if event.type == "lock.granted":
            self._last_grants.append(schema.LockLastGrant(**event.data, ts=rfc3339(event.ts)))
