"""Events are recorded after engines are answered: late, but in order and with their true times."""

from __future__ import annotations

import asyncio

from lockserver.core.events import Happened
from lockserver.server.event_outbox import EventOutbox
from plumbing.service.events import Event, EventLog
from tests.fake_clock import FakeClock
from tests.helpers import auntil


def test_event_recorded_late_has_the_time_at_which_it_happened():
    """Goal: the phases in reports stay accurate although recording is delayed. Method: two events,
    and a clock that moves between them and again before they are recorded; their ids are in
    order."""

    async def scenario() -> list[Event]:
        clock = FakeClock(1000.0)
        log = EventLog("lockserver", clock)
        recorded: list[Event] = []
        log.subscribe(recorded.append)
        outbox = EventOutbox(log, clock)
        outbox.add(Happened("lock.releasing", "first"))
        clock.advance(1.0)
        outbox.add(Happened("lock.granted", "second"))
        clock.advance(4.0)
        assert not recorded, "nothing is recorded while a grant may be under way"
        outbox.flush()
        outbox.flush()
        return recorded

    first, second = asyncio.run(scenario())
    assert (first.id, first.mono_ms, second.id, second.mono_ms) == (1, 1000.0, 2, 1001.0)
    assert first.ts < second.ts


def test_event_is_recorded_without_a_flush():
    """Goal: no event is lost. Method: record one event and run only the loop."""

    async def scenario() -> None:
        log = EventLog("lockserver", FakeClock())
        EventOutbox(log, FakeClock()).add(Happened("lock.queue", "an engine is waiting"))
        assert log.last_id == 0
        await auntil(lambda: log.last_id == 1, "the event to be recorded")

    asyncio.run(scenario())
