"""What the events of a stream amount to, however the engine cut them.

An engine merges tokens into events by its own timing, so two runs of one request differ in their
events and agree in what a client joins from them: the strings of deltas, one behind the other, for
each choice and tool call; the last of every other value; and how often each event that is not a
delta came. That is what is compared here. Of strings only a digest is kept, so that the sum of a
long answer is as small as that of a short one.

The surprising thing: usage is not compared, but the event that has nothing else is counted. A
stream may say with each event how much was used so far, and then its last value depends on how
events were merged; usage said twice at the end would be a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from gateway.core.event_parts import EventForm, EventPart, PartKind, Path, UnknownEvent, parts_of

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

    __slots__ = ("_digests", "_form", "ids", "sequence", "values")

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
            if kind in (PartKind.TEXT, PartKind.ITEMS):
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
