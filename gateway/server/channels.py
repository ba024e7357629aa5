"""Many connections in one, between a front and a pod: each request has a channel of its own.

An engine writes for all of its streams at each step. On a connection for each, every event costs a
record of TLS and two system calls. Here what is written in one turn of the loop is sent at once.
When a pod is lost, its streams need no handshakes at the others, whose connections are open.

Its protocols see a `ChannelTransport`, which sends no more than `WINDOW_BYTES` that the other end
has not read, so a reader that is slow stops its own channel only. A front opens channels; its first
frame with a new number does.

A frame begins with the number of its channel, in eight bytes, and a word of four. A word up to
`FRAME_BYTES_MAX` is the size of the data that follow. The other words are frames without data.
`CLOSED` ends the channel. `READ` plus a number of bytes lets the other end send as many more. The
pod sends `OPENED` once, with the number 0, when the connection has become one of channels.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

Buffer: TypeAlias = "bytes | bytearray | memoryview"

WINDOW_BYTES = 64 * 1024  # at a round trip of 0.2 ms 320 MB/s, and what a stalled client keeps here
FRAME_BYTES_MAX = 16 * 1024  # a record of TLS; other channels' frames go between
BUFFER_BYTES = 4 * FRAME_BYTES_MAX  # to read into
CLOSED, OPENED, READ = 1 << 29, 1 << 30, 1 << 31
CHANNELS_MAX = 4096  # of one front
UNREAD_BYTES_MAX = 64 << 20  # of all channels, which the kernel does not take: 1,000 full windows
STRAY_BYTES = 64  # enough for the first line of HTTP
_HEAD = struct.Struct(">QI")


class ChannelTransport(asyncio.Transport):
    """One end of a channel."""

    __slots__ = (
        *("_is_closing", "_connection", "_has_ended", "_high_bytes", "_is_full", "_is_lost"),
        *("_is_paused", "_number", "_protocol", "_read_bytes", "_room_bytes", "_unread", "_unsent"),
    )

    def __init__(self, connection: Channels, number: int, protocol: asyncio.Protocol) -> None:
        self._connection, self._number, self._protocol = connection, number, protocol
        self._room_bytes = WINDOW_BYTES  # that the other end takes
        self._unsent = bytearray()
        self._high_bytes, self._is_full = WINDOW_BYTES, False
        self._read_bytes = 0  # which the other end does not know yet
        self._unread = bytearray()
        self._is_paused = False
        self._has_ended = False  # the other end has closed; its protocol may not read that yet
        self._is_closing = False  # behind what is unsent
        self._is_lost = False

    # ------------------------------------------------------------------ of a transport

    def write(self, data: Buffer) -> None:
        size = len(data)
        if self._is_closing or self._is_lost or not size:
            return
        if size > self._room_bytes or size > FRAME_BYTES_MAX or self._unsent:
            self._unsent += data
            self._send_unsent()
            return
        self._room_bytes -= size
        self._connection.send(self._number, size, data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self._is_closing = True
        if not self._unsent:
            self.abort()

    def abort(self) -> None:
        if not self._is_lost:
            self._connection.send(self._number, CLOSED)
            self._connection.forget(self._number)
            self._is_lost = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._connection.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.abort()  # a front that asks for channels within a channel

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = WINDOW_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            asyncio.get_running_loop().call_soon(self._read_on)

    # ------------------------------------------------------------------ for the connection

    def receive(self, data: bytes) -> bool:
        """Whether the other end may send so much."""
        if self._is_paused or self._unread:
            self._unread += data
            return len(self._unread) <= WINDOW_BYTES
        self._give(data)
        return True

    def ended(self) -> None:
        """The other end has closed."""
        self._has_ended = True
        if not self._unread and not self._is_paused:
            self.lost(None)

    def lost(self, error: Exception | None) -> None:
        """An error changes nothing where the other end has closed before it."""
        if not self._is_lost and (error is None or not self._has_ended):
            self._is_lost = True
            self._connection.forget(self._number)
            self._protocol.connection_lost(error)

    def read(self, size: int) -> bool:
        """The other end has read this many bytes, and takes as many more; whether it had them."""
        self._room_bytes += size
        if self._room_bytes > WINDOW_BYTES:
            return False
        self._send_unsent()
        return True

    # ------------------------------------------------------------------ inside

    def _send_unsent(self) -> None:
        unsent = self._unsent
        while unsent and self._room_bytes:
            data = bytes(unsent[: min(self._room_bytes, FRAME_BYTES_MAX)])
            del unsent[: len(data)]
            self._room_bytes -= len(data)
            self._connection.send(self._number, len(data), data)
        if self._is_closing and not unsent:
            self.abort()
        elif not self._is_full and len(unsent) > self._high_bytes:
            self._is_full = True
            self._protocol.pause_writing()
        elif self._is_full and len(unsent) <= self._high_bytes // 4:
            self._is_full = False
            self._protocol.resume_writing()

    def _give(self, data: bytes) -> None:
        self._read_bytes += len(data)
        if self._read_bytes >= WINDOW_BYTES // 2:
            self._connection.send(self._number, READ + self._read_bytes)
            self._read_bytes = 0
        if not self._is_closing:
            self._protocol.data_received(data)

    def _read_on(self) -> None:
        if self._unread and not self._is_paused and not self._is_lost:
            data = bytes(self._unread)
            self._unread.clear()
            self._give(data)
        if self._has_ended and not self._unread and not self._is_paused:
            self.lost(None)


class Channels(asyncio.BufferedProtocol):
    """One connection, from when it is its protocol."""

    def __init__(self, accept: Callable[[], asyncio.Protocol] | None = None) -> None:
        """`accept`: gives the protocol of a channel that the other end opens."""
        self._accept = accept
        self._transport: asyncio.Transport | None = None  # while it is connected
        self._channels: dict[int, ChannelTransport] = {}
        self._last_number = 0  # of the channel that was opened last
        self._frames: list[Buffer] = []  # which the end of this turn sends
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._rest_bytes = 0  # at its beginning, of a frame that is not whole
        self.opened = asyncio.Event()  # or lost
        self.stray = b""  # what came in the place of `OPENED`, its beginning
        self._is_retired = False

    @property
    def is_open(self) -> bool:
        return self.opened.is_set() and self._transport is not None

    @property
    def has_unsent(self) -> bool:
        """Whether anything waits in this process until the kernel takes it."""
        transport = self._transport
        return transport is not None and bool(self._frames or transport.get_write_buffer_size())

    def open(self, protocol: asyncio.Protocol) -> ChannelTransport:
        """Make a channel, and `protocol` its own."""
        self._last_number += 1
        return self._add(protocol)

    def retire(self) -> None:
        """Close it at the end of its last channel."""
        self._is_retired = True
        self.forget(0)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def get_extra_info(self, name: str, default: Any) -> Any:
        return default if self._transport is None else self._transport.get_extra_info(name, default)

    def send(self, number: int, word: int, data: Buffer = b"") -> None:
        frames = self._frames
        if not frames:
            asyncio.get_running_loop().call_soon(self._flush)
        frames.append(_HEAD.pack(number, word))
        if data:
            frames.append(data)

    def forget(self, number: int) -> None:
        self._channels.pop(number, None)
        if self._is_retired and not self._channels:
            self.abort()

    # ------------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=UNREAD_BYTES_MAX)
        if self._accept is not None:
            self.send(0, OPENED)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._rest_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        at, size = 0, self._rest_bytes + nbytes
        data = bytes(self._buffer[:size])
        channels, is_right = self._channels, True
        while is_right and at + _HEAD.size <= size:
            number, word = _HEAD.unpack_from(data, at)
            begin = end = at + _HEAD.size
            channel = channels.get(number)
            if word <= FRAME_BYTES_MAX:
                end = begin + word
                if end > size:
                    break
                if channel is None:
                    channel = self._opened(number)
                if channel is not None:
                    is_right = channel.receive(data[begin:end])
            elif word == OPENED:
                self.opened.set()
            elif channel is not None and word == CLOSED:
                channel.ended()
            elif channel is not None and word >= READ:
                is_right = channel.read(word - READ)
            else:
                is_right = word == CLOSED or word >= READ  # of a channel that is closed here
            at = end
        self._rest_bytes = size - at
        if at and self._rest_bytes:
            self._buffer[: self._rest_bytes] = data[at:]
        if not is_right:
            self.stray = b"" if self.opened.is_set() else data[:STRAY_BYTES]
            self.abort()

    def pause_writing(self) -> None:
        """The other end does not read: what is answered to what it sends has no other limit."""
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.opened.set()
        for channel in list(self._channels.values()):
            channel.lost(error or ConnectionResetError("the connection of all channels is closed"))

    # ------------------------------------------------------------------ inside

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if self._transport is not None:
            self._transport.write(b"".join(frames))

    def _add(self, protocol: asyncio.Protocol) -> ChannelTransport:
        channel = ChannelTransport(self, self._last_number, protocol)
        self._channels[self._last_number] = channel
        protocol.connection_made(channel)
        return channel

    def _opened(self, number: int) -> ChannelTransport | None:
        """The channel that this number opens; None: it is closed already, or one too many."""
        if self._accept is None or number <= self._last_number:
            return None
        self._last_number = number
        if len(self._channels) >= CHANNELS_MAX:
            self.send(number, CLOSED)
            return None
        return self._add(self._accept())
