"""Rules of others, re-implemented from what they have published, not their programs.

Only what decides who is awake: every peer gets the same device, the same wake and release times,
and the most favourable reading where its text leaves something open. None of them parks a stream.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from hack.policies.world import Phase, Request, SimModel, World


class PeerRules(ABC):
    """What they share: who waits, who is busy, waking into a free slot."""

    name = ""
    source = ""

    def admits(self, world: World, model: SimModel) -> bool:
        return True

    @abstractmethod
    def decide(self, world: World) -> float | None:
        """Begin what these rules begin now; when to ask again, None: at the next event."""

    def pending(self, world: World) -> list[tuple[Request, SimModel]]:
        """Who waits for a model that is neither awake nor waking, by arrival."""
        found = [
            (request, model)
            for model in world.models.values()
            if model.phase in (Phase.RESTING, Phase.DRAINING, Phase.RELEASING)
            for request in model.queue
        ]
        return sorted(found, key=lambda pair: (pair[0].counts_ms, pair[0].number))

    def awake(self, world: World) -> list[SimModel]:
        return [model for model in world.models.values() if model.phase is Phase.AWAKE]

    def has_free_slot(self, world: World) -> bool:
        return world.used() < world.slots

    def wake_first(self, world: World) -> None:
        """Free slots go to those that wait, by arrival."""
        for _, model in self.pending(world):
            if model.phase is Phase.RESTING and self.has_free_slot(world):
                world.wake(model)

    def is_coming(self, world: World) -> bool:
        """Whether a slot is about to be free already."""
        return any(
            model.phase in (Phase.DRAINING, Phase.RELEASING) for model in world.models.values()
        )


class LlamaSwap(PeerRules):
    """A ready model that nobody is evicting serves at once, whoever waits; a swap that would stop
    a model with requests in flight waits until there are none; one load for all who wait."""

    name = "llama-swap"
    source = "internal/router/scheduler/fifo.go and design.md, at 0bdb3720"

    def decide(self, world: World) -> float | None:
        self.wake_first(world)
        for _, model in self.pending(world):
            if model.phase is not Phase.RESTING or self.has_free_slot(world):
                continue
            idle = [each for each in self.awake(world) if not each.running and not each.queue]
            if idle and not self.is_coming(world):
                world.drain(min(idle, key=lambda each: each.last_asked_ms))
        return None


class LlamaRouter(LlamaSwap):
    """Requests for a loaded model go to it; others queue by model, in the order of arrival, and the
    least recently used model without a request in flight is unloaded for them."""

    name = "llama.cpp router"
    source = "tools/server/server-models.cpp, LRU scheduler, at b11434"


class Ollama(PeerRules):
    """One pending request at a time: the ones behind it wait even if theirs would fit. Its victim
    is the idle runner with the shortest keep-alive, else any, which unloads once nothing uses it;
    a loaded model is used at once by whoever asks for it, also while it is to be unloaded."""

    name = "Ollama"
    source = "server/sched.go, at fb307609; its open deadlock (#17408) is left out"

    def __init__(self) -> None:
        self.victim: SimModel | None = None

    def decide(self, world: World) -> float | None:
        waiting = self.pending(world)
        if not waiting:
            self.victim = None
            return None
        _, model = waiting[0]
        if self.has_free_slot(world):
            self.victim = None
            if model.phase is Phase.RESTING:
                world.wake(model)
            return None
        if self.is_coming(world):
            return None
        if self.victim is None or self.victim.phase is not Phase.AWAKE:
            idle = [each for each in self.awake(world) if not each.running]
            candidates = idle or self.awake(world)
            self.victim = min(candidates, key=lambda each: each.last_asked_ms, default=None)
        if self.victim is not None and not self.victim.running and not self.victim.queue:
            world.drain(self.victim)
        return None


class LlmuxFifo(PeerRules):
    """The first request for another model switches, after the active one had its least time; what
    runs is waited for, and new requests for it queue. One switch after the other, by arrival."""

    name = "llmux fifo"
    source = "src/policy/fifo.rs, llmux 0.3 to 2.4; min_active 5 s"
    min_active_ms = 5_000.0

    def decide(self, world: World) -> float | None:
        self.wake_first(world)
        for request, model in self.pending(world):
            if self.has_free_slot(world) or self.is_coming(world):
                return None
            awake = self.awake(world)
            if not awake:
                return None
            victim = min(awake, key=lambda each: each.since_ms)
            due_ms = max(
                victim.since_ms + self.min_active_ms,
                self.switches_at(world, request, model, victim),
            )
            if world.now_ms < due_ms:
                return due_ms
            world.drain(victim)
        return None

    def switches_at(
        self, world: World, request: Request, model: SimModel, victim: SimModel
    ) -> float:
        """From when this request may switch."""
        return world.now_ms


class LlmuxCostAware(LlmuxFifo):
    """As before, but a switch waits for enough requests or for two seconds, and the active model
    serves at least as long as a switch takes; after 15 s of waiting it switches in any case."""

    name = "llmux cost-aware"
    source = "src/policy/cost_aware.rs of llmux 0.4, with its default figures"
    window_ms, factor, max_wait_ms = 2_000.0, 0.5, 15_000.0

    def switches_at(
        self, world: World, request: Request, model: SimModel, victim: SimModel
    ) -> float:
        cost_ms = model.costs.wake_ms + victim.costs.release_ms
        needed = max(1, math.ceil(self.factor * cost_ms / 1000))
        served_ms = victim.since_ms + cost_ms
        enough_ms = request.counts_ms if len(model.queue) >= needed else math.inf
        window_ms = request.counts_ms + self.window_ms
        stale_ms = request.counts_ms + self.max_wait_ms
        return min(stale_ms, max(served_ms, min(enough_ms, window_ms)))


class GreenThread(PeerRules):
    """A victim must have served for `minRuntime`; the one asked least recently, after the waiting
    one has waited for `maxWaitTime`. Its door answers 503 while it drains, for 30 s at most, and
    then what runs is cut. Without a victim the wake fails."""

    name = "GF"
    source = "seeds/greenthread-fairness.md: minRuntime 10 s, maxWaitTime 5 s, drainTimeout 30 s"
    min_runtime_ms, max_wait_ms, drain_ms = 10_000.0, 5_000.0, 30_000.0

    def admits(self, world: World, model: SimModel) -> bool:
        return model.phase not in (Phase.DRAINING, Phase.RELEASING)

    def decide(self, world: World) -> float | None:
        due = []
        for model in world.models.values():
            if model.phase is Phase.DRAINING:
                end_ms = model.since_ms + self.drain_ms
                if world.now_ms >= end_ms:
                    world.cut(model)
                else:
                    due.append(end_ms)
                world.refuse(model)
        self.wake_first(world)
        for request, model in self.pending(world):
            if model.phase is not Phase.RESTING or self.has_free_slot(world):
                continue
            if self.is_coming(world):
                break
            asks_ms = request.counts_ms + self.max_wait_ms
            if world.now_ms < asks_ms:
                due.append(asks_ms)
                continue
            old = [
                each
                for each in self.awake(world)
                if world.now_ms >= each.since_ms + self.min_runtime_ms
            ]
            if old:
                world.drain(min(old, key=lambda each: each.last_asked_ms))
            elif not any(each.phase is Phase.WAKING for each in world.models.values()):
                world.refuse(model)
        return min(due, default=None)


class ModelBoss(PeerRules):
    """A queue by priority, then arrival; a model yields only without a request in flight and if its
    priority is not better, and two seconds pass for the device to take its memory back."""

    name = "MB"
    source = "seeds/model-boss-architecture.md"
    reclaim_ms = 2_000.0

    def __init__(self) -> None:
        self.reclaimed_ms = 0.0

    def decide(self, world: World) -> float | None:
        if world.now_ms < self.reclaimed_ms:
            return self.reclaimed_ms
        waiting = sorted(
            self.pending(world), key=lambda pair: (pair[0].client.priority, pair[0].counts_ms)
        )
        for _, model in waiting:
            if model.phase is not Phase.RESTING:
                continue
            if self.has_free_slot(world):
                world.wake(model)
                continue
            idle = [each for each in self.awake(world) if not each.running and not each.queue]
            if idle and not self.is_coming(world):
                world.drain(min(idle, key=lambda each: each.last_asked_ms))
                self.reclaimed_ms = world.now_ms + self.reclaim_ms
                return self.reclaimed_ms
        return None


PEERS: tuple[type[PeerRules], ...] = (
    *(LlamaSwap, LlamaRouter, Ollama, LlmuxFifo, LlmuxCostAware),
    *(GreenThread, ModelBoss),
)
