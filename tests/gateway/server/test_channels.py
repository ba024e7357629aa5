"""Goal: to its protocols a channel is a connection of its own, though all of them share one.

Method: both ends in this process, on a real connection, which is cut into pieces by the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import sys

import pytest

from gateway.server import channels as module
from gateway.server.channels import CLOSED, FRAME_BYTES_MAX, READ, WINDOW_BYTES, Channels
from tests.gateway.server.harness import staged
from tests.helpers import auntil


class End(asyncio.Protocol):
    """A protocol that records its calls; with `echoes` it writes back what it reads."""

    def __init__(self, echoes: bool = False) -> None:
        self.read, self.lost, self.echoes = bytearray(), [], echoes
        self.calls: list[str] = []

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        assert not self.lost
        self.read += data
        if self.echoes:
            self.transport.write(data)

    def connection_lost(self, error):
        self.lost.append(error)

    def pause_writing(self):
        self.calls.append("pause")

    def resume_writing(self):
        self.calls.append("resume")


class Pair:
    """`front` opens channels; what they become in the `pod` is in `accepted`."""

    def __init__(self):
        self.accepted: list[End] = []
        self.echoes = False

    def accept(self):
        self.accepted.append(End(self.echoes))
        return self.accepted[-1]

    async def connect(self):
        loop = asyncio.get_running_loop()
        for end, channels in zip(socket.socketpair(), ("front", "pod"), strict=True):
            made = Channels() if channels == "front" else Channels(self.accept)
            end.setblocking(False)
            setattr(self, channels, made)
            await loop.create_connection(lambda made=made: made, sock=end)
        await self.front.opened.wait()
        return self

    def open(self, first=b"hello"):
        end = End()
        self.front.open(end)
        end.transport.write(first)
        return end

    async def opened(self, first=b"hello"):
        """Both ends of a new channel."""
        count, front = len(self.accepted), self.open(first)
        await auntil(lambda: len(self.accepted) > count, "the channel")
        return front, self.accepted[-1]


@contextlib.asynccontextmanager
async def connected(_):
    pair = Pair()
    try:
        yield await pair.connect()
    finally:
        pair.front.abort()
        pair.pod.abort()


on_pair = staged(connected, "pair")


@on_pair
async def test_every_channel_carries_its_own_bytes_in_order(pair):
    chance, pair.echoes = random.Random(7), True
    sent: dict[End, bytes] = {}
    for _ in range(20):
        first = chance.randbytes(chance.choice([1, 99, FRAME_BYTES_MAX, 5 * WINDOW_BYTES]))
        sent[pair.open(first)] = first
    for _ in range(200):
        end, more = chance.choice(list(sent)), chance.randbytes(chance.randrange(40_000))
        end.transport.writelines([more[:7], more[7:]])
        sent[end] += more
        if chance.random() < 0.1:
            await asyncio.sleep(0)
    await auntil(lambda: all(len(e.read) == len(sent[e]) for e in sent), "the echoes")
    assert all(end.read == sent[end] for end in sent)


@on_pair
async def test_slow_reader_stops_its_own_channel_only(pair):
    data = bytes(range(256)) * (WINDOW_BYTES // 32)
    (slow, reader), (other, quick) = await pair.opened(), await pair.opened()
    reader.transport.pause_reading()
    slow.transport.write(data)
    other.transport.write(data)
    await auntil(lambda: len(quick.read) == 5 + len(data), "what is read at once")
    assert len(reader.read) == 5
    assert slow.transport.get_write_buffer_size() == len(data) - (WINDOW_BYTES - 5)
    assert (slow.calls, other.calls) == (["pause"], ["pause", "resume"])
    reader.transport.resume_reading()
    await auntil(lambda: reader.read == b"hello" + data, "the rest")
    assert slow.calls == ["pause", "resume"]


@pytest.mark.parametrize("is_paused", [False, True])
@on_pair
async def test_close_comes_behind_what_was_written(pair, is_paused):
    data = bytes(3 * WINDOW_BYTES)
    end, reader = await pair.opened()
    if is_paused:
        reader.transport.pause_reading()
    end.transport.write(data)
    end.transport.close()
    end.transport.write(b"more")
    assert end.transport.is_closing()
    if is_paused:
        reader.transport.resume_reading()
    await auntil(lambda: reader.lost and end.lost, "the end")
    assert reader.read == b"hello" + data
    assert (reader.lost, end.lost) == ([None], [None])


@pytest.mark.parametrize("is_connection_lost", [False, True])
@on_pair
async def test_protocol_that_has_paused_reads_the_end_when_it_reads_on(pair, is_connection_lost):
    """As on a connection of its own, also when the connection of all is lost meanwhile. Method:
    nothing is unread, then something."""
    ends = [await pair.opened(), await pair.opened()]
    for (front, pod), more in zip(ends, (b"", b"more"), strict=True):
        front.transport.pause_reading()
        pod.transport.write(more)
        pod.transport.close()
    await auntil(lambda: all(pod.lost for _, pod in ends), "the end at the pod")
    last, writer = await pair.opened()
    writer.transport.write(b"behind")
    await auntil(lambda: last.read, "what is sent behind both ends")
    if is_connection_lost:
        pair.pod.abort()
        await auntil(lambda: not pair.front.is_open, "the loss")
    assert [front.lost for front, _ in ends] == [[], []]
    for front, _ in ends:
        front.transport.resume_reading()
    await auntil(lambda: all(front.lost for front, _ in ends), "the end at the front")
    assert [bytes(front.read) for front, _ in ends] == [b"", b"more"]
    assert [front.lost for front, _ in ends] == [[None], [None]]


@on_pair
async def test_bytes_that_nobody_reads_take_no_more_memory_in_small_frames(pair):
    front, pod = await pair.opened()
    pod.transport.pause_reading()
    for _ in range(WINDOW_BYTES - 5):
        front.transport.write(b"x")
    await auntil(lambda: len(pod.transport._unread) == WINDOW_BYTES - 5, "all of them")
    assert sys.getsizeof(pod.transport._unread) < 2 * WINDOW_BYTES
    pod.transport.resume_reading()
    await auntil(lambda: len(pod.read) == WINDOW_BYTES, "what is read")


@on_pair
async def test_peer_that_asks_and_reads_nothing_is_cut_off(pair, monkeypatch):
    """Method: each channel is closed before its answer is read, so none has a full window."""
    pair.pod._transport.set_write_buffer_limits(high=1 << 20)
    pair.front._transport.pause_reading()

    pair.echoes = True

    def asks_on() -> bool:
        for _ in range(100):
            pair.open(bytes(10_000)).transport.abort()
        return pair.pod._transport is None

    await auntil(asks_on, "the end")


@on_pair
async def test_aborted_channel_ends_at_both_ends_once(pair):
    (end, other), (stays, _) = await pair.opened(), await pair.opened()
    other.transport.pause_reading()
    end.transport.write(bytes(3 * WINDOW_BYTES))
    for _ in range(2):
        end.transport.abort()
    other.transport.resume_reading()
    await auntil(lambda: other.lost, "its other end")
    other.transport.write(b"late")
    stays.transport.write(b"more")
    await auntil(lambda: pair.accepted[1].read == b"hellomore", "the channel that is open")
    assert (end.lost, other.lost, stays.lost, bytes(end.read)) == ([None], [None], [], b"")


@on_pair
async def test_lost_connection_is_an_error_to_each_of_its_channels(pair):
    ends = [await pair.opened() for _ in range(3)]
    pair.pod.abort()
    await auntil(lambda: all(front.lost for front, _ in ends), "the channels' ends")
    assert all(isinstance(each.lost[0], ConnectionError) for pair in ends for each in pair)
    assert not pair.front.is_open


@on_pair
async def test_retired_connection_closes_behind_its_last_channel(pair):
    end, reader = await pair.opened()
    pair.front.retire()
    end.transport.write(b" you")
    await auntil(lambda: reader.read == b"hello you", "what is written after it")
    assert pair.front.is_open
    reader.transport.abort()
    await auntil(lambda: pair.pod.get_extra_info("socket", None) is None, "the end")


@on_pair
async def test_one_channel_too_many_is_closed(pair, monkeypatch):
    monkeypatch.setattr(module, "CHANNELS_MAX", 2)
    ends = [pair.open() for _ in range(3)]
    await auntil(lambda: ends[2].lost, "its end")
    assert [each.lost for each in ends] == [[], [], [None]]
    assert len(pair.accepted) == 2


@pytest.mark.parametrize(
    "frames",
    [
        struct.pack(">QI", 1, FRAME_BYTES_MAX + 1),
        struct.pack(">QI", 1, CLOSED + 1),
        struct.pack(">QI", 1, READ + 1),  # of what was never sent
        (struct.pack(">QI", 1, FRAME_BYTES_MAX) + bytes(FRAME_BYTES_MAX)) * 5,  # unread, too much
        b"HTTP/1.1 404 Not Found\r\n\r\n",
    ],
)
@on_pair
async def test_peer_that_breaks_the_protocol_is_cut_off(pair, frames):
    end, reader = await pair.opened()
    reader.transport.pause_reading()
    pair.front._transport.write(frames)
    await auntil(lambda: end.lost and reader.lost, "the end")


@on_pair
async def test_word_about_a_closed_channel_is_nothing(pair):
    end, reader = await pair.opened()
    end.transport.abort()
    await auntil(lambda: reader.lost, "its end")
    for frame in (
        struct.pack(">QI", 1, 3) + b"abc",
        *(struct.pack(">QI", 1, each) for each in (CLOSED, READ + 9)),
    ):
        pair.front._transport.write(frame)
    _, other = await pair.opened(b"next")
    assert other.read == b"next"
