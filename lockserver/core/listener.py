"""Which gateway may accept connections at one service address. Pure: events in, effects out.

The server keeps a copy of the listening descriptor and lends it to one gateway at a time. While no
gateway has it, connections wait in its backlog; after `hold_ms` the server closes its copy, so that
clients are refused and can go elsewhere, and binds the address again for the next gateway.

A gateway that asks while another one accepts is its successor: the server has the old one yield,
and lends the descriptor once that has happened, its connection has ended, or `YIELD_MS` have
passed. A gateway that has yielded finishes its requests. It gets the descriptor again if its
successor is lost, so the newest gateway that lives always has it.
"""

from __future__ import annotations

from msgspec import Struct

from lockserver.messages import Stage

YIELD_MS = 2_000.0  # an old gateway needs milliseconds; one that hangs must not keep its successor


class ListenerEffect(Struct, frozen=True):
    """What the shell does, in the order given."""


class LendTo(ListenerEffect, frozen=True):
    """Lend this gateway the descriptor; bind the address first if it is not bound."""

    gateway: str


class HaveYield(ListenerEffect, frozen=True):
    """Tell this gateway to stop accepting, and to say `Stage.YIELDS` then."""

    gateway: str


class CloseListener(ListenerEffect, frozen=True):
    """Close the server's own copy: clients are refused from now on."""


class Listener:
    """The descriptor of one address. `now_ms` never goes back."""

    def __init__(self, hold_ms: float, now_ms: float) -> None:
        self.holder = ""  # the gateway that it is lent to
        self.since_ms = now_ms  # since when, or since when nobody has it
        self.is_closed = False  # nobody had it for `hold_ms`
        self._hold_ms = hold_ms
        self._stages: dict[str, Stage] = {}  # of connected gateways, the oldest first
        self._yield_by_ms = 0.0  # when the successor gets it in any case

    @property
    def successor(self) -> str:
        """The gateway that asks for it and is newer than the one that has it."""
        order = list(self._stages)
        newest = self._newest(Stage.ASKS)
        if not newest or self.holder not in order:
            return newest
        return newest if order.index(newest) > order.index(self.holder) else ""

    def said(self, gateway: str, stage: Stage, now_ms: float) -> list[ListenerEffect]:
        """A connected gateway says how far it is; repeats change nothing."""
        if gateway != self.holder and stage is Stage.ACCEPTS and self.holder:
            # It was lent to another one while this one's connection was lost.
            self._stages[gateway] = stage
            return [HaveYield(gateway)]
        had_successor = bool(self.successor)
        self._stages[gateway] = stage
        if gateway == self.holder and stage in (Stage.YIELDS, Stage.ENDS):
            return self._free(now_ms)
        if not self.holder:
            if stage is Stage.ACCEPTS:
                self._hold(gateway, now_ms)
                return []
            return self._lend(now_ms)
        if gateway == self.holder and stage is Stage.ASKS:
            return [LendTo(gateway)]
        if self.successor and not had_successor:
            self._yield_by_ms = now_ms + YIELD_MS
            return [HaveYield(self.holder)]
        return []

    def left(self, gateway: str, now_ms: float) -> list[ListenerEffect]:
        """Its connection has ended."""
        self._stages.pop(gateway, None)
        return self._free(now_ms) if gateway == self.holder else []

    def tick(self, now_ms: float) -> list[ListenerEffect]:
        """Time has passed."""
        if self.holder:
            if self.successor and now_ms >= self._yield_by_ms:
                self._stages[self.holder] = Stage.ENDS  # it hangs: its word counts no more
                return self._free(now_ms)
        elif not self.is_closed and now_ms - self.since_ms >= self._hold_ms:
            self.is_closed = True
            return [CloseListener()]
        return []

    # ------------------------------------------------------------------ inside

    def _free(self, now_ms: float) -> list[ListenerEffect]:
        self.holder, self.since_ms = "", now_ms
        return self._lend(now_ms)

    def _lend(self, now_ms: float) -> list[ListenerEffect]:
        gateway = self.successor or self._newest(Stage.YIELDS)
        if not gateway:
            return []
        self._hold(gateway, now_ms)
        return [LendTo(gateway)]

    def _hold(self, gateway: str, now_ms: float) -> None:
        self.holder, self.since_ms, self.is_closed = gateway, now_ms, False

    def _newest(self, stage: Stage) -> str:
        """The gateway that came last of those that say so; the one that has it aside."""
        found = [each for each, at in self._stages.items() if at is stage and each != self.holder]
        return found[-1] if found else ""
