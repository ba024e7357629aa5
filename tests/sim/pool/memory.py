"""Real memory: what devices and the host hold, and the memory service in front of them.

A byte is used until the kernel has it back: that of a process until it is dead, that of weights and
KV memory until the service has freed it, which it does only while nobody maps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from plumbing.pod.messages import Tier
from pool.core.events import AskMemory, MemoryIs
from pool.core.states import HOST, EntryKind

if TYPE_CHECKING:
    from tests.sim.pool.engine import Engine, Tree
    from tests.sim.pool.world import World

Key = tuple[str, str]  # kind and owner


class Device:
    def __init__(self, name: str, total_bytes: int) -> None:
        self.name, self.total_bytes = name, total_bytes
        self.parts: dict[Key, int] = {}
        self.used_bytes = 0
        self.outside_bytes = 0  # of `parts`

    def take(self, key: Key, size: int) -> bool:
        """Whether there is room; if so it is used from now on."""
        if self.used_bytes + size > self.total_bytes:
            return False
        assert key not in self.parts, f"{key} takes its memory on {self.name} twice"
        self.parts[key] = size
        self.used_bytes += size
        return True

    def give(self, key: Key) -> int:
        size = self.parts.pop(key, 0)
        self.used_bytes -= size
        return size


class Memory:
    """The memory service of one model on all its devices, and its copy on the host."""

    def __init__(self, world: World, model: str) -> None:
        self.world, self.model = world, model
        self.weights_by: set[str] = set()  # incarnations that map them
        self.kv_by: set[str] = set()
        self.writer = ""  # the incarnation that loads
        self.waiters: list[tuple[Engine, Tree, object]] = []  # for its end
        self.has_weights = self.has_kv = self.has_copy = False
        self.may_free_kv = False
        self.may_free_weights = False

    # ------------------------------------------------------------------ for engines

    def take_weights(self, incarnation: str) -> bool:
        """Load, or copy them back; nobody else does meanwhile. Whether there was room."""
        assert not self.writer
        assert not self.has_weights
        if not self._take("weights", self.world.sizes[self.model].weights):
            return False
        self.writer = incarnation
        self.world.memory_changed(self.model)
        return True

    def commit(self, incarnation: str) -> None:
        assert self.writer == incarnation
        self.writer, self.has_weights = "", True
        self.weights_by.add(incarnation)
        self._wake_waiters()
        self.world.timeline.after(self.world.timeline.between(0, 3000), self._copy)

    def _copy(self) -> None:
        """Made once; the host may have no room for it."""
        host = self.world.devices.get(HOST)
        if host is None or self.has_copy or not self.has_weights:
            return
        size = sum(self.world.sizes[self.model].weights.values())
        self.has_copy = host.take(("copy", self.model), size)
        if not self.has_copy:
            self.world.law.short(HOST, f"the copy of {self.model}")
        self.world.memory_changed(self.model, on_host=True)

    def map_weights(self, incarnation: str) -> None:
        assert self.has_weights
        self.weights_by.add(incarnation)

    def take_kv(self, incarnation: str) -> bool:
        """Its own, or what an engine before it has left."""
        if not self.has_kv:
            if not self._take("kv", self.world.sizes[self.model].kv):
                return False
            self.has_kv = True
            self.world.memory_changed(self.model)
        self.kv_by.add(incarnation)
        return True

    def offload(self, incarnation: str) -> None:
        self.weights_by.discard(incarnation)
        self._sweep_soon()

    def unmap_kv(self, incarnation: str) -> None:
        self.kv_by.discard(incarnation)
        self._sweep_soon()

    def died(self, incarnation: str) -> None:
        """The kernel has taken its mappings; what it had not committed is lost."""
        self.kv_by.discard(incarnation)
        self.weights_by.discard(incarnation)
        if self.writer == incarnation:
            self.writer = ""
            self._give("weights")
            self._wake_waiters()
        self._sweep_soon()

    def _wake_waiters(self) -> None:
        """In any order: the first one loads, if that is still to be done."""
        for engine, tree, then in self.waiters:
            self.world.timeline.soon(engine.took, tree, engine.restore, (then,))
        self.waiters.clear()

    # ------------------------------------------------------------------ for the pool

    def obey(self, effect: AskMemory) -> None:
        self.may_free_kv |= EntryKind.KV in effect.kinds
        self.may_free_weights |= effect.frees_weights
        self._sweep()

    def goal_is(self, goal: Tier) -> None:
        """The pool has said so to an engine of the model: the last word counts."""
        if goal is Tier.AWAKE:
            self.may_free_kv = False
        if goal is not Tier.COLD:
            self.may_free_weights = False

    def _sweep_soon(self) -> None:
        timeline = self.world.timeline
        timeline.after(timeline.between(0, 1200) if timeline.rng.random() < 0.3 else 0, self._sweep)

    def _sweep(self) -> None:
        """Free what nobody maps and may be freed."""
        if self.has_kv and self.may_free_kv and not self.kv_by:
            self.has_kv = False
            self._give("kv")
        is_unmapped = self.has_weights and not self.weights_by
        is_offloaded = self.has_copy and self.world.is_offloaded(self.model)
        if is_unmapped and (is_offloaded or self.may_free_weights):
            self.has_weights = False
            self._give("weights")
        if self.has_copy and self.may_free_weights and not self.has_weights:
            self.lose_copy()

    def lose_copy(self) -> None:
        if self.has_copy:
            self.has_copy = False
            self.world.devices[HOST].give(("copy", self.model))
            self.world.memory_changed(self.model, on_host=True)

    # ------------------------------------------------------------------ helpers

    def _take(self, kind: str, sizes: Mapping[str, int]) -> bool:
        devices = self.world.devices
        taken: list[str] = []
        for name, size in sizes.items():
            if not devices[name].take((kind, self.model), size):
                for other in taken:
                    devices[other].give((kind, self.model))
                self.world.law.short(name, f"{kind} of {self.model}")
                return False
            taken.append(name)
        return True

    def _give(self, kind: str) -> None:
        for name in self.world.rules[self.model].devices:
            self.world.devices[name].give((kind, self.model))
        self.world.memory_changed(self.model)


def seen_memory(world: World, name: str, asked: Mapping[str, int]) -> MemoryIs:
    """What the memory service holds on this device, by model, and what others use of it."""
    device = world.devices[name]
    held = {
        (EntryKind(kind), owner): size
        for (kind, owner), size in device.parts.items()
        if kind in ("weights", "kv", "copy")
    }
    return MemoryIs(name, device.total_bytes, held, dict(asked), device.outside_bytes)
