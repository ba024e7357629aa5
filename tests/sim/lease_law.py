"""What must always hold over several nodes: only one grant is served at a time, and tokens are
unique."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockserver.core import events as ev
from tests.sim.lease_parts import Tree

if TYPE_CHECKING:
    from tests.sim.lease_world import LeaseWorld


class Law:
    def __init__(self, world: LeaseWorld) -> None:
        self.world = world
        self.granted: dict[int, str] = {}  # token → incarnation
        self.token_max = 0

    def serving(self) -> list[Tree]:
        return [tree for tree in self.world.trees if tree.token and not tree.is_dead]

    def check(self) -> None:
        tokens = {tree.token: tree.incarnation for tree in self.serving()}
        assert len(tokens) <= 1, f"two grants are served: {tokens}"

    def written(self, record: ev.LockRecord) -> None:
        """A grant counts from when it is on disk: the previous holder must be dead by then."""
        holder = record.holders.get("active")
        if holder is None or holder.token <= self.token_max:
            return
        self.token_max = holder.token
        others = [tree.incarnation for tree in self.serving() if tree.token != holder.token]
        assert not others, f"granted to {holder.incarnation} while {others} live"
        known = self.granted.setdefault(holder.token, holder.incarnation)
        assert known == holder.incarnation, f"token {holder.token} was granted twice"
