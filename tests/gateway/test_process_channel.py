"""Goal: a child obeys its parent's messages alone, and outlives a parent that does not read.

Method: the child's end of a channel on a loop of this process, and the parent's end by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

from gateway import messages as msg
from gateway.server.main import ORPHANED, Parent, ParentLink
from plumbing.errors import RemoteError, UnreachableError, UsageError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.connection import UnixConnection
from plumbing.wire.fds import OwnedFd
from tests.helpers import auntil

SETTINGS = msg.ConfigureGatewayMsg(
    directory=b"/nowhere",
    hold_ms=1,
    park_timeout_ms=1,
    resumes_max=1,
    memory_bytes=1,
    keepalive_comments_ms=0,
    access_log=False,
)


class Notes:
    """Doors that note what they are told."""

    def __init__(self, settings: msg.ConfigureGatewayMsg, parent: Parent) -> None:
        if settings.tls_cert:
            raise UsageError("gateway.bad_tls", "no such certificate")
        self.told: list[object] = []
        self.may_stop = asyncio.Event()
        self.parent = parent

    def accept(self, listening: OwnedFd, address: str) -> None:
        self.told.append(("accept", os.readlink(f"/proc/self/fd/{listening.fileno()}"), address))
        listening.close()

    def granted(self, engine: str, token: int, era: str, model: str = "") -> None:
        self.told.append((engine, token, era))

    def nobody(self, reason: str, model: str = "", *, is_final: bool = False) -> None:
        self.told.append(reason)

    def demand(self) -> None:
        """There is no pool."""

    async def stop(self, budget_ms: float) -> None:
        self.told.append(budget_ms)
        await self.may_stop.wait()

    def beat(self, progress: int) -> msg.GatewayBeatMsg:
        return msg.GatewayBeatMsg(progress, is_accepting=bool(self.told))


class Ends:
    """Both ends of a channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.doors: Notes | None = None
        self.link = ParentLink(self.make)
        self.conn = UnixConnection(ours, msg.CHANNEL, self.link)
        self.parent = BlockingClient.from_socket(theirs, msg.CHANNEL)

    def make(self, settings: msg.ConfigureGatewayMsg, parent: Parent) -> Notes:
        self.doors = Notes(settings, parent)
        return self.doors

    async def receive(self) -> object:
        return (await asyncio.to_thread(self.parent.receive)).message

    async def configured(self) -> Notes:
        self.parent.notify(SETTINGS)
        await auntil(lambda: self.doors is not None, "the settings to arrive")
        assert self.doors is not None
        return self.doors


def run(scene: Callable[[Ends], Awaitable[None]]) -> None:
    async def main() -> None:
        ends = Ends()
        try:
            await scene(ends)
        finally:
            ends.parent.close()
            ends.conn.close("the test is over")
            await ends.link.closed_event.wait()

    asyncio.run(main())


def test_messages_reach_the_doors_in_order_and_the_first_beat_says_that_they_could_open():
    """Goal: the relay. Method: each message once; the last beat comes before the exit."""

    async def scene(ends: Ends) -> None:
        doors = await ends.configured()
        assert await ends.receive() == msg.GatewayBeatMsg(1, is_accepting=False)
        fd = OwnedFd(os.open(os.devnull, os.O_RDONLY))
        ends.parent.notify(msg.AcceptMsg("127.0.0.1:8000"), fds=[fd])
        ends.parent.notify(msg.GrantMsg("engine-0", 3, "era"))
        ends.parent.notify(msg.NobodyMsg("it died"))
        ends.parent.notify(msg.StopMsg(500))
        await auntil(lambda: len(doors.told) == 4, "all four")
        accepted = ("accept", os.devnull, "127.0.0.1:8000")
        assert doors.told == [accepted, ("engine-0", 3, "era"), "it died", 500]
        doors.parent.happened(msg.GatewayEventMsg("gateway.x", "something"))
        doors.may_stop.set()
        assert await ends.link.ended == 0
        heard: list[object] = []
        with contextlib.suppress(UnreachableError):
            while True:  # to the end of the channel
                heard.append(await ends.receive())
        assert msg.GatewayEventMsg("gateway.x", "something") in heard
        assert isinstance(heard[-1], msg.GatewayBeatMsg)

    run(scene)


def test_settings_that_doors_refuse_are_reported_with_their_exit_code():
    """Goal: the parent can say why. Method: a certificate that is not there."""

    async def scene(ends: Ends) -> None:
        changed = msg.ConfigureGatewayMsg(**{**_fields(), "tls_cert": "/no.pem"})
        ends.parent.notify(changed)
        with pytest.raises(RemoteError, match="no such certificate"):
            await ends.receive()
        assert await ends.link.ended == UsageError.exit_code

    run(scene)


@pytest.mark.parametrize("message", [msg.StopMsg(1), msg.GatewayBeatMsg(1, is_accepting=False)])
def test_what_is_out_of_order_or_not_for_a_child_ends_the_channel(message):
    """Goal: no guessing. Method: a stop before the settings; a beat to a child that has them."""

    async def scene(ends: Ends) -> None:
        if isinstance(message, msg.GatewayBeatMsg):
            await ends.configured()
            await ends.receive()
        ends.parent.notify(message)
        with pytest.raises(RemoteError, match=r"gateway\.not_"):
            await ends.receive()
        assert await ends.link.ended == ORPHANED

    run(scene)


def test_a_parent_that_does_not_read_for_hours_costs_no_memory_and_no_stream():
    """Goal: whoever stops the parent cuts nobody. Method: beats of a day, then the parent reads:
    what it gets last is true."""

    async def scene(ends: Ends) -> None:
        doors = await ends.configured()
        for _ in range(24 * 3600 * 2):
            ends.link._beat()
        assert not ends.conn.is_closed
        doors.nobody("it is accepting now")
        beat = await ends.receive()
        while not (isinstance(beat, msg.GatewayBeatMsg) and beat.is_accepting):
            beat = await ends.receive()

    run(scene)


def _fields() -> dict[str, object]:
    return {name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__}
