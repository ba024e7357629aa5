"""Events are recorded after engines are answered: late, but in order and with their true times."""

from __future__ import annotations

import asyncio

from lockserver.core.events import Happened
from lockserver.server.server import LockServer, LockSettings
from tests.fake_clock import FakeClock
from tests.helpers import auntil


def test_event_recorded_late_has_the_time_at_which_it_happened(pod_dir):
    """Goal: the phases in reports stay accurate although recording is delayed. Method: two events,
    and a clock that moves between them and again before they are recorded; a third that only the
    loop records."""

    async def scenario() -> None:
        clock, recorded = FakeClock(1000.0), []
        server = LockServer(LockSettings(pod_dir), clock)
        server.events.subscribe(recorded.append)
        server._happened(Happened("lock.releasing", "first"))
        clock.advance(1.0)
        server._happened(Happened("lock.granted", "second"))
        clock.advance(4.0)
        assert not recorded, "nothing is recorded while a grant may be under way"
        server.flush()
        server.flush()
        assert [(each.id, each.mono_ms) for each in recorded] == [(1, 1000.0), (2, 1001.0)]
        server._happened(Happened("lock.queue", "third"))
        await auntil(lambda: len(recorded) == 3, "the event to be recorded")

    asyncio.run(scenario())
