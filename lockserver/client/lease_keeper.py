"""A member's lease, as the member itself may count on it. Pure: times come in, answers come out.

    sent(p, t) ──→ server ──→ renewed(p)        valid until  t + lease
                                                stop at      t + 60 % of it: the engine ends itself
                                                kill at      t + 80 % of it: the kernel ends it

The server counts a lease, and a margin, from when it *received* what it answers; the member from
when it *sent* that. Sending comes first, so a member always gives up before the server does,
however long either way takes; all that is asked of clocks is that they run at the same rate to
within the margin.

Owns what was sent when, what was answered, and until when that holds. Must not know sockets, nor
how an engine stops. The surprising things:

- Only an answer renews, never a message that was merely sent; an answer to something older than
  what was answered before changes nothing.
- What is held and had to stop stays lost, whatever is answered later. Answers count all the same,
  as long as the lease has not run out in between: the tree is still being reaped under it.
- A grant that comes while the lease is not valid is not kept for later. It may have lain in a
  buffer while the server granted to another. The want is said again instead, and the server
  repeats what is true by then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

STOP_FRACTION = 0.6  # from here to 80 % the engine kills and reaps its tree by itself
KILL_FRACTION = 0.8  # and one fifth is left for what dies with its supervisor
BEATS_PER_LEASE = 10  # so that four lost answers in a row cost nothing
# Answers come in order; so many unanswered means that none come, and the newest is worth most.
SENT_MAX = 64


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as it was last renewed. Times are those of the member's own clock, milliseconds."""

    sent_ms: float
    lease_ms: int

    @property
    def stop_at_ms(self) -> float:
        return self.sent_ms + STOP_FRACTION * self.lease_ms

    @property
    def kill_at_ms(self) -> float:
        return self.sent_ms + KILL_FRACTION * self.lease_ms

    @property
    def valid_until_ms(self) -> float:
        return self.sent_ms + self.lease_ms


class LeaseKeeper:
    """The lease of one incarnation after another."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.is_held = False  # a grant is acted on
        self.is_lost = False  # it was, and had to be given up
        self._sent: deque[tuple[int, float]] = deque(maxlen=SENT_MAX)

    def begin(self) -> None:
        """Another incarnation, or none: what was said for the last one renews nothing."""
        self.lease, self.is_lost, self.is_held = None, False, False
        self._sent.clear()

    def sent(self, progress: int, now_ms: float) -> None:
        """`progress` goes out now, and names an incarnation or beats for one that was named.

        `progress` is larger each time.
        """
        self._sent.append((progress, now_ms))

    def cut(self) -> None:
        """The connection is gone, and with it every answer that has not come."""
        self._sent.clear()

    def renewed(self, progress: int, lease_ms: int, now_ms: float) -> bool:
        """The server answered; whether that renewed anything."""
        while self._sent and self._sent[0][0] < progress:
            self._sent.popleft()
        if not self._sent or self._sent[0][0] != progress:
            return False  # answered twice, said for another incarnation, or never said
        _, sent_ms = self._sent.popleft()
        if self.is_held and (self.lease is None or now_ms >= self.lease.valid_until_ms):
            self.is_lost = True  # the server may have answered before it gave up
            return False
        self.lease = Lease(sent_ms, lease_ms)
        return True

    def may_act(self, now_ms: float) -> bool:
        """Whether a grant that is read now may be acted on."""
        return not self.is_lost and self.lease is not None and now_ms < self.lease.stop_at_ms

    def hold(self) -> None:
        """A grant is acted on; again is harmless. Only after `may_act`."""
        self.is_held = True

    def must_stop(self, now_ms: float) -> bool:
        """Whether what is held is lost: nothing was answered for too long. Once so, it stays."""
        if self.is_held and (self.lease is None or now_ms >= self.lease.stop_at_ms):
            self.is_lost = True
        return self.is_lost

    def valid_for_ms(self, now_ms: float) -> float:
        """How long the lease is still good for serving, for people; 0 if it is not."""
        if self.lease is None or self.is_lost:
            return 0.0
        return max(0.0, self.lease.stop_at_ms - now_ms)
