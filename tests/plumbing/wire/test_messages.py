"""Typed messages: everything true survives the trip, everything else names the field."""

from __future__ import annotations

import os
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.wire.messages import Catalogue, FaultMsg, Message, fault_of
from tests.plumbing.wire.echo import CATALOGUE, Echo, Part


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
        ([1, 2], "wire.bad_payload", ""),
        ({"type": "nonsense", "id": 1}, "wire.unknown_type", "nonsense"),
        ({"id": 1}, "wire.unknown_type", "None"),
        ({"type": "echo"}, "wire.bad_request_id", "None"),
        ({"type": "echo", "id": -1}, "wire.bad_request_id", "-1"),
        ({"type": "echo", "id": True}, "wire.bad_request_id", "True"),
        ({"type": "echo", "id": 1, "colour": 1}, "wire.unknown_field", "colour"),
        ({"type": "echo", "id": 1, "text": 5}, "wire.bad_field", "echo.text"),
        ({"type": "echo", "id": 1, "text": None}, "wire.bad_field", "echo.text"),
        ({"type": "echo", "id": 1, "count": True}, "wire.bad_field", "echo.count"),
        ({"type": "echo", "id": 1, "count": 1001}, "wire.bad_field", "echo.count"),
        ({"type": "echo", "id": 1, "count": 1.0}, "wire.bad_field", "echo.count"),
        ({"type": "echo", "id": 1, "ratio": "1"}, "wire.bad_field", "echo.ratio"),
        ({"type": "echo", "id": 1, "text": "x" * 100_001}, "wire.bad_field", "echo.text"),
        ({"type": "echo", "id": 1, "parts": {}}, "wire.bad_field", "echo.parts"),
        ({"type": "echo", "id": 1, "parts": [1]}, "wire.bad_field", "echo.parts[0]"),
        ({"type": "echo", "id": 1, "parts": [{"name": "a"}]}, "wire.missing_field", "size"),
        ({"type": "echo", "id": 1, "extra": {"a": "b"}}, "wire.bad_field", "echo.extra[...]"),
        ({"type": "echo", "id": 1, "extra": [1]}, "wire.bad_field", "echo.extra"),
        ({"type": "echo", "id": 1, "extra": {b"a": 1}}, "wire.bad_field", "`key` in `echo.extra`"),
        ({"type": "error", "id": 1, "code": "x"}, "wire.missing_field", "message"),
    ],
)
def test_message_broken_body_names_the_field(body: Any, code: str, named: str):
    """Goal: each way to break a body has a code and names what is wrong."""
    with pytest.raises(ProtocolError) as caught:
        CATALOGUE.decode(msgpack.packb(body), 0)
    assert caught.value.code == code
    assert named in caught.value.message


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_message_random_payload_is_a_protocol_error(payload: bytes):
    """Goal: no payload raises anything but ProtocolError."""
    with pytest.raises(ProtocolError):
        CATALOGUE.decode(payload, 0)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_message_random_field_is_a_protocol_error_or_a_message(value: Any):
    """Goal: any MessagePack value in a field is either accepted as typed or refused."""
    body = {"type": "echo", "id": 0, "parts": value}
    try:
        message, _ = CATALOGUE.decode(msgpack.packb(body), 0)
    except ProtocolError:
        return
    assert isinstance(message, Echo)
    assert all(isinstance(part, Part) for part in message.parts)


def test_message_wrong_number_of_fds_is_refused():
    """Goal: a message says how many descriptors it carries, and another number is an error."""
    payload = CATALOGUE.encode(fault_of(UnderstudyError("a.b", "c", d=(1, 2))))
    message, _ = CATALOGUE.decode(payload, 0)
    assert message == FaultMsg("a.b", "c", {"d": [1, 2]})
    with pytest.raises(ProtocolError, match=r"wire\.fd_count"):
        CATALOGUE.decode(payload, 1)


def test_catalogue_refuses_a_message_that_cannot_be_decoded():
    """Goal: a mistake in a message is found when the catalogue is made, not on the wire."""

    class Reserved(Message, frozen=True, tag="reserved"):
        id: int

    class Duplicate(Message, frozen=True, tag="hello"):
        pass

    class Ambiguous(Message, frozen=True, tag="ambiguous"):
        items: list[int] | tuple[str, ...]

    for broken in (Reserved, Duplicate, Ambiguous):
        with pytest.raises(TypeError):
            Catalogue(broken)
    with pytest.raises(TypeError):
        Catalogue().encode(Duplicate())


class Mood(StrEnum):
    CALM = "calm"


class Name(str):
    pass


def test_details_of_an_error_may_be_subclasses_of_plain_types():
    """Goal: an error can be sent although a library put subclasses of plain types into it; any
    other type is a bug."""
    error = UnderstudyError(
        "a.b", "c", mood=Mood.CALM, name=Name("n"), view=MappingProxyType({"a": (1,)})
    )
    message, _ = CATALOGUE.decode(CATALOGUE.encode(fault_of(error)), 0)
    assert message == FaultMsg("a.b", "c", {"mood": "calm", "name": "n", "view": {"a": [1]}})
    with pytest.raises(TypeError, match="object cannot travel"):
        fault_of(UnderstudyError("a.b", "c", thing=object()))


def test_name_that_is_not_utf8_is_shown_in_a_message():
    """Goal: the name of a file may be any bytes, and does not end who reports it. Method: encode
    one as Python holds it, in each kind of field; decode."""
    name = os.fsdecode(b"odd-\xff")
    message = Echo(name, parts=(Part(name, 1),), extra={name: 1})
    shown = r"odd-\xff"
    assert CATALOGUE.decode(CATALOGUE.encode(message, 0), 0)[0] == Echo(
        shown, parts=(Part(shown, 1),), extra={shown: 1}
    )
