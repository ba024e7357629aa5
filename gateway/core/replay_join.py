"""What the events of a stream amount to, however the engine cut them.

An engine merges tokens into events by its own timing, so two runs of one request differ in their
events and agree in what a client joins from them: the strings of deltas, one behind the other, for
each choice and tool call; the last of every other value; and how often each event that is not a
delta came. These are compared. Of strings only a digest is kept. Usage is not compared, because
with running totals its last value depends on how events were merged; but the event that holds
nothing else is counted, since usage said twice at the end would be a wrong answer.

A part is what an event says at one place, and its kind is what becomes of it in the sum, for chat,
completions, Responses and Anthropic messages alike, without a list of their fields. Left out is
what differs between two right answers: the ids and times in `VOLATILE`, which `replay.py` keeps for
the client, and `INCOMPARABLE`. An event is read one level at a time, and msgspec skips what no
level needs: log probabilities take most of the bytes of an event that has them, and nothing reads
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

DIGEST_BYTES = 16
TRIED_BYTES_MAX = 32 * 1024
_PATH_BYTES = 300  # what a path takes with a short value
_DIGEST_BYTES = 800  # and with a digest that goes on
_EVENT_END = re.compile(rb"\r?\n\r?\n")


def events_in(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """The data of each event and the offset behind it. Comments have no data: b""."""
    has_returns = b"\r" in raw
    start = 0
    while start < len(raw):
        if has_returns:
            found = _EVENT_END.search(raw, start)
            end, after = (len(raw), len(raw)) if found is None else found.span()
        else:  # the same, three times as fast
            end = raw.find(b"\n\n", start)
            end, after = (len(raw), len(raw)) if end < 0 else (end, end + 2)
        yield _data_of(raw[start:end]), after
        start = after


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
        return event[6:]
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


class Joined:
    """The sum of the events added so far."""

    def __init__(self, raw: bytes = b"") -> None:
        self.values: dict[Path, Any] = {}
        self.ids: dict[Path, Any] = {}
        self.sequence: int | None = None  # the last one
        self._digests: dict[Path, blake2b] = {}
        self._form: EventForm | None = None  # of the last event
        self.add(raw)

    @property
    def is_empty(self) -> bool:
        return not (self.values or self.ids or self._digests)

    @property
    def held_bytes(self) -> int:
        """The memory that it takes, at most."""
        paths = len(self.values) + len(self.ids)
        form = 0 if self._form is None else len(self._form.first) + len(self._form.last)
        return _PATH_BYTES * paths + _DIGEST_BYTES * len(self._digests) + 2 * form

    def add(self, raw: bytes) -> None:
        """More whole events."""
        if not raw or self._add_alike(raw):
            return
        start = 0
        for data, end in events_in(raw):
            if data and not self._add_alike(raw[start:end]):
                self._add_event(raw[start:end], data)
                # The others are probably alike. In a long text each new form would search all.
                if len(raw) - end <= TRIED_BYTES_MAX and self._add_alike(raw[end:]):
                    return
            start = end

    def is_same(self, other: Joined) -> bool:
        """Whether a client that joins events would have the same from both."""
        return self.values == other.values and self._strings() == other._strings()

    def _strings(self) -> dict[Path, bytes]:
        return {path: digest.digest() for path, digest in self._digests.items()}

    def _add_alike(self, raw: bytes) -> bool:
        """Add events that have the form of the last one, if all of them have."""
        parts = None if self._form is None else self._form.read(raw)
        if parts is not None:
            self._take(parts)
        return parts is not None

    def _add_event(self, event: bytes, data: bytes) -> None:
        try:
            parts = parts_of(data)
        except UnknownEvent:  # `[DONE]`, or what we know nothing of
            self._join(("raw",), data + b"\n\n")
            self._form = None
            return
        self._take(parts)
        self._form = None if b"\n" in data else EventForm.of(event, parts)

    def _take(self, parts: list[EventPart]) -> None:
        for kind, path, value, _ in parts:
            if kind is PartKind.TEXT:
                self._join(path, value)
            elif kind is PartKind.LAST:
                self.values[path] = value
            elif kind is PartKind.ID:
                self.ids[path] = value
            elif kind is PartKind.TIMES:
                self._count(path)
            elif kind is PartKind.NUMBER:
                self.sequence = value

    def _join(self, path: Path, piece: bytes) -> None:
        if piece:
            if path not in self._digests:
                self._digests[path] = blake2b(digest_size=DIGEST_BYTES)
            self._digests[path].update(piece)

    def _count(self, path: Path) -> None:
        self.values[path] = self.values.get(path, 0) + 1


VOLATILE = frozenset(
    ("id", "item_id", "call_id", "response_id", "created", "created_at", "completed_at")
)
# Replayed log probabilities are not computed again; the others tell of an engine, not an answer.
INCOMPARABLE = frozenset(
    (
        *("logprobs", "usage", "system_fingerprint", "metrics", "kv_transfer_params"),
        *("obfuscation", "signature"),
    )
)
# Strings that are said whole, however often; all others in a delta are pieces.
WHOLE = frozenset(
    ("role", "name", "type", "object", "model", "finish_reason", "stop_reason", "stop_sequence")
)
DELTA_TYPE = re.compile(r"\.delta$|^content_block_delta$")
SEQUENCE = "sequence_number"
VALUE_CHARS_MAX = 64  # of a longer one only its digest is kept
_members = msgspec.json.Decoder(dict[str, Raw]).decode
_items = msgspec.json.Decoder(list[Raw]).decode
_texts = msgspec.json.Decoder(list[str]).decode
_numbers = msgspec.json.Decoder(list[int]).decode
_text = msgspec.json.Decoder(str).decode
_value = msgspec.json.Decoder().decode

Path = tuple[Any, ...]


class UnknownEvent(Exception):
    """An event of no form that is known here."""


class PartKind(Enum):
    """What becomes of a part in the sum of many events."""

    TEXT = auto()  # a string of a delta: a piece, joined to those before
    LAST = auto()  # any other value: the last one counts
    ID = auto()  # an id or a time
    TIMES = auto()  # events of this kind are counted
    NUMBER = auto()  # of the event in its stream
    LEFT_OUT = auto()  # not compared


class EventPart(NamedTuple):
    """`value`: UTF-8 of a text. `written`: the JSON behind the last key of `path`, of parts that
    may differ between events of one form; empty where the form must not be used."""

    kind: PartKind
    path: Path
    value: Any = None
    written: bytes = b""


def parts_of(data: bytes) -> list[EventPart]:
    """The parts of one event.

    Raises:
        UnknownEvent: it is not JSON, or not an object.
    """
    parts: list[EventPart] = []
    try:
        event = _members(data)
        choices, kind = bytes(event.get("choices", b"")), bytes(event.get("type", b""))
        if choices.startswith(b"["):
            del event["choices"]
            items = _items(choices)
            if not all(bytes(each).startswith(b"{") for each in items):
                raise UnknownEvent
            if not items:
                parts.append(EventPart(PartKind.TIMES, ("without choices", "usage" in event)))
            _take_members(event, (), parts, is_delta=False)
            _take_list(choices, ("choices",), parts, is_delta=True)
        elif kind.startswith(b'"'):
            _take_typed(event, _text(kind), parts)
        else:
            parts.append(EventPart(PartKind.TIMES, ("other",)))
            _take_members(event, ("other",), parts, is_delta=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnknownEvent from error
    return parts


def _take_typed(event: dict[str, Raw], kind: str, parts: list[EventPart]) -> None:
    """An event of the Responses API or of Anthropic messages."""
    if kind == "ping":
        return
    number = event.pop(SEQUENCE, None)
    if number is not None and isinstance(found := _value(number), int):
        parts.append(EventPart(PartKind.NUMBER, (SEQUENCE,), found, bytes(number)))
    is_delta = DELTA_TYPE.search(kind) is not None
    places = ("output_index", "content_index", "summary_index", "index")
    path = (kind, *(_index(event.get(place), -1) for place in places))
    if not is_delta:
        parts.append(EventPart(PartKind.TIMES, (*path, "times")))
    _take_members(event, path, parts, is_delta=is_delta)


def _take_members(
    members: dict[str, Raw], path: Path, parts: list[EventPart], *, is_delta: bool
) -> None:
    for key, raw in members.items():
        at, written = (*path, key), bytes(raw)
        if written == b"null":
            continue
        if key in INCOMPARABLE:
            parts.append(EventPart(PartKind.LEFT_OUT, at, None, written))
        elif written.startswith((b"{", b"[")):
            _take(written, at, parts, is_delta=is_delta)
        elif key in VOLATILE:
            parts.append(EventPart(PartKind.ID, at, _value(written)))
        elif written.startswith(b'"') and is_delta and key not in WHOLE:
            parts.append(EventPart(PartKind.TEXT, at, _text(written).encode(), written))
        else:
            parts.append(EventPart(PartKind.LAST, at, _short(_value(written))))


def _take(written: bytes, path: Path, parts: list[EventPart], *, is_delta: bool) -> None:
    if written.startswith(b"{"):
        _take_members(_members(written), path, parts, is_delta=is_delta)
    elif written.startswith(b"["):
        _take_list(written, path, parts, is_delta=is_delta)
    else:
        parts.append(EventPart(PartKind.LAST, path, _short(_value(written))))


def _take_list(written: bytes, path: Path, parts: list[EventPart], *, is_delta: bool) -> None:
    items = [bytes(each) for each in _items(written)]
    if not is_delta:
        parts.append(EventPart(PartKind.LAST, (*path, "length"), len(items)))
    elif not all(each.startswith(b"{") for each in items):
        parts.append(EventPart(PartKind.LEFT_OUT, path, None, written))  # token ids: the journal's
        return
    for position, item in enumerate(items):
        if item.startswith(b"{"):
            members = _members(item)
            at = (*path, _index(members.get("index"), position))
            _take_members(members, at, parts, is_delta=is_delta)
        else:
            _take(item, (*path, position), parts, is_delta=False)


def _index(raw: Raw | None, otherwise: int) -> int:
    """The place that an engine gives, or our own count where it gives none."""
    value = None if raw is None else _value(raw)
    return value if isinstance(value, int) else otherwise


def _short(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > VALUE_CHARS_MAX
    return blake2b(value.encode()).digest() if is_long else value


# ---- the form

_Column = Sequence[bytes]


def _read_texts(column: _Column) -> bytes | None:
    written = b'","'.join(column)
    if b'\\","' in written or written.endswith(b"\\"):  # the quote between two may be escaped
        return "".join([_text(b'"%b"' % each) for each in column]).encode()
    texts = _texts(b'["%b"]' % written)
    return "".join(texts).encode() if len(texts) == len(column) else None


def _read_number(column: _Column) -> int | None:
    written = b",".join(column)
    numbers = _numbers(b"[%b]" % written)
    return numbers[-1] if len(numbers) == len(column) else None


def _skip(column: _Column) -> bytes | None:
    written = b",".join(column)
    if b"\n" in written or b"\r" in written:
        return None
    return b"" if len(_items(b"[%b]" % written)) == len(column) else None


# Of the parts that may differ between events of one form: what all of them amount to; None if one
# of them is not of this kind.
_READERS: dict[PartKind, Callable[[_Column], bytes | int | None]] = {
    PartKind.TEXT: _read_texts,
    PartKind.NUMBER: _read_number,
    PartKind.LEFT_OUT: _skip,
}
_SAME = (PartKind.LAST, PartKind.ID)


class EventForm(NamedTuple):
    """Events that differ in the parts at `holes` and nothing else: the bytes around these.

    Most events of a stream have the form of the one before. Their parts are then found at a tenth
    of the cost of parsing, many events at once, with the same result.
    """

    first: bytes
    between: tuple[bytes, ...]
    last: bytes
    holes: tuple[tuple[PartKind, Path], ...]

    @classmethod
    def of(cls, event: bytes, parts: Sequence[EventPart]) -> EventForm | None:
        """The form of a whole event; None if what differs cannot be told from what does not."""
        spans = []
        for part in parts:
            if part.kind in _SAME:
                continue
            key = str(part.path[-1]).encode()
            said = [b'"%b":%b%b' % (key, space, part.written) for space in (b"", b" ")]
            counts = [event.count(each) for each in said]
            if not part.written or sum(counts) != 1:
                return None
            found = said[counts.index(1)]
            end = event.index(found) + len(found)
            quote = part.kind is PartKind.TEXT
            spans.append((end - len(part.written) + quote, end - quote, part))
        if not spans or not event.endswith((b"\n\n", b"\r\n\r\n")):
            return None
        spans.sort(key=lambda span: span[0])
        starts, ends, holes = zip(*spans, strict=True)
        between = tuple(event[end:start] for end, start in zip(ends[:-1], starts[1:], strict=True))
        at = tuple((hole.kind, hole.path) for hole in holes)
        return cls(event[: starts[0]], between, event[ends[-1] :], at)

    def read(self, raw: bytes) -> list[EventPart] | None:
        """What whole events amount to; None if not all of them have this form."""
        first, between, last, holes = self
        size = len(raw) - len(first) - len(last)
        if size < 0 or not raw.startswith(first) or not raw.endswith(last):
            return None
        # From the end, as each search from the beginning prepares for a long text.
        rows: _Column = raw[len(first) : len(first) + size].rsplit(last + first)
        parts = []
        for place, (kind, path) in enumerate(holes):
            column = rows
            if place < len(between):
                literal = between[place]
                column, found, rows = zip(*(row.partition(literal) for row in rows), strict=True)
                if b"" in found:
                    return None
            try:
                value = _READERS[kind](column)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
            if value is None:
                return None
            parts.append(EventPart(kind, path, value))
        return parts
