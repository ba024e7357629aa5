"""The check of a replay: where the client's part of it ends, and that it is what the client has.

The engine plays a resumed answer from its first event, and nothing of that is sent until as many
tokens were played as the journal has. Then the joined content must be equal to what was delivered,
and everything behind that point is new. Events that no token caused may stand behind the last
delivered token, delivered or not, alone or in front of the next token's. So from the group that
reaches the journal's end on, the cut is made between events: at the last place at which what was
played is what was delivered.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from gateway.core.joined import Joined, events_in
from gateway.core.rewriting import Rewriter

READ_BYTES = 16 * 1024  # at once, as of a journal


class ReplayMismatch(Exception):
    """The replay is not what was delivered: the stream must not go on with it."""


class Rest(NamedTuple):
    """The part of a group that is new to the client."""

    events: bytes
    has_new_tokens: bool  # the group's tokens are behind the joint, not in front of it


class Replay:
    """One replay; `delivered` is what the client has, and `journal` its tokens."""

    __slots__ = (
        *("_delivered", "_journal", "_played", "_seen", "_sequence"),
        *("_unread", "_unread_bytes"),
    )

    def __init__(self, delivered: Joined, journal: array[int]) -> None:
        self._delivered = delivered
        self._journal = journal
        self._played = Joined()
        self._unread: list[bytes] = []  # events that are yet to be added to it, many at once
        self._unread_bytes = 0
        self._seen = 0
        self._sequence: int | None = None  # of the last event in front of the joint

    def feed(self, events: bytes, tokens: list[int], is_last: bool) -> Rest | None:
        """What of this group is new to the client; None while the replay has not come that far.

        Raises:
            ReplayMismatch: it never will.
        """
        is_beyond = bool(tokens) and self._seen == len(self._journal)
        if not is_beyond:
            self._check(tokens)
        if self._seen < len(self._journal):
            self._unread.append(events)
            self._unread_bytes += len(events)
            if self._unread_bytes >= READ_BYTES:
                self._read()
            if is_last:
                raise ReplayMismatch(f"it ended after {self._seen} of {len(self._journal)} tokens")
            return None
        self._read()
        rest = self._cut(events)
        if rest is None and (is_last or is_beyond):
            raise ReplayMismatch("its content is not what was delivered")
        return None if rest is None else Rest(rest, is_beyond)

    def rewriter(self) -> Rewriter | None:
        """For the events behind the joint."""
        self._played.sequence = self._sequence
        return Rewriter.between(self._delivered, self._played)

    def _check(self, tokens: list[int]) -> None:
        """These must be the journal's next tokens, and not reach beyond its end. At once: an engine
        of another mind may say nothing more."""
        seen = self._seen + len(tokens)
        if self._journal[self._seen : seen].tolist() != tokens:
            what = "beyond the delivered ones" if seen > len(self._journal) else "of another answer"
            raise ReplayMismatch(f"tokens {what}, at {self._seen} of {len(self._journal)}")
        self._seen = seen

    def _read(self) -> None:
        self._played.add(b"".join(self._unread))
        self._unread.clear()
        self._unread_bytes = 0

    def _cut(self, events: bytes) -> bytes | None:
        """The events behind the last place at which all that was played is what was delivered."""
        joint = 0 if self._played.is_same(self._delivered) else -1
        self._sequence = self._played.sequence
        start = 0
        for _, end in events_in(events):
            self._played.add(events[start:end])
            start = end
            if self._played.is_same(self._delivered):
                joint, self._sequence = end, self._played.sequence
        return None if joint < 0 else events[joint:]
