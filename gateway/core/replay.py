"""The journal of a stream; the check of a replay: where the client's part of it ends, and that it
is what the client has; and the first engine's ids, kept for the client.

The journal (`Transcript`) says what the events sent to a client amount to, and of which tokens they
were made. The hot path appends to `pending` itself, and events are joined and tokens put in their
place later, many at a time. With a thousand streams nothing of one of them is in the processor's
caches when its next event comes, so what counts is how few objects are touched; and joining many
events at once takes no longer than compressing them would.

The engine plays a resumed answer from its first event, and nothing of that is sent until as many
tokens were played as the journal has. Then the joined content must equal what was delivered, and
everything behind that point is new. Events that no token caused may stand behind the last delivered
token, delivered or not. So from the group that reaches the journal's end on, the cut is made
between events: at the last place at which what was played is what was delivered.

A client that sees the id of its answer change may take what follows for another answer. `Rewriter`
exchanges the new engine's ids and times in the bytes of later events, without parsing them. That is
safe: `"id":"x"` holds quotes that are not escaped, so the pattern fits a key with its value and
nothing that a model or a user has written. It exchanges only the very values that the new engine
gave where the client has others, under every key for ids, since an id announced as `id` is referred
to as `item_id` later.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

import msgspec

from gateway.core.replay_join import SEQUENCE, Joined, events_in
from plumbing.gateway_protocol import ITEM_BYTES

BLOCK_BYTES = 16 * 1024  # twice as much saves a tenth of the time and costs each stream its size
GROUP_BYTES = 80  # what a group in the block takes beside its events' bytes
TOKEN_MAX = (1 << 32) - 1  # token ids travel as unsigned 32-bit numbers
_ONE = array("I", [1])

# What the events of a group were made of: one token, nearly always, or tokens and chunk sizes.
Made: TypeAlias = "int | tuple[array[int], array[int]]"


class Transcript:
    """The sum of the events so far, and the block that is being filled. `pending`: the events of a
    group, what they were made of, the events of the next one, and so on."""

    __slots__ = ("_chunks", "_events", "_joined", "_tokens", "pending", "room_bytes")

    def __init__(self) -> None:
        self.pending: list[bytes | Made] = []
        self.room_bytes = 0  # what may come before memory is counted again
        self._joined = Joined()
        self._events: list[bytes] = []  # whose tokens have been put in their place
        self._tokens = array("I")
        self._chunks = array("I")

    @property
    def tokens(self) -> array[int]:
        """All token ids, in their order."""
        self._settle()
        return self._tokens

    @property
    def chunks(self) -> array[int]:
        """How many tokens each output of the engine had."""
        self._settle()
        return self._chunks

    @property
    def joined(self) -> Joined:
        """What all events amount to."""
        self.pack()
        return self._joined

    def add(self, events: bytes, tokens: Sequence[int], chunks: Sequence[int]) -> None:
        """One more group, of any number of tokens.

        Raises:
            OverflowError: not a token id; nothing was added.
        """
        self.pending += (events, (array("I", tokens), array("I", chunks)))

    def pack(self) -> int:
        """Join the block that is being filled, of whatever size it is; the memory that all takes
        then."""
        self._settle()
        if self._events:
            self._joined.add(b"".join(self._events))
            self._events.clear()
        return self._joined.held_bytes + ITEM_BYTES * (len(self._tokens) + len(self._chunks))

    def _settle(self) -> None:
        """Put the tokens of pending groups in their place."""
        if not self.pending:
            return
        made = cast("list[Made]", self.pending[1::2])
        self._events += cast("list[bytes]", self.pending[::2])
        self.pending.clear()
        try:
            self._tokens.fromlist(cast("list[int]", made))  # all or nothing
            self._chunks += _ONE * len(made)
        except TypeError:  # some are of several tokens, or of none
            for each in made:
                tokens, chunks = (array("I", [each]), _ONE) if isinstance(each, int) else each
                self._tokens += tokens
                self._chunks += chunks


READ_BYTES = 16 * 1024  # at once, as of a journal


class ReplayMismatch(Exception):
    """The replay is not what was delivered: the stream must not go on with it."""


class Rest(NamedTuple):
    """The part of a group that is new to the client."""

    events: bytes
    has_new_tokens: bool  # the group's tokens are behind the joint, not in front of it


class Replay:
    """One replay; `delivered` is what the client has, and `journal` its tokens."""

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


IDS = rb'"(?:id|item_id|call_id|response_id)": ?'
TIMES = rb'"(?:created|created_at|completed_at)": ?'
NUMBERS_OF_EVENTS = rb'"%b": ?' % SEQUENCE.encode()


class Rewriter:
    """Exchanges values in the bytes of events; made from both engines' events up to the joint."""

    def __init__(self, table: dict[bytes, bytes], shift: int) -> None:
        """`table` holds values as JSON, the new one's and the first one's."""
        self._table = table
        self._shift = shift
        ids = [re.escape(value) for value in table if value.startswith(b'"')]
        times = [re.escape(value) for value in table if not value.startswith(b'"')]
        ways = []
        if ids:
            ways.append(rb"%b(?P<id>%b)" % (IDS, b"|".join(ids)))
        if times:  # a number must end where the value ends
            ways.append(rb"%b(?P<time>%b)(?![\w.+-])" % (TIMES, b"|".join(times)))
        if shift:
            ways.append(rb"%b(?P<event>\d+)" % NUMBERS_OF_EVENTS)
        self._pattern = re.compile(b"|".join(ways))

    @classmethod
    def between(cls, delivered: Joined, replayed: Joined) -> Rewriter | None:
        """What turns the second engine's events into the first's, or None if they agree."""
        pairs = ((replayed.ids.get(path, old), old) for path, old in delivered.ids.items())
        encode = msgspec.json.encode
        table = {encode(new): encode(old) for new, old in pairs if new != old}
        shift = (delivered.sequence or 0) - (replayed.sequence or 0)
        return cls(table, shift) if table or shift else None

    def rewrite(self, events: bytes) -> bytes:
        return self._pattern.sub(self._exchange, events)

    def _exchange(self, found: re.Match[bytes]) -> bytes:
        assert found.lastgroup is not None  # each way has one
        value = found[found.lastgroup]
        is_number = found.lastgroup == "event"
        wanted = b"%d" % (int(value) + self._shift) if is_number else self._table[value]
        return found[0].removesuffix(value) + wanted
