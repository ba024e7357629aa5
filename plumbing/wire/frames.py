"""Frames: a fixed header, a MessagePack payload, and a count of the descriptors that belong to it.

    offset  size  field
    0       4     magic "USDY"
    4       1     protocol version
    5       1     number of file descriptors (0 … 250)
    6       2     zero
    8       4     payload length in bytes, big endian

Sans-IO: bytes and descriptors in, frames out. What is surprising is how descriptors travel on a
stream: they are attached to a byte, the kernel merges neighbouring writes, and `A`, `B+fd`, `C`
arrives as (`AB`, fd), (`C`). So they are queued first in, first out, and each header says how many
belong to it. They are attached to the header's first byte, so they arrive no later than the header.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from plumbing.errors import ProtocolError
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import FDS_PER_FRAME_MAX, FRAME_BYTES_MAX

MAGIC = b"USDY"
VERSION = 2
HEADER = struct.Struct(">4sBBHI")


@dataclass
class Frame:
    """One frame: the payload's bytes and its descriptors, which the receiver owns."""

    payload: bytes
    fds: list[OwnedFd] = field(default_factory=list)


def encode_frame(payload: bytes, fd_count: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """Header and payload. Refuses what the receiver would refuse.

    Raises:
        ProtocolError: `wire.frame_too_large` or `wire.too_many_fds`.
    """
    _check_length(len(payload), frame_bytes_max)
    if fd_count > FDS_PER_FRAME_MAX:
        why = f"a frame carries at most {FDS_PER_FRAME_MAX} descriptors, not {fd_count}"
        raise ProtocolError("wire.too_many_fds", f"{why}; send the rest in further frames")
    return HEADER.pack(MAGIC, VERSION, fd_count, 0, len(payload)) + payload


class FrameDecoder:
    """Turns what `recvmsg` returns into frames. After an error it must not be used again."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()
        self._fds: deque[OwnedFd] = deque()

    def receive(self, data: bytes, fds: list[OwnedFd]) -> list[Frame]:
        """Take bytes and descriptors in the order of arrival; return the frames now complete.

        Raises:
            ProtocolError: the peer broke the framing. Complete frames of the same call are lost
                and every descriptor is closed: the connection must end anyway.
        """
        self._buffer += data
        self._fds.extend(fds)
        frames: list[Frame] = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
            if not self._buffer and self._fds:
                raise ProtocolError(
                    "wire.surplus_fds",
                    f"{len(self._fds)} descriptors arrived that no frame header announced",
                )
        except BaseException:
            for frame in frames:
                close_all(frame.fds)
            self.close()
            raise
        return frames

    def close(self) -> None:
        """Drop an incomplete frame and the descriptors that arrived for it."""
        self._buffer.clear()
        close_all(self._fds)
        self._fds.clear()

    def _next(self) -> Frame | None:
        if len(self._buffer) < HEADER.size:
            _check_magic(bytes(self._buffer[:4]))
            return None
        magic, version, fd_count, zero, length = HEADER.unpack_from(self._buffer)
        _check_magic(magic)
        if version != VERSION or zero:
            raise ProtocolError(
                "wire.version",
                f"the peer uses protocol version {version}, this side uses {VERSION}; run the same"
                " release of understudy in every container",
                theirs=version,
                ours=VERSION,
            )
        _check_length(length, self.frame_bytes_max)
        if len(self._fds) < fd_count:
            raise ProtocolError(
                "wire.missing_fds",
                f"a frame announced {fd_count} descriptors and {len(self._fds)} arrived",
            )
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[HEADER.size : end])
        del self._buffer[:end]
        return Frame(payload, [self._fds.popleft() for _ in range(fd_count)])


def _check_magic(start: bytes) -> None:
    if not MAGIC.startswith(start):
        raise ProtocolError("wire.bad_magic", "received data that is not a frame of this protocol")


def _check_length(length: int, frame_bytes_max: int) -> None:
    if length > frame_bytes_max:
        raise ProtocolError(
            "wire.frame_too_large",
            f"a frame of {length} bytes exceeds the limit of {frame_bytes_max}",
            limit_bytes=frame_bytes_max,
        )
