"""Cuts a marked stream behind the hop's comments. What is in the events is not its business.

The surprising thing: a dying engine may write an error event that no comment follows, and keep its
connection. Such an event is a group of its own here: the core knows what it means.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from gateway.core.events import BreakCause
from plumbing.gateway_protocol import END, GROUP_MARK, HANDED_OVER, read_group_end

# The events of one output of an engine, at most: those of a long prompt's logprobs are some MiB.
GROUP_BYTES_MAX = 16 << 20

_MARK_IN_LINE = b"\n" + GROUP_MARK
# How engines report their own end within a stream: OpenAI's form and Anthropic's.
_ERRORS = (b'data: {"error"', b"event: error")
_NEWLINE = ord("\n")
_ONE_TOKEN = b"|1\n\n\r\n"  # ends a chunk with one group of one token
_TOKEN_DIGITS_MAX = 9  # so that it is less than 32 bits; larger ones are parsed

_ONE_TOKEN_COMMENT = re.compile(rb"%b(\d{1,19})\|1\n\n" % re.escape(GROUP_MARK))

# The size of a chunk as it is nearly always written, by the length of the chunk with its framing.
_SIZES = {
    len(line) + size + 2: line
    for size, line in ((each, b"%x\r\n" % each) for each in range(1, 4096))
}

# Whole events, and the tokens and chunks that they were made of.
MarkedGroup: TypeAlias = "tuple[bytes, list[int], list[int]]"


def whole_group(data: bytes) -> tuple[bytes, int] | None:
    """The events and the token of `data` as it is nearly always: one chunk of HTTP with one group
    of one token, and no more.

    Behind a whole chunk and a whole group it need not be parsed then. None: parse it. Searches from
    the end take a third of those from the beginning.
    """
    size_line = _SIZES.get(len(data))
    end = data.rfind(_MARK_IN_LINE)
    token = data[end + len(_MARK_IN_LINE) : -len(_ONE_TOKEN)]
    if (
        size_line is None
        or end < 0
        or not data.startswith(size_line)
        or not data.endswith(_ONE_TOKEN)
        or not token.isdigit()
        or len(token) > _TOKEN_DIGITS_MAX
        or data.rfind(_MARK_IN_LINE, 0, end + 1) >= 0  # another group, or one without events
    ):
        return None
    return data[len(size_line) : end + 1], int(token)


def _groups_of_one_token(data: bytes) -> tuple[list[MarkedGroup], int]:
    """The groups at the beginning of `data`, and the offset behind them, if all comments in it are
    of one token, as they nearly always are: at a third of the time."""
    parts = _ONE_TOKEN_COMMENT.split(data)
    events, tokens = parts[:-1:2], parts[1::2]
    has_others = len(tokens) != data.count(GROUP_MARK)
    if has_others or not all(each.endswith(b"\n") for each in events if each):
        return [], 0
    groups = [(each, [int(token)], [1]) for each, token in zip(events, tokens, strict=True)]
    return groups, len(data) - len(parts[-1])


class GroupCutter:
    """One stream. A group that is not whole waits in `_rest`, and is lost when the stream breaks.

    `last`: the events in front of `END`, once that has come. `broken`: why nothing more can follow;
    the groups before that are good.
    """

    __slots__ = ("_rest", "_seen", "broken", "last")

    def __init__(self) -> None:
        self.last: bytes | None = None
        self.broken: BreakCause | None = None
        self._rest = bytearray()
        self._seen = 0  # bytes of `_rest` in which no comment begins

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a group."""
        return not self._rest and self.broken is None and self.last is None

    def feed(self, data: bytes) -> list[MarkedGroup]:
        """The groups that are whole now."""
        if self.broken is not None or self.last is not None:
            return []
        if not self._rest:
            return self._cut(data)
        self._rest += data
        if self._rest.find(_MARK_IN_LINE, self._seen) < 0 and not self._is_over():
            self._look_at_rest()
            return []
        return self._cut(bytes(self._rest))

    def _is_over(self) -> bool:
        """Whether `_rest`, without a comment behind others, is to be looked at as a whole,
        which is not done for each of many events: it is copied then."""
        rest = self._rest
        is_begun = rest.startswith((GROUP_MARK, *_ERRORS))
        return is_begun or rest.endswith((END, HANDED_OVER))

    def _cut(self, data: bytes) -> list[MarkedGroup]:
        groups, start = _groups_of_one_token(data)
        if start:
            self._seen = 0
        while start < len(data):
            mark = start
            if not data.startswith(GROUP_MARK, start):
                mark = data.find(_MARK_IN_LINE, max(start, self._seen)) + 1
                if mark == 0:
                    break
            stop = data.find(b"\n\n", mark) + 2
            if stop == 1:
                break
            try:
                tokens, chunks = read_group_end(data[mark:stop])
            except ValueError:
                self.broken = BreakCause.GARBAGE
                return groups
            groups.append((data[start:mark], tokens, chunks))
            start, self._seen = stop, 0
        self._keep(data, start)
        if self._rest.startswith(_ERRORS) and b"\n\n" in self._rest:
            groups.append((bytes(self._rest), [], []))
            self._rest.clear()
            self._seen = 0
        return groups

    def _keep(self, data: bytes, start: int) -> None:
        """What follows the last group: nothing, the beginning of another one, or the end."""
        if start == len(data):
            self._rest.clear()
            self._seen = 0
        elif _is_last_line(END, data, start):
            self.last = data[start : -len(END)]
        elif _is_last_line(HANDED_OVER, data, start):
            self.broken = BreakCause.HANDED_OVER
        else:
            self._rest = bytearray(data[start:])
            self._look_at_rest()

    def _look_at_rest(self) -> None:
        rest = self._rest
        if len(rest) > GROUP_BYTES_MAX:
            self.broken = BreakCause.GARBAGE
        # A comment that has begun keeps its place until its end has come.
        begun = rest.find(_MARK_IN_LINE, self._seen)
        self._seen = begun if begun >= 0 else max(0, len(rest) - len(_MARK_IN_LINE))


def _is_last_line(comment: bytes, data: bytes, start: int) -> bool:
    begin = len(data) - len(comment)
    is_line = begin == start or (begin > start and data[begin - 1] == _NEWLINE)
    return is_line and data.endswith(comment)
