"""A virtual world of members, a network and a lock server, to test the lease keeper alone.

Time is one number; each member reads it through its own clock, with an offset and a rate. Messages
take arbitrarily long, on connections that are cut; a member may be stopped, so that what arrives
has to wait. The server is the simplest one that follows the rules of leases: it counts from when it
receives, adds a margin, puts its holder on file with the lease, and may restart with a different
lease length. `World.check` reports whether two members could be serving at once.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from lockserver.client.lease import BEATS_PER_LEASE, LeaseKeeper

LEASES_MS = (500, 1000, 2000)
MARGIN = 0.2  # of the lease
DRIFT = 0.005  # maximum clock error, fast or slow; two of them are well within the margin
DELAY_MS = 150.0  # of one message, and now and then much more
STEP_MS = 25.0

Keeper = Callable[[], LeaseKeeper]


@dataclass
class Member:
    name: str
    keeper: LeaseKeeper
    offset: float
    rate: float
    incarnation: int = 1
    progress: int = 0
    conn: int = 0  # 0: none
    serving: int | None = None  # the incarnation that acted on a grant and has not stopped
    kill_at: float | None = None  # the kernel's timer, by this member's clock
    reaped_at: float | None = None  # true time
    stopped_until: float = 0.0
    inbox: list[tuple[int, tuple[str, int, int]]] = field(default_factory=list)
    beat_at: float = 0.0
    must_repeat: bool = True

    def clock(self, now: float) -> float:
        return self.offset + now * self.rate


class World:
    """`serving_at_once` is the violation that was found, if any."""

    def __init__(self, seed: int, keeper: Keeper = LeaseKeeper) -> None:
        self.random = random.Random(seed)
        self.keeper = keeper
        self.now = 0.0
        self.grants = self.takeovers = 0
        self.serving_at_once: str | None = None
        self._numbers = itertools.count(1)
        self._deaf: set[int] = set()
        self._arrives: dict[tuple[int, str], float] = {}
        self._flights: list[tuple[float, int, Callable[[], None]]] = []
        self.lease_ms = 1000
        self._holder: tuple[str, int] | None = None
        self._filed_ms = 0
        self._expiry = 0.0
        self._ended: set[tuple[str, int]] = set()
        self.members = {
            name: Member(
                name,
                keeper(),
                self.random.uniform(-1e6, 1e6),
                1 + self.random.uniform(-DRIFT, DRIFT),
            )
            for name in "ab"
        }

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += STEP_MS
            for member in self.members.values():
                self._live(member)
            while self._flights and self._flights[0][0] <= self.now:
                heapq.heappop(self._flights)[2]()
            if self.random.random() < 0.02:
                self._restart()
            self._expire()
            serving = [m.name for m in self.members.values() if m.serving is not None]
            if len(serving) > 1:
                self.serving_at_once = f"{serving} serve at {self.now:g} ms"
                return

    # ------------------------------------------------------------------ members

    def _live(self, me: Member) -> None:
        dice = self.random
        clock = me.clock(self.now)
        if me.kill_at is not None and clock >= me.kill_at:  # whatever the process is doing
            self._relaunch(me)
        if self.now < me.stopped_until:
            return
        if dice.random() < 0.01:
            me.stopped_until = self.now + dice.choice((200.0, 1000.0, 4000.0))
            return
        if dice.random() < 0.02:
            self._deaf.add(me.conn)  # half-open: neither end knows it yet
        if me.conn and dice.random() < 0.02:
            self._cut(me)
        elif not me.conn and dice.random() < 0.2:
            me.conn = next(self._numbers)
            self._say(me, "want")
        inbox, me.inbox = me.inbox, []
        for conn, message in inbox:
            if conn == me.conn:
                self._hear(me, message)
        if me.reaped_at is None and me.keeper.must_stop(clock):
            self._stop(me)
        if me.reaped_at is not None and self.now >= me.reaped_at:
            self._relaunch(me)
        if me.conn and clock >= me.beat_at:
            self._say(me, "want" if me.must_repeat else "beat")

    def _stop(self, me: Member) -> None:
        """Its tree is killed, and reaped a little later."""
        me.serving = None
        me.reaped_at = self.now + self.random.uniform(0, 1500)

    def _relaunch(self, me: Member) -> None:
        me.incarnation += 1
        me.serving = me.kill_at = me.reaped_at = None
        me.keeper.begin()
        if me.conn:
            self._say(me, "want")

    def _say(self, me: Member, what: str) -> None:
        clock = me.clock(self.now)
        me.progress += 1
        me.keeper.sent(me.progress, clock)
        me.must_repeat = False
        lease = me.keeper.lease
        if me.keeper.is_held:  # redundant for a correct keeper; it must not hide a broken one
            self._arm(me)
        me.beat_at = clock + (lease.lease_ms if lease else 500) / BEATS_PER_LEASE
        said = (me.name, me.conn, me.incarnation, me.progress, what)
        self._send((me.conn, "up"), lambda: self._received(*said))

    def _hear(self, me: Member, message: tuple[str, int, int]) -> None:
        what, incarnation, value = message
        clock = me.clock(self.now)
        if what == "renewed":
            progress, lease_ms = incarnation, value
            if me.keeper.renewed(progress, lease_ms, clock) and me.keeper.is_held:
                self._arm(me)
        elif incarnation != me.incarnation or me.reaped_at is not None:
            return
        elif what == "refused":
            self._stop(me)
        else:
            if me.keeper.may_act(clock):
                me.keeper.hold()
                me.serving = me.incarnation
                self._arm(me)
            else:
                me.must_repeat = True

    def _arm(self, me: Member) -> None:
        assert me.keeper.lease is not None
        me.kill_at = me.keeper.lease.kill_at_ms

    # ------------------------------------------------------------------ the network and the server

    def _send(self, stream: tuple[int, str], deliver: Callable[[], None]) -> None:
        """Messages in one direction on one connection stay in order; a late one delays the rest."""
        if stream[0] in self._deaf:
            return
        delay = self.random.uniform(0, DELAY_MS) * (20 if self.random.random() < 0.05 else 1)
        at = self._arrives[stream] = max(self.now + delay, self._arrives.get(stream, 0.0))
        heapq.heappush(self._flights, (at, next(self._numbers), deliver))

    def _answer(self, name: str, conn: int, message: tuple[str, int, int]) -> None:
        self._send((conn, "down"), lambda: self.members[name].inbox.append((conn, message)))

    def _received(self, name: str, conn: int, incarnation: int, progress: int, what: str) -> None:
        self._expire()
        who = (name, incarnation)
        if self._holder is not None and self._holder[0] == name and self._holder[1] < incarnation:
            self._free()  # it reports that it has reaped
        if who in self._ended:
            self._answer(name, conn, ("refused", incarnation, 0))
            return
        if self._holder == who:
            self._expiry = self._until(self.lease_of(who))
        self._answer(name, conn, ("renewed", progress, self.lease_of(who)))
        if self._holder is None:
            self._holder, self._filed_ms = who, self.lease_ms
            self._expiry = self._until(self.lease_ms)
            self.grants += 1
        if self._holder == who and what == "want":
            self._answer(name, conn, ("granted", incarnation, 0))

    def lease_of(self, who: tuple[str, int]) -> int:
        """A holder keeps the lease length on file, and so must a server that restarts after this
        one."""
        return self._filed_ms if self._holder == who else self.lease_ms

    def _until(self, lease_ms: int) -> float:
        return self.now + lease_ms * (1 + MARGIN)

    def _expire(self) -> None:
        if self._holder is not None and self.now >= self._expiry:
            self.takeovers += 1
            self._free()

    def _free(self) -> None:
        assert self._holder is not None
        self._ended.add(self._holder)
        self._holder = None

    def _restart(self) -> None:
        """It knows only what is on file; its lease length may differ now."""
        self.lease_ms = self.random.choice(LEASES_MS)
        self._expiry = self._until(self._filed_ms)
        for member in self.members.values():
            self._cut(member)

    def _cut(self, member: Member) -> None:
        member.conn = 0
        member.keeper.cut()
        member.inbox.clear()
