"""Goal: whatever a backend's request ends in, its supervisor hears of it at once, and never has to
wait for the budget of the state. Method: both ends of a channel, and a backend whose wake fails.
And when a draining backend is done, of a real TCP connection."""

import asyncio
import errno
import socket

import pytest

from engine import messages as msg
from engine.backends import process
from engine.backends.channel import Channel, until_done
from engine.supervisor.incarnation import BackendChannel
from plumbing.errors import UnderstudyError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import OwnedFd
from plumbing.wire.frames import encode_frame
from tests.helpers import auntil, open_fds


class Failing:
    def __init__(self, error):
        self._error = error

    async def wake(self, *args, **kwargs):
        raise self._error


FAILURES = [
    (UnderstudyError("kv.full", "no room"), "failed at wake: no room [kv.full]"),
    (OSError(errno.EMFILE, "Too many open files"), "failed at wake: this process is at its limit"),
    (OSError(errno.ENOSPC, "No space left"), "No space left on device [engine.backend_failed]"),
    (RuntimeError("a bug"), "failed at wake: RuntimeError('a bug') [engine.backend_failed]"),
]


@pytest.mark.parametrize(("error", "sentence"), FAILURES)
async def test_supervisor_hears_of_every_failed_request(error, sentence):
    before = len(open_fds())
    fault = asyncio.get_running_loop().create_future()
    prepared = asyncio.Event()
    ours = BackendChannel(
        on_message=lambda message: prepared.set(),
        on_fault=lambda text, is_machine, code: fault.set_result((text, is_machine)),
        on_closed=lambda reason: None,
    )
    channel = Channel(ours.open())
    channel.prepared(Failing(error), msg.PreparedMsg(1, 1, "epoch"))
    await asyncio.wait_for(prepared.wait(), 30)
    reader, writer = socket.socketpair()
    writer.close()
    ours.ask(msg.WakeMsg(1, "e1"), msg.WokenMsg, print, [OwnedFd(reader.detach())])
    text, is_machine = await asyncio.wait_for(fault, 30)
    assert sentence in text
    assert is_machine is (getattr(error, "errno", None) == errno.ENOSPC)
    channel.closed = lambda *args: None  # it would end this process
    for each in (ours._conn, channel._conn):
        each.close("the test is over")
    await auntil(lambda: len(open_fds()) == before, "every descriptor to be closed")


async def test_supervisor_is_told_why_a_channel_was_closed():
    """Goal: a channel that ends by the supervisor's own verdict is not taken for a backend's death.
    Method: the backend answers what nobody asked."""
    closed = asyncio.get_running_loop().create_future()
    ours = BackendChannel(on_message=print, on_fault=print, on_closed=closed.set_result)
    with ours.open() as theirs:
        theirs.sendall(encode_frame(msg.CHANNEL.encode(msg.DrainedMsg(), 7), 0))
        assert "there is no request 7" in await asyncio.wait_for(closed, 30)


@pytest.mark.parametrize("is_gone", [False, True])
def test_process_that_fails_waits_for_no_supervisor_that_is_gone_or_stopped(monkeypatch, is_gone):
    """Goal: its memory is free soon, for the engine that takes over. Method: a socket that nobody
    reads, or that is closed."""
    monkeypatch.setattr(process, "REPORT_TIMEOUT_S", 0.01)
    ours, theirs = socket.socketpair()
    with theirs, BlockingClient.from_socket(ours, msg.CONTROL) as control:
        if is_gone:
            theirs.close()
        process.BackendProcess("model", "e-0", "e-0-1", control).report(
            UnderstudyError("kv.full", "no room")
        )


async def test_drain_waits_for_requests_and_unsent_answers_within_its_budget():
    """Method: never idle, idle after a while, and an answer larger than the client takes; a
    connection that is closed, or not there any more, holds nothing up."""
    assert not await until_done(list, lambda: False, 0.05)
    answers = iter([False, False, True])
    assert await until_done(list, lambda: next(answers), 60)
    made = asyncio.get_running_loop().create_future()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.set_result(writer.transport)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()):
        transport = await made
        assert await until_done(lambda: [transport, None], lambda: True, 60)
        transport.write(b"x" * (16 << 20))
        assert not await until_done(lambda: [transport], lambda: True, 0.05)
        transport.abort()
        assert await until_done(lambda: [transport], lambda: True, 60)
    server.close()
