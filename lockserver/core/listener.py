"""Which gateway may accept connections at the service address. Pure: what gateways say in, orders
out.

The server keeps a copy of the listening descriptor and lends it to the newest gateway that lives:
of those that ask for it or accept, the one that was started last; without any, the newest that has
yielded. Any other gateway that accepts must yield first, but one that hangs keeps its successor no
longer than `YIELD_MS`. Who has it follows from what the gateways say now, so they may connect again
in any order.

While no gateway has it, connections wait in its backlog. After `hold_ms` the server closes its
copy, so that clients are refused and can go elsewhere, and binds the address for the next gateway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockserver.messages import Stage

YIELD_MS = 2_000.0  # an old gateway needs milliseconds; one that hangs must not keep its successor


@dataclass(slots=True, eq=False)
class Acceptor:
    """A connected gateway, as far as the descriptor is concerned."""

    id: str
    started_ms: float  # by the gateway's own word
    stage: Stage = Stage.ASKS
    is_lent: bool = False  # it was sent the descriptor on this connection
    yield_by_ms: float = math.inf  # it was told to yield, and has until then

    @property
    def has_it(self) -> bool:
        return self.is_lent or self.stage is Stage.ACCEPTS

    def say(self, stage: Stage) -> None:
        """Its own word; repeats change nothing."""
        self.stage = stage
        if stage in (Stage.YIELDS, Stage.ENDS):
            self.is_lent, self.yield_by_ms = False, math.inf


@dataclass(slots=True)
class ListenerOrders:
    """What the shell does, in this order."""

    have_yield: list[Acceptor] = field(default_factory=list)
    # It counts as lent. Where that was not possible, the shell takes `is_lent` back: it is due
    # again with the next look. The address may have to be bound first.
    lend_to: Acceptor | None = None
    close: bool = False  # the server's own copy


class Listener:
    """The descriptor of one address. `now_ms` never goes back."""

    def __init__(self, hold_ms: float, now_ms: float) -> None:
        self.holder = ""  # the newest gateway that has it
        self.since_ms = now_ms  # since when, or since when no gateway has it
        self.is_closed = False  # no gateway had it for `hold_ms`
        self._hold_ms = hold_ms

    def settle(self, acceptors: Sequence[Acceptor], now_ms: float) -> ListenerOrders:
        """Something has changed, or time has passed. `acceptors`: all that are connected, in the
        order of their connections."""
        orders = ListenerOrders()
        newest = _newest(acceptors, Stage.ASKS, Stage.ACCEPTS) or _newest(acceptors, Stage.YIELDS)
        others = [each for each in acceptors if each.has_it and each is not newest]
        for each in others:
            if each.yield_by_ms == math.inf:
                each.yield_by_ms = now_ms + YIELD_MS
                orders.have_yield.append(each)
        may_lend = all(now_ms >= each.yield_by_ms for each in others)
        if newest is not None and not newest.has_it and may_lend:
            newest.is_lent, orders.lend_to = True, newest
        having = [newest] if newest is not None and newest.has_it else others[-1:]
        holder = having[0].id if having else ""
        if holder != self.holder:
            self.holder, self.since_ms = holder, now_ms
        if holder:
            self.is_closed = False
        elif not self.is_closed and now_ms - self.since_ms >= self._hold_ms:
            self.is_closed = orders.close = True
        return orders


def _newest(acceptors: Sequence[Acceptor], *stages: Stage) -> Acceptor | None:
    """The one that was started last of those that say so; of equals, the last that connected."""
    found = sorted((a for a in acceptors if a.stage in stages), key=lambda a: a.started_ms)
    return found[-1] if found else None
