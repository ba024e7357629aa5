"""The states of one model as one table.

    cold ──want──▶ pending ──room──▶ loading ──is rest──▶ waking ──is awake──▶ awake
      ▲              ▲  └──room (floor offloaded, warm)──────▲                   │yield
      │              │                                                           ▼
      └── offloaded, warm ◀──freed── releasing ◀──quiet── draining ◀─────────────┘
      └── failed ◀──freed── unloading ◀── spent, order, yield(cold), a death on the way down

`TRANSITIONS` is the enforcer: a pair that it lacks, or whose guard does not hold, raises
`IllegalModelSignal` and changes nothing. `machine.py` decides what gives a signal; only what the
kernel and the memory service have proven gives FREED. Must not know of engines, tickets or memory.

What a reader may not expect:

- `floor` is the tier that a model holds at rest and while it is pending. While it drains and
  releases, it is the tier to which it falls. `aim` is what it loads for: after a death at rest,
  that is its floor. TOO_LARGE lowers it: the model comes to rest, and then waits for room.
- SPENT in `draining` goes through three stages: finish, park, cut. Only then is it killed. A kill
  after the second one would cost requests that may still finish.
- A model that dies while it loads stays `loading`: its supervisor has launched the next incarnation
  already. `is_exhausted` says when that must end, and the machine then gives SPENT.
"""

from __future__ import annotations

from dataclasses import dataclass

from plumbing.errors import InvariantError
from plumbing.pod.messages import Tier
from pool.core.events import Running
from pool.core.model_table import (
    FAULT_WINDOW_MS,
    FAULTS_MAX,
    RANK,
    REST,
    TRANSITIONS,
    ModelFacts,
    ModelRow,
    ModelSignal,
)
from pool.core.states import ModelState

NEXT_STAGE = {Running.FINISH: Running.PARK, Running.PARK: Running.CUT}


def lower(one: Tier, other: Tier) -> Tier:
    return min(one, other, key=RANK.__getitem__)


class IllegalModelSignal(InvariantError):
    """A signal that the table does not have for this state. The state is unchanged."""


@dataclass(slots=True)
class Model(ModelFacts):
    """One model: `fire` is its only way to change."""

    def may(self, signal: ModelSignal, tier: Tier | None = None) -> bool:
        return self._row(signal, tier, self.since_ms) is not None

    def fire(
        self,
        signal: ModelSignal,
        now_ms: float,
        reason: str,
        *,
        tier: Tier | None = None,
        is_permanent: bool = False,
    ) -> bool:
        """Apply one signal; whether the state has changed.

        Raises:
            IllegalModelSignal: nothing has changed.
        """
        row = self._row(signal, tier, now_ms)
        if row is None:
            where = f"{signal}({tier})" if tier is not None else signal
            raise IllegalModelSignal(f"model {self.name}: {where} in state {self.state}")
        if row.is_fault:
            recent = [ms for ms in self.faults_ms if now_ms - ms < FAULT_WINDOW_MS]
            self.faults_ms = (*recent, now_ms)[-FAULTS_MAX:]
            self.fault, self.is_permanent = reason, self.is_permanent or is_permanent
        self._learn(signal, tier, now_ms)
        return self._enter(row.target, signal, now_ms, reason)

    def forgive(self) -> None:
        """The last fault was not its own."""
        self.faults_ms, self.is_permanent = self.faults_ms[:-1], False

    def _row(self, signal: ModelSignal, tier: Tier | None, now_ms: float) -> ModelRow | None:
        row = TRANSITIONS.get((self.state, signal))
        asked = tier or Tier.AWAKE
        for each in row.all() if row is not None else ():
            if each.when is None or each.when(self, asked, now_ms):
                return each
        return None

    def _learn(self, signal: ModelSignal, tier: Tier | None, now_ms: float) -> None:
        """What the signal says, apart from the state that it leads to."""
        match self.state, signal:
            case _, ModelSignal.WANT:
                self.is_wanted = True
            case _, ModelSignal.UNWANT:
                self.is_wanted = False
            case ModelState.AWAKE, ModelSignal.YIELD if tier is not None:
                self.floor = tier
            case _, ModelSignal.YIELD if tier is not None:
                self.floor = lower(self.floor, tier)
            case _, ModelSignal.ORDER_COLD:
                self.floor = Tier.COLD
            case ModelState.LOADING, ModelSignal.TOO_LARGE:
                self.aim = Tier.WARM
            case ((ModelState.LOADING | ModelState.COLD), ModelSignal.IS_REST) if tier is not None:
                self.floor = tier
            case ModelState.DRAINING, ModelSignal.SPENT:
                self.running = NEXT_STAGE.get(self.running, self.running)
                self.since_ms = now_ms
            case ModelState.UNLOADING, ModelSignal.SPENT:
                self.since_ms = now_ms
            case ModelState.LOADING, ModelSignal.LEFT:
                # Another launch, with a budget of its own; others may have its room meanwhile.
                self.since_ms, self.is_again = now_ms, True
            case _, ModelSignal.RESET:
                self.faults_ms, self.fault, self.is_permanent = (), "", False

    def _enter(self, target: ModelState, signal: ModelSignal, now_ms: float, reason: str) -> bool:
        before = self.state
        if target is before:
            return False
        match target:
            case ModelState.LOADING:
                self.aim = self.floor if before in REST else Tier.AWAKE
            case ModelState.DRAINING:
                self.running = Running.FINISH
            case ModelState.COLD | ModelState.UNLOADING | ModelState.FAILED:
                self.floor = Tier.COLD
        has_died = signal in (ModelSignal.DIED, ModelSignal.LEFT, ModelSignal.OVER)
        self.is_again = has_died or (self.is_again and target is ModelState.WAKING)
        self.state, self.since_ms, self.reason = target, now_ms, reason
        return True
