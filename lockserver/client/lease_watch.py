"""A member's lease in a running process: the keeper, with a clock, a timer and the dead man.

Owns when `on_lost` is called and for when the kernel's timer is set. What counts and until when is
`lease_keeper`. The surprising thing: the loop's own timer only asks whether it is time; it runs by
a clock that stands still while the machine sleeps, and the lease does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from lockserver.client import dead_man
from lockserver.client.lease_keeper import BEATS_PER_LEASE, LeaseKeeper
from lockserver.messages import Renewed

# Heard nothing for so much of the lease, a connection is taken for half-open and made anew: TCP
# itself would try the old one less and less often, and there is time for a second attempt or two.
SILENT_FRACTION = 0.4
SILENT_MS_MAX = 3_000.0  # also where the lease is long: a connection should be there when needed
# Until the lease is known, which the first answer says: the shortest one allows six of these.
FIRST_BEAT_MS = 100.0


class Ender(Protocol):
    """What is needed of `dead_man.DeadMan`."""

    def arm(self, at_ms: float) -> None: ...

    def disarm(self) -> None: ...


class LeaseWatch:
    """The lease of one supervisor, over all its incarnations and connections."""

    def __init__(
        self,
        on_lost: Callable[[str], object],
        ender: Ender | None = None,
        clock: Callable[[], float] = dead_man.now_ms,
    ) -> None:
        """`on_lost` is told once, when what is held must be stopped. `clock` is `ender`'s.

        Raises:
            UnderstudyError: `lock.no_dead_man`, this process could not be ended in time.
        """
        self.keeper = LeaseKeeper()
        self.heard_ms: float | None = None
        self._on_lost = on_lost
        self._ender = ender or dead_man.DeadMan()
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._is_told = False

    def begin(self) -> None:
        """Another incarnation: the last one has been reaped, and nothing must end for it."""
        self.keeper.begin()
        self._ender.disarm()
        self._is_told = False
        self.close()

    def sent(self, progress: int) -> None:
        """To be called *before* the message goes out: the lease counts from here."""
        self.keeper.sent(progress, self._clock())

    def heard(self) -> None:
        """The server said something, whatever it was."""
        self.heard_ms = self._clock()

    def opened(self) -> None:
        """A connection is there; it has a while to be answered on."""
        self.heard_ms = self._clock()

    def cut(self) -> None:
        self.keeper.cut()

    def renewed(self, message: Renewed) -> None:
        if self.keeper.renewed(message.progress, message.lease_ms, self._clock()):
            self._arm()
        self._look()

    def may_act(self) -> bool:
        return self.keeper.may_act(self._clock())

    def hold(self) -> None:
        """What is granted is about to be acted on: from here on the kernel watches, too."""
        self.keeper.hold()
        self._arm()
        self._look()

    def is_silent(self) -> bool:
        """Whether the server has not been heard for so long that the connection is suspect."""
        lease, limit_ms = self.keeper.lease, SILENT_MS_MAX
        if lease is not None:
            limit_ms = min(SILENT_FRACTION * lease.lease_ms, limit_ms)
        return self.heard_ms is not None and self._clock() - self.heard_ms >= limit_ms

    def beat_ms(self, usual_ms: float) -> float:
        """How long to wait before the next heartbeat."""
        lease = self.keeper.lease
        return min(usual_ms, lease.lease_ms / BEATS_PER_LEASE if lease else FIRST_BEAT_MS)

    def document(self) -> dict[str, Any]:
        """For status: how long the lease is good for, and when the server was last heard."""
        now_ms, lease = self._clock(), self.keeper.lease
        heard_ms = None if self.heard_ms is None else round(now_ms - self.heard_ms, 1)
        return {
            "lease_ms": lease.lease_ms if lease else None,
            "valid_for_ms": round(self.keeper.valid_for_ms(now_ms), 1),
            "server_heard_ms_ago": heard_ms,
            "is_held": self.keeper.is_held,
            "is_lost": self.keeper.is_lost,
        }

    def close(self) -> None:
        """No more looking. An armed kernel timer stays: who ends while it holds has to be quick."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        lease = self.keeper.lease
        if self.keeper.is_held and lease is not None:
            self._ender.arm(lease.kill_at_ms)

    def _look(self) -> None:
        """Tell that it is lost if it is, and look again when it could be."""
        self.close()
        now_ms, lease = self._clock(), self.keeper.lease
        if self.keeper.must_stop(now_ms):
            if not self._is_told:
                self._is_told = True
                self._on_lost(self._why(now_ms))
        elif self.keeper.is_held and lease is not None:
            delay_s = max(0.0, lease.stop_at_ms - now_ms) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _why(self, now_ms: float) -> str:
        lease = self.keeper.lease
        if lease is None:
            return "the lease is over"
        return (
            f"the lock server has answered nothing that was said in the last"
            f" {now_ms - lease.sent_ms:.0f} ms; of a lease of {lease.lease_ms} ms no more may be"
            " used, since another engine may be granted the lock when it has run out"
        )
