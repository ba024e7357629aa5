"""Events are recorded after engines have been answered: a moment later, with their own time.

Owns what has happened and is not yet recorded. A log line, an event for the observers and the
counters cost as much as the whole path of a grant (half a millisecond, measured), and the first are
due when a holder's connection ends, the last when the next holder is about to run. So all of them
wait for `DELAY_S`, or until status or metrics are asked for.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from lockserver.core import events as ev
from lockserver.status.online import processes_of
from lockserver.status.reasons import named
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog

DELAY_S = 0.005  # a small process is dead and its successor granted by then; no reader is faster


class EventOutbox:
    """Records `Happened` in `log`, in order."""

    def __init__(self, log: EventLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[ev.Happened, datetime, float]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, effect: ev.Happened) -> None:
        """Record this in a moment, with the present time."""
        self._pending.append((effect, self._clock.wall(), self._clock.now_ms()))
        if self._timer is None:
            self._timer = self._loop.call_later(DELAY_S, self.flush)

    def flush(self) -> None:
        """Record everything now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, []
        for effect, ts, mono_ms in pending:
            data, message = dict(effect.data), effect.message
            if effect.evidence is not None:
                data["pids"] = processes_of(effect.evidence)
                message = f"{message}: {named(data['pids'])}"
            self._log.record(effect.type, message, effect.severity, data, at=(ts, mono_ms))
