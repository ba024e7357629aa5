"""The lock `active:<model>`: granted to whoever waits, once the holder's processes are dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.pool.engine import Engine
    from tests.sim.pool.world import World


class ActiveLock:
    def __init__(self, world: World, model: str) -> None:
        self.world, self.model = world, model
        self.holder: Engine | None = None
        self.incarnation = ""
        self.token = 0  # of the holder; 0: nobody
        self.waiters: list[tuple[Engine, str]] = []

    def want(self, engine: Engine) -> None:
        self.waiters.append((engine, engine.incarnation))
        self.grant()

    def leave(self, engine: Engine) -> None:
        self.waiters = [waiter for waiter in self.waiters if waiter[0] is not engine]

    def died(self, incarnation: str) -> None:
        """The witness is free: so is the lock, as soon as the server looks."""
        if incarnation == self.incarnation:
            self.world.timeline.soon(self.free, incarnation)

    def free(self, incarnation: str) -> None:
        if incarnation == self.incarnation:
            self.holder, self.incarnation, self.token = None, "", 0
            self.grant()

    def grant(self) -> None:
        if self.holder is not None or not self.waiters:
            return
        self.holder, self.incarnation = self.waiters.pop(0)
        self.world.tokens += 1
        self.token = self.world.tokens
        timeline = self.world.timeline
        timeline.soon(self.holder.granted, self.incarnation, self.token)
        for gateway in self.world.gateways:
            timeline.soon(gateway.granted, self.model, self.holder, self.token)
