"""People are told after engines: late, in order, and with the time at which it happened."""

from __future__ import annotations

import asyncio

from lockserver.core.events import Happened
from lockserver.server.event_outbox import EventOutbox
from plumbing.service.clock import FakeClock
from plumbing.service.events import Event, EventLog
from tests.helpers import auntil


def test_what_is_told_late_carries_the_time_at_which_it_happened():
    """Goal: the reports' phases stay true although records wait. Method: two events, a clock that
    moves between them and again before they are told; their ids are in order."""

    async def scenario() -> list[Event]:
        clock = FakeClock(1000.0)
        log = EventLog("lockserver", clock)
        told: list[Event] = []
        log.subscribe(told.append)
        teller = EventOutbox(log, clock)
        teller.happened(Happened("lock.releasing", "first"))
        clock.advance(1.0)
        teller.happened(Happened("lock.granted", "second"))
        clock.advance(4.0)
        assert not told, "nobody is told while a grant may be on its way"
        teller.catch_up()
        teller.catch_up()
        return told

    first, second = asyncio.run(scenario())
    assert (first.id, first.mono_ms, second.id, second.mono_ms) == (1, 1000.0, 2, 1001.0)
    assert first.ts < second.ts


def test_what_happened_is_told_although_nobody_asks():
    """Goal: no event is forgotten. Method: one event, and nothing but the loop running."""

    async def scenario() -> None:
        log = EventLog("lockserver", FakeClock())
        EventOutbox(log, FakeClock()).happened(Happened("lock.queue", "somebody waits"))
        assert log.last_id == 0
        await auntil(lambda: log.last_id == 1, "the event to be told")

    asyncio.run(scenario())
