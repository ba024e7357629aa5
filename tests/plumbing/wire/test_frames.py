"""The framer, without sockets: what any cutting and merging of a stream must not change."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbing.errors import ProtocolError
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import HEADER, MAGIC, VERSION, FrameDecoder, encode_frame
from tests.helpers import open_fds


def _fds(count: int) -> list[OwnedFd]:
    return [OwnedFd(os.memfd_create(f"frame-{index}")) for index in range(count)]


@settings(deadline=None, max_examples=60)
@given(
    payloads=st.lists(st.tuples(st.binary(max_size=40), st.integers(0, 3)), max_size=6),
    cuts=st.lists(st.integers(1, 17), min_size=1, max_size=40),
)
def test_frames_do_not_depend_on_how_the_stream_is_split(
    payloads: list[tuple[bytes, int]], cuts: list[int]
):
    """Goal: however a stream is cut, the same frames come out, each with its own descriptors.
    Method: encode, cut at arbitrary places, deliver descriptors with the byte they belong to."""
    before = len(open_fds())
    stream, owners = b"", {}
    expected = []
    for payload, fd_count in payloads:
        fds = _fds(fd_count)
        owners[len(stream)] = fds
        expected.append((payload, [fd.fileno() for fd in fds]))
        stream += encode_frame(payload, fd_count)
    decoder, found, position = FrameDecoder(), [], 0
    step = 0
    while position < len(stream):
        size = cuts[step % len(cuts)]
        step += 1
        end = min(position + size, len(stream))
        fds = [fd for at, owned in owners.items() if position <= at < end for fd in owned]
        for frame in decoder.receive(stream[position:end], fds):
            found.append((frame.payload, [fd.fileno() for fd in frame.fds]))
            close_all(frame.fds)
        position = end
    assert found == expected
    assert not decoder.is_mid_frame
    assert len(open_fds()) == before


def _header(
    magic: bytes = MAGIC, version: int = VERSION, fds: int = 0, zero: int = 0, length: int = 0
) -> bytes:
    return HEADER.pack(magic, version, fds, zero, length)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n", "wire.bad_magic"),
        (b"X", "wire.bad_magic"),
        (_header(version=9), "wire.version"),
        (_header(zero=1), "wire.version"),
        (_header(length=2**32 - 1), "wire.frame_too_large"),
        (_header(fds=251), "wire.too_many_fds"),
        (_header(fds=1), "wire.missing_fds"),
    ],
)
def test_frames_bad_header_is_refused_and_leaks_nothing(data: bytes, code: str):
    """Goal: each way to break a header has its code. Method: feed it, with a frame before it whose
    descriptor must not be lost."""
    before = len(open_fds())
    decoder = FrameDecoder()
    first = encode_frame(b"ok", 1)
    with pytest.raises(ProtocolError) as caught:
        decoder.receive(first + data, _fds(1))
    assert caught.value.code == code
    assert len(open_fds()) == before


def test_frames_surplus_fds_are_refused_and_closed():
    """Goal: a descriptor that no header announced is an error. Method: two with a frame of one."""
    before = len(open_fds())
    with pytest.raises(ProtocolError) as caught:
        FrameDecoder().receive(encode_frame(b"", 1), _fds(2))
    assert caught.value.code == "wire.surplus_fds"
    assert len(open_fds()) == before


def test_incomplete_frame_keeps_its_fds_until_closed():
    """Goal: an incomplete frame keeps its descriptors, and closing the decoder closes them."""
    before = len(open_fds())
    decoder = FrameDecoder()
    assert decoder.receive(encode_frame(b"abc", 2)[:-1], _fds(2)) == []
    assert decoder.is_mid_frame
    assert len(open_fds()) == before + 2
    decoder.close()
    assert len(open_fds()) == before


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_frames_random_bytes_are_refused_or_awaited(data: bytes):
    """Goal: no input raises anything but ProtocolError."""
    with contextlib.suppress(ProtocolError):
        FrameDecoder().receive(data, [])


def test_encode_over_the_limits_is_refused():
    """Goal: this side refuses to send what the receiver would refuse."""
    with pytest.raises(ProtocolError, match=r"wire\.too_many_fds"):
        encode_frame(b"", 251)
    with pytest.raises(ProtocolError, match=r"wire\.frame_too_large"):
        encode_frame(b"x" * 11, 0, frame_bytes_max=10)
