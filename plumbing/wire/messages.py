"""Typed messages: frozen structs on this side, one strict MessagePack map each on the wire.

A catalogue lists the messages of one protocol. An unknown type, an unknown or missing field, a
wrong type and a value out of range are the peer's fault, and the error names the field. Nothing is
coerced: `true` is not an integer and `1` is not a string.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from operator import or_
from typing import Annotated, Any, ClassVar

import msgspec

from plumbing.errors import DISK, ProtocolError, RemoteError, UnderstudyError, is_disk_fault
from plumbing.wire.limits import FRAME_BYTES_MAX

RequestId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# What is wrong with a payload, by the place that msgspec names; anywhere else it is a field.
PLACES = {"`$[0]`": "wire.bad_request_id", "`$[1].type`": "wire.unknown_type"}

# An error is one sentence and a few facts. Both are cut to these sizes because they may quote what
# a peer sent, and an error frame that is too large to send would be an error in sending an error.
FAULT_MESSAGE_CHARS_MAX = 4096
FAULT_DETAILS_BYTES_MAX = 64 * 1024

REASON_CHARS_MAX = 260  # of what an error quotes of a peer's message, however large that is


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of every message; `class Beat(Message, frozen=True, tag="beat")` travels as `beat`.

    `FDS`: how many descriptors, at least and at most, travel with it.
    """

    FDS: ClassVar[tuple[int, int]] = (0, 0)

    @property
    def TYPE(self) -> str:
        """The message's name on the wire."""
        return type_of(type(self))


class FaultMsg(Message, frozen=True, tag="error"):
    """The error frame: a stable dotted code, a sentence, details."""

    code: str
    message: str
    details: dict[str, Any]

    def to_error(self) -> RemoteError:
        return RemoteError(self.code, self.message, **self.details)


def type_of(cls: type[Message]) -> str:
    """The name on the wire of a class of messages."""
    return str(cls.__struct_config__.tag)


def messages_in(module: Mapping[str, Any]) -> list[type[Message]]:
    """Every message among a module's `globals()`, its own and the imported ones."""
    classes = [each for each in module.values() if isinstance(each, type)]
    return [each for each in classes if issubclass(each, Message) and each is not Message]


class Catalogue:
    """The messages of one protocol and the size its frames may have."""

    def __init__(self, *classes: type[Message], frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        known: tuple[type[Message], ...] = (FaultMsg, *classes)
        self.classes = {type_of(cls): cls for cls in known}
        pair: Any = tuple
        self._decoder = msgspec.msgpack.Decoder(pair[RequestId, functools.reduce(or_, known)])

    def encode(self, message: Message, request_id: int = 0) -> bytes:
        """The payload of `message`: a MessagePack array of its request id and one map."""
        if self.classes.get(message.TYPE) is not type(message):
            raise TypeError(f"{type(message).__name__} is not in this catalogue")
        return _pack((request_id, message))

    def decode(self, payload: bytes, fd_count: int) -> tuple[Message, int]:
        """The message in `payload` and its request id.

        Raises:
            ProtocolError: a code under `wire.`.
        """
        try:
            request_id, message = self._decoder.decode(payload)
        except msgspec.ValidationError as error:
            # "Expected `str`, got `int` - at `$[1].lock`"; it may quote the peer's field names.
            reason = str(error)
            place = reason.rpartition(" - at ")[2]
            code = PLACES.get(place, "wire.bad_payload" if place == reason else "wire.bad_field")
            why = f"the payload is not a message: {reason[:REASON_CHARS_MAX]}"
            raise ProtocolError(code, why) from error
        except Exception as error:  # also RecursionError: nested too deeply
            why = f"the payload is not MessagePack: {error}"
            raise ProtocolError("wire.bad_payload", why) from error
        least, most = message.FDS
        if not least <= fd_count <= most:
            raise ProtocolError(
                "wire.fd_count",
                f"{message.TYPE} carries {least} to {most} descriptors, {fd_count} arrived",
            )
        return message, request_id


def fault_of(error: UnderstudyError) -> FaultMsg:
    """The error frame for `error`, without the details that are too large for it, and whether a
    disk has caused it."""
    details, room = {}, FAULT_DETAILS_BYTES_MAX
    known = {DISK: True, **error.details} if is_disk_fault(error) else error.details
    for name, value in known.items():
        size = len(_pack(value))
        if size <= room:
            details[name] = value
            room -= size
    return FaultMsg(error.code, error.message[:FAULT_MESSAGE_CHARS_MAX], details)


def _pack(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value, enc_hook=_builtin)
    except UnicodeEncodeError:  # a name of a file that is not UTF-8
        plain = msgspec.to_builtins(value, enc_hook=_builtin, builtin_types=(bytes,))
        return msgspec.msgpack.encode(_printable(plain))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list | tuple) else value


def _builtin(value: Any) -> Any:
    """The plain form of what msgspec does not encode by itself: subclasses, views of maps."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot travel")
