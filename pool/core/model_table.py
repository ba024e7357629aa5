"""The table of a model's states: which signal is legal in which state, and where it leads.

Owns `TRANSITIONS` and what it looks at (`ModelFacts`). `model.py` walks it, and says what a reader
may not expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from plumbing.pod.messages import Tier
from pool.core.events import Running
from pool.core.states import ModelState

RANK: Mapping[Tier, int] = {tier: rank for rank, tier in enumerate(Tier)}


class ModelSignal(StrEnum):
    """What happens to a model. `IS_REST` and `YIELD` come with a tier."""

    WANT = "want"  # the first ticket, or an order
    UNWANT = "unwant"  # the last one is gone
    ROOM = "room"  # all that its goal needs is booked
    TOO_LARGE = "too large"  # what was measured while it loads does not fit
    IS_REST = "is rest"  # the engine that stands for it is offloaded or warm
    IS_AWAKE = "is awake"
    YIELD = "yield"  # down to a tier
    UNYIELD = "unyield"  # nobody needs its room any more
    QUIET = "quiet"  # nothing is in flight, say gateway and engine
    FREED = "freed"  # all that was asked, say memory service and witness
    SPENT = "spent"  # a budget
    DIED = "died"  # the tree is dead, and nobody else stands
    # The same, but somebody has told the engine to stop, or a disk has failed it: no fault.
    LEFT = "left"
    OVER = "over"  # the shadow was granted
    RESET = "reset"
    ORDER_COLD = "order cold"


FAULTS_MAX = 3  # in FAULT_WINDOW_MS: then a model has failed, until somebody resets it
FAULT_WINDOW_MS = 600_000.0


@dataclass(slots=True)
class ModelFacts:
    """A model's state, and what decides where a signal leads."""

    name: str
    state: ModelState = ModelState.COLD
    floor: Tier = Tier.COLD
    aim: Tier = Tier.AWAKE  # of `loading`
    since_ms: float = 0.0  # in this state, or in this stage of a drain
    is_wanted: bool = False
    running: Running = Running.FINISH  # the stage of a drain
    is_again: bool = False  # it loads or wakes again, after a death
    is_recovering: bool = False  # nobody has said yet what it is
    faults_ms: tuple[float, ...] = ()  # when: those of the last ten minutes
    fault: str = ""  # the last one
    is_permanent: bool = False  # another try would end in the same way
    reason: str = ""  # for this state

    @property
    def goal(self) -> Tier:
        """What its engines are told."""
        match self.state:
            case ModelState.LOADING:
                return self.aim
            case ModelState.WAKING | ModelState.AWAKE | ModelState.DRAINING:
                return Tier.AWAKE
            case ModelState.COLD | ModelState.UNLOADING | ModelState.FAILED:
                return Tier.COLD
            case _:
                return self.floor

    def is_exhausted(self, now_ms: float) -> bool:
        """Whether it has failed too often to try again."""
        recent = [ms for ms in self.faults_ms if now_ms - ms < FAULT_WINDOW_MS]
        return self.is_permanent or len(recent) >= FAULTS_MAX


