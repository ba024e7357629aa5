"""Typed messages: frozen dataclasses on this side, one strict MessagePack map on the wire.

A catalogue lists the messages that one protocol knows and compiles a checker for each. An unknown
type, an unknown or missing field, a wrong type or a value out of range is the peer's fault, and
the error names the field. Nothing is coerced: `true` is no integer and `1` is no string.
"""

from __future__ import annotations

import dataclasses
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack

from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.wire.limits import FAULT_DETAILS_BYTES_MAX, FAULT_MESSAGE_CHARS_MAX, FRAME_BYTES_MAX

Checker = Callable[[Any, str], Any]

REQUEST_ID_MAX = 2**63 - 1

# What an error shows of a value that a peer sent: enough to recognise it, however large it is.
SHOWN_CHARS_MAX = 60
PATH_CHARS_MAX = 200

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = SHOWN_CHARS_MAX


@dataclass(frozen=True, slots=True)
class Length:
    """Bounds of a string's, a byte string's or a collection's length."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, both included."""

    least: int
    most: int


class Message:
    """Base of every message: a frozen dataclass whose fields are its body."""

    __slots__ = ()
    TYPE: ClassVar[str]
    FDS: ClassVar[tuple[int, int]] = (0, 0)


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Asks who is there. Every server answers it, in every state."""

    TYPE: ClassVar[str] = "hello"


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    TYPE: ClassVar[str] = "welcome"
    service: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class Fault(Message):
    """The error frame: a stable dotted code, a sentence, details."""

    TYPE: ClassVar[str] = "error"
    code: str
    message: str
    details: dict[str, Any]


class Catalogue:
    """The messages of one protocol and the size its frames may have."""

    def __init__(self, *classes: type[Message], frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._classes: dict[str, type[Message]] = {}
        self._fields: dict[str, tuple[str, ...]] = {}
        self._checkers: dict[str, Checker] = {}
        known: tuple[type[Message], ...] = (Hello, Welcome, Fault, *classes)
        for cls in known:
            if cls.TYPE in self._classes:
                raise TypeError(f"two messages are called {cls.TYPE!r}")
            self._classes[cls.TYPE] = cls
            fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # each is a dataclass
            self._fields[cls.TYPE] = tuple(field.name for field in fields)
            self._checkers[cls.TYPE] = _dataclass_checker(cls)

    def encode(self, message: Message, request_id: int = 0) -> bytes:
        """The payload of `message`: one MessagePack map with `type`, `id` and the fields."""
        if self._classes.get(message.TYPE) is not type(message):
            raise TypeError(f"{type(message).__name__} is not in this catalogue")
        body = {"type": message.TYPE, "id": request_id}
        for name in self._fields[message.TYPE]:
            body[name] = plain(getattr(message, name))
        packed: bytes = msgpack.packb(body)
        return packed

    def decode(self, payload: bytes, fd_count: int) -> tuple[Message, int]:
        """The message in `payload` and its request id.

        Raises:
            ProtocolError: a code under `wire.`; its details carry the request id if it was read.
        """
        try:
            body = msgpack.unpackb(payload, strict_map_key=True)
        except Exception as error:  # msgpack raises a dozen unrelated classes on bad input
            raise ProtocolError(
                "wire.bad_payload", f"the payload is not one MessagePack map: {error}"
            ) from error
        if not isinstance(body, dict):
            raise ProtocolError("wire.bad_payload", "the payload is not a MessagePack map")
        kind, request_id = body.pop("type", None), body.pop("id", None)
        if type(request_id) is not int or not 0 <= request_id <= REQUEST_ID_MAX:
            raise ProtocolError("wire.bad_request_id", f"not a request id: {shown(request_id)}")
        if not isinstance(kind, str) or kind not in self._classes:
            raise ProtocolError(
                "wire.unknown_type",
                f"there is no message {shown(kind)} here;"
                f" known are {', '.join(sorted(self._classes))}",
                request_id=request_id,
            )
        try:
            message: Message = self._checkers[kind](body, kind)
        except ProtocolError as error:
            error.details["request_id"] = request_id
            raise
        least, most = message.FDS
        if not least <= fd_count <= most:
            raise ProtocolError(
                "wire.fd_count",
                f"{kind} carries {least} to {most} descriptors, {fd_count} came",
                request_id=request_id,
            )
        return message, request_id


def fault_of(error: UnderstudyError) -> Fault:
    """The error frame that says what `error` says."""
    details, room = {}, FAULT_DETAILS_BYTES_MAX
    for name, value in error.details.items():
        packed = msgpack.packb(plain(value))
        if len(packed) <= room:
            details[name] = plain(value)
            room -= len(packed)
    return Fault(error.code, error.message[:FAULT_MESSAGE_CHARS_MAX], details)


def shown(value: Any) -> str:
    """`value` as an error shows it: its beginning, at a cost that does not grow with it."""
    if isinstance(value, str | bytes):
        value = value[:SHOWN_CHARS_MAX]
    return _repr.repr(value)[:SHOWN_CHARS_MAX]


_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


def plain(value: Any) -> Any:
    """`value` as MessagePack and JSON know it: dataclasses become maps, tuples become lists."""
    if type(value) in _PLAIN:  # nearly all: what is asked first is what a message costs
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value  # a state that is a StrEnum travels as its text


def _bad(path: str, wanted: str, value: Any) -> ProtocolError:
    path = path[:PATH_CHARS_MAX]  # it may contain a peer's own words
    return ProtocolError(
        "wire.bad_field", f"{path} must be {wanted}, not {shown(value)}", field=path
    )


def _dataclass_checker(cls: type[Any]) -> Checker:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    checkers = {field.name: _checker(hints[field.name]) for field in fields}
    if {"type", "id"} & set(checkers) and issubclass(cls, Message):
        raise TypeError(f"{cls.__name__}: the field names type and id belong to the frame")
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def check(value: Any, path: str) -> Any:
        if type(value) is not dict:
            raise _bad(path, "a map", value)
        for name in value:
            if name not in checkers:
                raise ProtocolError(
                    "wire.unknown_field",
                    f"{path[:PATH_CHARS_MAX]} has no field {shown(name)}",
                    field=str(name[:PATH_CHARS_MAX]),
                )
        if missing := required - value.keys():
            name = min(missing)
            raise ProtocolError(
                "wire.missing_field", f"{path} lacks its field {name!r}", field=name
            )
        return cls(**{name: checkers[name](item, f"{path}.{name}") for name, item in value.items()})

    return check


def _checker(hint: Any) -> Checker:
    """Compile a type hint into a function that checks a value and names the field it is in."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        base, *bounds = typing.get_args(hint)
        return _bounded(_checker(base), bounds)
    if origin in (types.UnionType, typing.Union):
        return _optional(hint)
    if origin is tuple:
        item, *rest = typing.get_args(hint)
        if rest != [Ellipsis]:
            raise TypeError(f"only tuple[X, ...] travels, not {hint}")
        return _sequence(_checker(item))
    if origin is dict:
        key, item = typing.get_args(hint)
        if key is not str:
            raise TypeError(f"only dict[str, X] travels, not {hint}")
        return _mapping(_checker(item))
    if hint is Any:
        return lambda value, path: value
    if hint is float:
        return _number
    if hint in (int, bool, str, bytes):
        return _exactly(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_checker(hint)
    raise TypeError(f"a field of type {hint} cannot travel")


def _exactly(kind: type) -> Checker:
    def check(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise _bad(path, f"a value of type {kind.__name__}", value)
        return value

    return check


def _number(value: Any, path: str) -> float:
    if type(value) not in (int, float):
        raise _bad(path, "a number", value)
    return float(value)


def _optional(hint: Any) -> Checker:
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if len(members) != 1:
        raise TypeError(f"only X | None travels, not {hint}")
    inner = _checker(members[0])
    return lambda value, path: None if value is None else inner(value, path)


def _sequence(inner: Checker) -> Checker:
    def check(value: Any, path: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _bad(path, "a list", value)
        return tuple([inner(item, f"{path}[{index}]") for index, item in enumerate(value)])

    return check


def _mapping(inner: Checker) -> Checker:
    def check(value: Any, path: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise _bad(path, "a map", value)
        for key in value:
            if type(key) is not str:
                raise _bad(path, "a map with string keys", key)
        return {key: inner(item, f"{path}.{key}") for key, item in value.items()}

    return check


def _bounded(inner: Checker, bounds: list[Any]) -> Checker:
    def check(value: Any, path: str) -> Any:
        checked = inner(value, path)
        for bound in bounds:
            if isinstance(bound, Length) and not bound.least <= len(checked) <= bound.most:
                raise _bad(path, f"{bound.least} to {bound.most} long", value)
            if isinstance(bound, Range) and not bound.least <= checked <= bound.most:
                raise _bad(path, f"between {bound.least} and {bound.most}", value)
        return checked

    return check
