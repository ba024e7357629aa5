"""The ids and times of the first engine, kept for the client of a stream that was resumed.

A client that sees the id of its answer change may take what follows for another answer. Where the
new engine's values differ, they are exchanged in the bytes of later events, without parsing these.

That is safe: `"id":"x"` holds quotes that are not escaped, and a quote inside of a JSON string is,
so the pattern fits a key with its value and nothing that a model or a user has written. And it is
exact: only the very values that the new engine gave where the client has others. They are exchanged
under every key for ids, as an id that was announced as `id` is referred to as `item_id` later.
"""

from __future__ import annotations

import re

import msgspec

from gateway.core.event_parts import SEQUENCE
from gateway.core.joined import Joined

IDS = rb'"(?:id|item_id|call_id|response_id)": ?'
TIMES = rb'"(?:created|created_at|completed_at)": ?'
NUMBERS_OF_EVENTS = rb'"%b": ?' % SEQUENCE.encode()


class Rewriter:
    """Exchanges values in the bytes of events; made from both engines' events up to the joint."""

    __slots__ = ("_pattern", "_shift", "_table")

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