Guard = Callable[[ModelFacts, Tier, float], bool]  # `Tier.AWAKE` where the signal has no tier


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Where a signal leads, if `when` holds; else `otherwise`; without that it is illegal."""

    target: ModelState
    when: Guard | None = None
    otherwise: ModelRow | None = None
    is_fault: bool = False

    def all(self) -> tuple[ModelRow, ...]:
        """This row and those that may apply instead."""
        return (self, *(self.otherwise.all() if self.otherwise is not None else ()))


def _falls_to(tier: Tier) -> Guard:
    """It is asked to go down to `tier`, and holds more."""
    return lambda model, asked, _: asked is tier and RANK[model.floor] > RANK[tier]


def _is_below_awake(_model: ModelFacts, asked: Tier, _now_ms: float) -> bool:
    return asked is not Tier.AWAKE


def _may_be_unloaded(model: ModelFacts, asked: Tier, _now_ms: float) -> bool:
    """While it loads for somebody, only if it loads again after a death."""
    return asked is not Tier.AWAKE and (model.is_again or not model.is_wanted)


def _aims_awake(model: ModelFacts, _tier: Tier, _now_ms: float) -> bool:
    return model.aim is Tier.AWAKE


def _is_wanted(model: ModelFacts, _tier: Tier, _now_ms: float) -> bool:
    return model.is_wanted


def _is_recovering(model: ModelFacts, _tier: Tier, _now_ms: float) -> bool:
    return model.is_recovering


def _is_exhausted(model: ModelFacts, _tier: Tier, now_ms: float) -> bool:
    return model.is_exhausted(now_ms)


def _is_cut(model: ModelFacts, _tier: Tier, _now_ms: float) -> bool:
    return model.running is Running.CUT


def _floor_is(tier: Tier) -> Guard:
    return lambda model, _tier, _now_ms: model.floor is tier


def _says(tier: Tier) -> Guard:
    return lambda _model, said, _now_ms: said is tier


_S, _G = ModelState, ModelSignal
REST = (_S.OFFLOADED, _S.WARM)

# Where a model is that comes to rest: by what it holds (`_floor_is`), or by what is said (`_says`).
AT_FLOOR = ModelRow(
    _S.COLD,
    _floor_is(Tier.COLD),
    ModelRow(_S.OFFLOADED, _floor_is(Tier.OFFLOADED), ModelRow(_S.WARM)),
)
TO_FLOOR = ModelRow(_S.PENDING, _is_wanted, AT_FLOOR)
TO_SAID = ModelRow(_S.OFFLOADED, _says(Tier.OFFLOADED), ModelRow(_S.WARM, _says(Tier.WARM)))
KILLED = ModelRow(_S.UNLOADING)
FAULTY = ModelRow(_S.UNLOADING, is_fault=True)
RELOADED = ModelRow(_S.LOADING)
FAULTY_RELOADED = ModelRow(_S.LOADING, is_fault=True)


Transitions = Mapping[tuple[ModelState, ModelSignal], ModelRow]


def _yields_from(state: ModelState) -> ModelRow:
    """From a tier at rest: no deeper than it holds."""
    stays = ModelRow(state, _is_below_awake)
    goes = ModelRow(_S.RELEASING, _falls_to(Tier.OFFLOADED), stays)
    return ModelRow(_S.UNLOADING, _falls_to(Tier.COLD), goes)


def _stay(signal: ModelSignal, states: Iterable[ModelState]) -> Transitions:
    return {(state, signal): ModelRow(state) for state in states}


def _ends(signal: ModelSignal, again: ModelRow) -> Transitions:
    """The last engine of a model has ended. On the way down nobody needs it again."""
    return {
        **_stay(signal, (_S.COLD, _S.PENDING, _S.UNLOADING, _S.FAILED)),
        **{(state, signal): again for state in (_S.LOADING, *REST, _S.WAKING, _S.AWAKE)},
        **{(state, signal): KILLED for state in (_S.DRAINING, _S.RELEASING)},
    }


def _all_but(*states: ModelState) -> list[ModelState]:
    return [state for state in ModelState if state not in states]


TRANSITIONS: Transitions = {
    **_stay(_G.WANT, _all_but(_S.COLD, *REST)),
    **{(state, _G.WANT): ModelRow(_S.PENDING) for state in (_S.COLD, *REST)},
    **_stay(_G.UNWANT, _all_but(_S.PENDING)),
    (_S.PENDING, _G.UNWANT): AT_FLOOR,
    (_S.PENDING, _G.ROOM): ModelRow(_S.LOADING, _floor_is(Tier.COLD), ModelRow(_S.WAKING)),
    (_S.LOADING, _G.TOO_LARGE): ModelRow(_S.LOADING, _aims_awake),
    (_S.COLD, _G.IS_REST): ModelRow(
        _S.OFFLOADED,
        lambda model, said, _: model.is_recovering and said is Tier.OFFLOADED,
        ModelRow(_S.WARM, lambda model, said, _: model.is_recovering and said is Tier.WARM),
    ),
    (_S.LOADING, _G.IS_REST): ModelRow(
        _S.WAKING, _aims_awake, ModelRow(_S.PENDING, _is_wanted, TO_SAID)
    ),
    **_stay(_G.IS_REST, (*REST, _S.PENDING, _S.WAKING, _S.RELEASING, _S.UNLOADING)),
    (_S.COLD, _G.IS_AWAKE): ModelRow(_S.AWAKE, _is_recovering),
    (_S.WAKING, _G.IS_AWAKE): ModelRow(_S.AWAKE),
    **_stay(_G.IS_AWAKE, (_S.AWAKE, _S.DRAINING)),
    **{
        (state, _G.YIELD): ModelRow(state, _is_below_awake)
        for state in (_S.COLD, _S.DRAINING, _S.RELEASING, _S.UNLOADING, _S.FAILED)
    },
    (_S.LOADING, _G.YIELD): ModelRow(_S.UNLOADING, _may_be_unloaded),
    **{(state, _G.YIELD): _yields_from(state) for state in (*REST, _S.PENDING)},
    (_S.AWAKE, _G.YIELD): ModelRow(_S.DRAINING, _is_below_awake),
    **_stay(_G.UNYIELD, _all_but(_S.DRAINING)),
    (_S.DRAINING, _G.UNYIELD): ModelRow(_S.AWAKE),
    **_stay(_G.QUIET, _all_but(_S.DRAINING)),
    (_S.DRAINING, _G.QUIET): ModelRow(_S.RELEASING),
    (_S.RELEASING, _G.FREED): TO_FLOOR,
    (_S.UNLOADING, _G.FREED): ModelRow(
        _S.FAILED, _is_exhausted, ModelRow(_S.PENDING, _is_wanted, ModelRow(_S.COLD))
    ),
    (_S.LOADING, _G.SPENT): FAULTY,
    (_S.WAKING, _G.SPENT): FAULTY,
    (_S.DRAINING, _G.SPENT): ModelRow(_S.UNLOADING, _is_cut, ModelRow(_S.DRAINING)),
    (_S.RELEASING, _G.SPENT): KILLED,
    **_stay(_G.SPENT, (_S.UNLOADING,)),
    **_ends(_G.DIED, FAULTY_RELOADED),
    **_ends(_G.LEFT, RELOADED),
    **_stay(_G.OVER, (_S.LOADING, *REST, _S.PENDING, _S.RELEASING, _S.UNLOADING)),
    (_S.WAKING, _G.OVER): ModelRow(_S.WAKING, is_fault=True),
    (_S.AWAKE, _G.OVER): ModelRow(_S.WAKING),
    (_S.DRAINING, _G.OVER): ModelRow(_S.RELEASING),
    **_stay(_G.RESET, _all_but(_S.FAILED)),
    (_S.FAILED, _G.RESET): ModelRow(_S.COLD),
    **_stay(_G.ORDER_COLD, (_S.COLD, _S.DRAINING, _S.RELEASING, _S.UNLOADING, _S.FAILED)),
    **{(state, _G.ORDER_COLD): KILLED for state in (_S.LOADING, *REST, _S.PENDING, _S.WAKING)},
    (_S.AWAKE, _G.ORDER_COLD): ModelRow(_S.DRAINING),
}
