"""The report of one server: its status document, and the problems found at its start.

Reads everything, changes nothing.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from lockserver.server.parts import Parts
from lockserver.status import document
from plumbing.service.clock import rfc3339
from plumbing.service.events import Event
from plumbing.service.notify import restarts

LAST_GRANTS = 20
DIRECT, GATEWAY = "direct", "gateway"  # who accepts connections: the engines, or a gateway


class LockReport:
    """Reports on `parts`; keeps the last grants."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._last_grants: deque[dict[str, Any]] = deque(maxlen=LAST_GRANTS)
        parts.events.subscribe(self._keep_grant)

    def document(self, http_problem: str | None = None) -> dict[str, Any]:
        """The status document, the same for the CLI, `/status` and observers."""
        with self._parts.reserve:  # it looks at witnesses and at /proc
            return self._document(http_problem)

    def _document(self, http_problem: str | None) -> dict[str, Any]:
        parts = self._parts
        parts.outbox.flush()
        machine, members = parts.machine, parts.remote.members
        directory, clock = parts.directory, parts.clock
        here = document.Here(
            machine,
            members,
            clock,
            parts.settings.directory,
            away=parts.services.away(),
            unreachable=directory.unreachable,
            undone=parts.shortage.undone(),
            no_gateway=parts.gateways.missing,
            silent_gateways=parts.gateways.silent(),
        )
        sources = (machine.ledger, directory, parts.remote, parts.shortage, parts.gateways)
        problems = (*(each.problem for each in sources), http_problem)
        return {
            "schema": document.SCHEMA,
            **parts.events.newest(),
            "server": {
                "pid": os.getpid(),
                "since": rfc3339(parts.started),
                "dir": parts.settings.directory,
                "online": True,
                "restarts": restarts(),
            },
            "models": list(parts.settings.models),
            "mode": GATEWAY if parts.settings.has_gateway else DIRECT,
            "era": machine.ledger.era,
            "token": machine.ledger.token,
            "problem": next(filter(None, problems), None),
            "locks": document.lock_documents(here),
            "tcp": parts.remote.document(),
            "members": document.member_documents(members, clock.now_ms()),
            "supervisors": document.supervisor_documents(machine, clock),
            "supervisors_total": len(machine.supervisors),
            "service": parts.services.documents(),
            "gateways": parts.gateways.documents(),
            "last_grants": list(self._last_grants),
        }

    def record_start(self) -> None:
        """Record what was wrong on disk, and which service addresses are in use."""
        events, state = self._parts.events, self._parts.state
        if state.loaded.problem is not None:
            kept = f"; moved to {state.loaded.aside}" if state.loaded.aside else ""
            message = f"{state.path}: {state.loaded.problem}{kept}"
            events.record("lock.state_lost", message, "error", {"aside": state.loaded.aside})
        for lock, (address, problem) in self._parts.services.away().items():
            message = f"waiting for an engine to hand {address} back: {problem}"
            events.record("lock.service_away", message, "warning", {"lock": lock})

    def _keep_grant(self, event: Event) -> None:
        if event.type == "lock.granted":
            self._last_grants.append({**event.data, "ts": rfc3339(event.ts)})
