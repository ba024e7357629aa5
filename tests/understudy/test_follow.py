"""`understudy events` over real sockets and processes: nothing missed, nothing twice, no end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

from plumbing.pod.messages import EventMsg, StatusReplyMsg
from plumbing.service.clock import SystemClock
from tests.fake_clock import FakeClock
from tests.gms.bench import ClientProcess, GmsProcess
from tests.helpers import auntil
from understudy.status.gather import FollowedPart, follow_events

DEADLINE_S = 30.0


def types_of(heard: list[dict[str, Any]]) -> list[str]:
    return [record["type"] for record in heard]


async def test_events_of_a_memory_server_are_followed_across_its_deaths(directory: Path):
    """Goal: what a memory service does is seen, its recoveries above all. Method: follow it, kill
    it twice under a kept reader: gone, back and recovered once each, and nothing of before."""
    heard: list[dict[str, Any]] = []
    note = heard.append

    async def hear() -> None:
        async with aclosing(follow_events(directory, SystemClock().now_ms())) as records:
            async for record in records:
                note(record)

    gms = await asyncio.to_thread(GmsProcess(str(directory)).start)
    kept = ClientProcess(str(directory), "rw_or_ro", "engine-0")
    following = None
    try:
        await asyncio.to_thread(kept.expect, "writer")
        await asyncio.to_thread(kept.do, "place 1")
        await asyncio.to_thread(kept.do, "commit")
        await asyncio.to_thread(kept.do, "keep")
        following = asyncio.create_task(hear())
        while not heard:  # it says nothing when it has begun to watch
            await asyncio.to_thread(lambda: gms.reader().close())
        assert "gms.commit" not in types_of(heard), "that was before our time"
        for deaths in (1, 2):
            await asyncio.to_thread(gms.kill)
            await asyncio.to_thread(gms.start)
            await auntil(
                lambda n=deaths: types_of(heard).count("gms.recovered") == n, "the recovery"
            )
        told = types_of(heard)
        counts = [told.count(kind) for kind in ("pod.gone", "pod.back", "gms.recovered")]
        assert counts == [2, 2, 2]
        assert {r["source"] for r in heard} == {"gms-HOST-0"}
        gone = next(r for r in heard if r["type"] == "pod.gone")
        assert set(gone) == set(heard[0]), "one shape for all"
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        kept.kill()
        gms.stop()
    assert types_of(heard)[-1] != "pod.gone", "our own end is not theirs"


def test_a_followed_part_reports_each_record_once():
    """Goal: reconnecting repeats nothing and loses nothing. Method: what a server says at a first
    connection, at a second to the same process, and the next one, whose ids begin anew."""
    heard: list[dict[str, Any]] = []
    part = FollowedPart("x", heard.append, FakeClock(), since_ms=2.5)

    def connects(*made: tuple[int, float]) -> list[int]:
        heard.clear()
        part.received(StatusReplyMsg({}))
        for number, mono_ms in made:
            part.received(EventMsg({"id": number, "type": "a.b", "mono_ms": mono_ms}))
        return [record["id"] for record in heard if record["id"]]

    assert connects((1, 1.0), (2, 2.0), (3, 3.0)) == [3]
    part.lost()
    part.lost()
    assert types_of(heard).count("pod.gone") == 1
    assert connects((1, 1.0), (2, 2.0), (3, 3.0), (4, 3.0)) == [4]
    assert types_of(heard).count("pod.back") == 1
    assert connects((1, 8.0), (2, 9.0)) == [1, 2]
