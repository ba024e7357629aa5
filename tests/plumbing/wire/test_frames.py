"""Frames and messages: what was sent is read, and nothing else passes."""

from __future__ import annotations

import itertools
import os
from types import MappingProxyType
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import HEADER, MAGIC, VERSION, FrameDecoder, encode_frame
from plumbing.wire.messages import (
    FAULT_DETAILS_BYTES_MAX,
    FAULT_MESSAGE_CHARS_MAX,
    FaultMsg,
    fault_of,
)
from tests.helpers import open_fds
from tests.plumbing.wire.echo import CATALOGUE, Echo, Part


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
    for size in itertools.cycle(cuts):
        if position >= len(stream):
            break
        end = position + size
        fds = [fd for at, owned in owners.items() if position <= at < end for fd in owned]
        for frame in decoder.receive(stream[position:end], fds):
            found.append((frame.payload, [fd.fileno() for fd in frame.fds]))
            close_all(frame.fds)
        position = end
    assert found == expected
    assert len(open_fds()) == before


def _header(version: int = VERSION, fds: int = 0, length: int = 0) -> bytes:
    return HEADER.pack(MAGIC, version, fds, 0, length)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n", "wire.bad_magic"),
        (_header(version=9), "wire.version"),
        (_header(length=2**32 - 1), "wire.frame_too_large"),
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
    with pytest.raises(ProtocolError, match=r"wire\.surplus_fds"):
        FrameDecoder().receive(encode_frame(b"", 1), _fds(2))
    assert len(open_fds()) == before


def test_encode_over_the_limits_is_refused():
    """Goal: this side refuses to send what the receiver would refuse."""
    with pytest.raises(ProtocolError, match=r"wire\.too_many_fds"):
        encode_frame(b"", 251)
    with pytest.raises(ProtocolError, match=r"wire\.frame_too_large"):
        encode_frame(b"x" * 11, 0, frame_bytes_max=10)


@given(
    st.builds(
        Echo,
        text=st.text(max_size=50),
        count=st.integers(0, 1000),
        ratio=st.floats(allow_nan=False),
        parts=st.lists(st.builds(Part, st.text(max_size=5), st.integers(-5, 5))).map(tuple),
        extra=st.none() | st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3),
    ),
    st.integers(0, 2**63 - 1),
)
def test_message_round_trip_is_identity(message: Echo, request_id: int):
    """Goal: decode is the inverse of encode for every message."""
    assert CATALOGUE.decode(CATALOGUE.encode(message, request_id), 0) == (message, request_id)


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        ({"type": "echo"}, "wire.bad_payload", "array"),
        ([1, {"type": "nonsense"}], "wire.unknown_type", "nonsense"),
        ([1, {}], "wire.bad_field", "`type`"),
        ([True, {"type": "echo"}], "wire.bad_request_id", "bool"),
        ([-1, {"type": "echo"}], "wire.bad_request_id", ">= 0"),
        ([1, {"type": "echo", "colour": 1}], "wire.bad_field", "colour"),
        ([1, {"type": "echo", "text": None}], "wire.bad_field", ".text"),
        ([1, {"type": "echo", "count": True}], "wire.bad_field", ".count"),
        ([1, {"type": "echo", "text": "x" * 100_001}], "wire.bad_field", ".text"),
        ([1, {"type": "echo", "parts": [{"name": "a"}]}], "wire.bad_field", "size"),
        ([1, {"type": "echo", "extra": {b"a": 1}}], "wire.bad_field", "`key` in"),
    ],
)
def test_message_broken_body_names_the_field(body: Any, code: str, named: str):
    """Goal: each way to break a body has a code and names what is wrong."""
    with pytest.raises(ProtocolError) as caught:
        CATALOGUE.decode(msgpack.packb(body), 0)
    assert caught.value.code == code
    assert named in caught.value.message


def test_message_wrong_number_of_fds_is_refused():
    """Goal: a message says how many descriptors it carries, and another number is an error."""
    payload = CATALOGUE.encode(fault_of(UnderstudyError("a.b", "c", d=(1, 2))))
    message, _ = CATALOGUE.decode(payload, 0)
    assert message == FaultMsg("a.b", "c", {"d": [1, 2]})
    with pytest.raises(ProtocolError, match=r"wire\.fd_count"):
        CATALOGUE.decode(payload, 1)


def test_details_of_an_error_may_be_subclasses_of_plain_types():
    """Goal: an error can be sent although a library put subclasses of plain types into it, or a
    name that is not UTF-8; any other type is a bug."""
    mood = type("Mood", (str,), {})("calm")
    view, odd = MappingProxyType({"a": (1,)}), os.fsdecode(b"\xff")
    error = UnderstudyError("a.b", odd, mood=mood, view=view, names={odd: [odd, 1]})
    message, _ = CATALOGUE.decode(CATALOGUE.encode(fault_of(error)), 0)
    shown = {"mood": "calm", "view": {"a": [1]}, "names": {"\\udcff": ["\\udcff", 1]}}
    assert message == FaultMsg("a.b", "\\udcff", shown)
    with pytest.raises(TypeError, match="object cannot travel"):
        fault_of(UnderstudyError("a.b", "c", thing=object()))


def test_fault_is_cut_to_its_limits_and_keeps_what_fits():
    """Goal: message and details are bounded for any error; small details survive."""
    error = UnderstudyError("a.b", "m" * 10**6, big="x" * 10**6, field="f", list=[1] * 10**5)
    fault = fault_of(error)
    assert len(fault.message) == FAULT_MESSAGE_CHARS_MAX
    assert fault.details == {"field": "f"}
    assert len(CATALOGUE.encode(fault)) < FAULT_MESSAGE_CHARS_MAX + FAULT_DETAILS_BYTES_MAX
