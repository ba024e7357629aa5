"""Neighbours that ask for memory, use no more than they were granted, and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pool.core.events import LeaseAsked

if TYPE_CHECKING:
    from tests.sim.pool.world import World


class Lease:
    def __init__(self, world: World, name: str, device: str, size: int) -> None:
        self.world, self.name, self.device, self.size = world, name, device, size
        self.since_ms = world.timeline.now_ms
        self.is_over = self.is_granted = self.is_on_file = False

    def ask_again(self) -> None:
        """Who was granted its memory is another program by now, which asks for nothing."""
        if self.is_over:
            self.world.pool.lease_over(self.name)
        elif not self.is_granted:
            self.world.pool.lease_asks(self.asked)

    @property
    def asked(self) -> LeaseAsked:
        return LeaseAsked(
            lease=self.name, device=self.device, bytes=self.size, since_ms=self.since_ms
        )

    def granted(self) -> None:
        if self.is_over or self.is_granted:
            return
        self.is_granted = True
        if not self.world.devices[self.device].take(("lease", self.name), self.size):
            self.world.law.short(self.device, f"lease {self.name}")
            self.end()

    def refused(self) -> None:
        self.end()

    def end(self) -> None:
        """Its processes are dead, or it waits no more."""
        if not self.is_over:
            self.is_over = True
            self.world.devices[self.device].give(("lease", self.name))
            self.world.pool.lease_over(self.name)
