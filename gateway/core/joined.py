"""What the events of a stream amount to, however the engine cut them.

An engine merges tokens into events by its own timing, so two runs of one request differ in their
events and agree in what a client joins from them: the strings of deltas, one behind the other, for
each choice and tool call; the last of every other value; and how often each event that is not a
delta came. That is what is compared here, for chat, completions, Responses and Anthropic messages
alike, without a list of their fields.

Left out is what differs between two right answers: the ids and times in `VOLATILE`, which are kept
aside because a client must go on seeing the first ones (`rewriting.py`), and `INCOMPARABLE`.

The surprising thing: usage is not compared, but the event that has nothing else is counted. A
stream may say with each event how much was used so far, and then its last value depends on how
events were merged; usage said twice at the end would be a wrong answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

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
# What is left out, as bytes. A key is found by its quotes, since those in a string are escaped.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = rb'[^"{}]*+(?:%b[^"{}]*+)*+' % _STRING
_INSIDE = _FLAT
for _ in range(4):  # deeper than log probabilities are nested
    _INSIDE = rb"%b(?:\{%b\}%b)*+" % (_FLAT, _INSIDE, _FLAT)
_LEFT_OUT = re.compile(
    rb'("(?:%b)": ?)(?:%b|\{%b\})' % ("|".join(sorted(INCOMPARABLE)).encode(), _STRING, _INSIDE)
)
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_decode = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode

Path = tuple[Any, ...]


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


class _Unknown(Exception):
    """An event of no form that is known here."""


class _Form(NamedTuple):
    """An event that adds one piece of one string and nothing else: the bytes around the piece.

    Most events of a stream differ from the one before in nothing but this piece. It is then found
    at a fifth of the cost of parsing, and in many events at once at a thirtieth, with the same
    result.
    """

    before: bytes
    behind: bytes
    path: Path

    @classmethod
    def of(cls, data: bytes, added: list[tuple[Path, str] | None]) -> _Form | None:
        if len(added) != 1 or added[0] is None:
            return None
        path, piece = added[0]
        for quoted in (msgspec.json.encode(piece), json.dumps(piece).encode()):
            for named in (b'"%b":%b', b'"%b": %b'):
                said = named % (str(path[-1]).encode(), quoted)
                start, _, behind = data.partition(said)
                # In any doubt, whether this is within a string or another value too, every event is
                # parsed.
                if behind and b"\\" not in start + behind and said not in behind:
                    return cls(start + said[: -len(quoted) + 1], b'"' + behind, path)
        return None

    def piece_of(self, data: bytes) -> str | None:
        """The piece, if `data` has this form."""
        before, behind, _ = self
        size = len(data) - len(before) - len(behind)
        if size <= 0 or not data.startswith(before) or not data.endswith(behind):
            return None
        try:
            return _decode_text(b'"%b"' % data[len(before) : len(before) + size])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def pieces_of(self, raw: bytes) -> list[str] | None:
        """The pieces of whole events, if all of them have this form."""
        before, behind, _ = self
        first, last = b"data: " + before, behind + b"\n\n"
        if len(raw) < len(first) + len(last) or not raw.startswith(first) or not raw.endswith(last):
            return None
        pieces = raw[len(first) : -len(last)].split(last + first)
        try:
            texts = _decode_texts(b'["%b"]' % b'","'.join(pieces))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return texts if len(texts) == len(pieces) and all(texts) else None


class Joined:
    """The sum of the events added so far."""

    __slots__ = ("_added", "_form", "_leaves_out", "ids", "pieces", "sequence", "values")

    def __init__(self, raw: bytes = b"") -> None:
        self.pieces: dict[Path, list[str]] = {}
        self.values: dict[Path, Any] = {}
        self.ids: dict[Path, Any] = {}
        self.sequence: int | None = None  # the last one
        self._form: _Form | None = None  # of the last event
        self._added: list[tuple[Path, str] | None] = []  # by the last event; None: no piece
        self._leaves_out = False  # it pays, as events differ in what is not compared
        self.add_all(raw)

    def add_all(self, raw: bytes) -> None:
        """More events."""
        if self._leaves_out:
            raw = _LEFT_OUT.sub(rb"\1null", raw)
        if self._form is not None:
            if (pieces := self._form.pieces_of(raw)) is not None:
                self.pieces[self._form.path].append("".join(pieces))
                return
            if not self._leaves_out and _LEFT_OUT.search(raw) is not None:
                self._leaves_out = True
                raw = _LEFT_OUT.sub(rb"\1null", raw)
        for data, _ in events_in(raw):
            self.add(data)

    def add(self, data: bytes) -> None:
        """One more event."""
        if not data:
            return
        if self._form is not None and (piece := self._form.piece_of(data)) is not None:
            self.pieces[self._form.path].append(piece)
            return
        self._added.clear()
        try:
            self._add_event(_decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _Unknown):
            self._count(("raw", data))  # `[DONE]`, or what we know nothing of
        self._form = _Form.of(data, self._added)

    def is_same(self, other: Joined) -> bool:
        """Whether a client that joins events would have the same from both."""
        return self.values == other.values and self._strings() == other._strings()

    def _add_event(self, event: Any) -> None:
        if not isinstance(event, dict):
            raise _Unknown
        if isinstance(event.get("choices"), list):
            self._add_choices(event)
        elif isinstance(event.get("type"), str):
            self._add_typed(event)
        else:
            self._count(("other",))
            self._take(event, ("other",), is_delta=False)

    def _strings(self) -> dict[Path, str]:
        for path, pieces in self.pieces.items():
            if len(pieces) > 1:
                self.pieces[path] = ["".join(pieces)]
        return {path: pieces[0] for path, pieces in self.pieces.items()}

    def _count(self, path: Path) -> None:
        self._added.append(None)
        self.values[path] = self.values.get(path, 0) + 1

    def _add_choices(self, event: dict[str, Any]) -> None:
        """A chunk of chat or completions."""
        choices = event.pop("choices")
        if not choices:
            self._count(("without choices", "usage" in event))
        self._take(event, (), is_delta=False)
        self._take(choices, ("choices",), is_delta=True)

    def _add_typed(self, event: dict[str, Any]) -> None:
        """An event of the Responses API or of Anthropic messages."""
        kind = event["type"]
        if kind == "ping":
            return
        sequence = event.pop(SEQUENCE, None)
        if isinstance(sequence, int):
            self.sequence = sequence
        is_delta = DELTA_TYPE.search(kind) is not None
        places = ("output_index", "content_index", "summary_index", "index")
        path = (kind, *(_index(event.get(place), -1) for place in places))
        if not is_delta:
            self._count((*path, "times"))
        self._take(event, path, is_delta)

    def _take(self, value: Any, path: Path, is_delta: bool) -> None:
        """Everything below `value`, which is at `path`."""
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in INCOMPARABLE or inner is None:
                    continue
                if key in VOLATILE and isinstance(inner, (str, int, float)):
                    self.ids[(*path, key)] = inner
                elif isinstance(inner, str) and is_delta and key not in WHOLE:
                    if inner:
                        self._added.append(((*path, key), inner))
                        self.pieces.setdefault((*path, key), []).append(inner)
                else:
                    self._take(inner, (*path, key), is_delta)
        elif isinstance(value, list):
            self._take_list(value, path, is_delta)
        else:
            self.values[path] = value

    def _take_list(self, items: list[Any], path: Path, is_delta: bool) -> None:
        if not is_delta:
            self.values[(*path, "length")] = len(items)
        for position, item in enumerate(items):
            if isinstance(item, dict):
                self._take(item, (*path, _index(item.get("index"), position)), is_delta)
            elif is_delta:  # such as token ids: pieces of a list
                self._added.append(None)
                self.values.setdefault(path, []).append(item)
            else:
                self._take(item, (*path, position), is_delta)


def _index(value: Any, otherwise: int) -> int:
    """The place that an engine gives, or our own count where it gives none."""
    return value if isinstance(value, int) else otherwise
