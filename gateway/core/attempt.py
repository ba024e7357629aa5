"""One request on one upstream connection, and the hot path: bytes in, bytes to the client out.

The shell cuts a marked stream behind each comment of the hop and calls `group`; at `hop.END` it
calls `end`. An answer that is not marked is held, and `hold` told of its bytes, until `SendHead`
says to pass it on; from then on it goes through `raw`. Each
returns what to send to the client now, often nothing: an attempt that is over says nothing, and a
replay is not for the client. After each of them the shell looks at `Gateway.outbox`, as a cold
thing may have happened too.

    data = attempt.group(events, tokens, chunks, now_ms)
    if data:
        client.write(data)
    if gateway.outbox:
        perform(gateway.take())
"""

from __future__ import annotations

from collections.abc import Sequence


class Attempt:
    """`number` is the one of the events; `is_over` once nothing of it may reach the client."""

    __slots__ = ("is_over", "number", "request")

    def __init__(self, number: int, request: int) -> None:
        self.number = number
        self.request = request
        self.is_over = False

    def group(
        self, events: bytes, tokens: Sequence[int], chunks: Sequence[int], now_ms: float
    ) -> bytes:
        """One whole group of a marked stream, its comment cut off. Groups are not merged."""
        raise NotImplementedError

    def end(self, events: bytes, now_ms: float) -> bytes:
        """The events in front of `hop.END`; `EndAnswer` is then in the outbox."""
        raise NotImplementedError

    def raw(self, data: bytes) -> bytes:
        """Bytes of the body of an answer that is passed on as it comes."""
        raise NotImplementedError

    def hold(self, size_bytes: int) -> None:
        """So many more bytes of the answer are held; over the limit `SendHead` is in the outbox."""
        raise NotImplementedError
