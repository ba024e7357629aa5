"""How long each state of a model may last.

A budget that is spent ends in a kill, so each is generous: 60 s, or twice what it took before. What
ends first, and better, is the policy's.
"""

from __future__ import annotations

from plumbing.pod.messages import Tier
from pool.core.events import Running
from pool.core.known import KnownModel
from pool.core.states import ModelState

BUDGET_MS = 60_000.0  # the least that anything is given
BUDGET_FACTOR = 2.0  # of what it took before
FIRST_LOAD_MS = 1_800_000.0  # of a first load, which nobody has measured: large models take minutes
CUT_MS = 10_000.0  # from the marked error of the last requests to the kill
HEADLESS_MS = 60_000.0  # for the lock server to grant a living shadow
BACK_OFF_MS = (1_000.0, 5_000.0)  # after the first fault, and the next ones


def budget_ms(measured_ms: float | None) -> float:
    return max(BUDGET_MS, BUDGET_FACTOR * (measured_ms or 0.0))


def load_budget_ms(known: KnownModel) -> float:
    measured_ms = known.costs.load_ms
    return FIRST_LOAD_MS if measured_ms is None else budget_ms(measured_ms)


def raise_budget_ms(known: KnownModel) -> float:
    """From where it is to awake."""
    floor = known.model.floor
    wake_ms = budget_ms(known.costs.waking_ms(floor))
    return wake_ms if floor is not Tier.COLD else load_budget_ms(known) + wake_ms


def deadline_ms(known: KnownModel) -> float | None:
    """When the state that it is in, or the stage of its drain, has lasted too long."""
    model, rules = known.model, known.rules
    match model.state:
        case ModelState.LOADING if is_machines_fault(known):
            return None
        case ModelState.LOADING:
            return model.since_ms + load_budget_ms(known)
        case ModelState.WAKING:
            return model.since_ms + budget_ms(known.costs.waking_ms(model.floor))
        case ModelState.DRAINING if known.is_unload_ordered and model.running is not Running.CUT:
            # Nobody waits for a next turn in which parked streams would go on: they may finish.
            is_over = model.running is Running.PARK
            finish_ms = 0.0 if is_over else rules.cut_ms
            return None if finish_ms is None else model.since_ms + finish_ms
        case ModelState.DRAINING if model.running is Running.FINISH:
            return model.since_ms + rules.park_ms
        case ModelState.DRAINING if model.running is Running.PARK:
            if rules.cut_ms is None:
                return None
            return model.since_ms + max(0.0, rules.cut_ms - rules.park_ms)
        case ModelState.DRAINING:
            return model.since_ms + CUT_MS
        case ModelState.RELEASING:
            return model.since_ms + budget_ms(known.costs.release_ms)
        case ModelState.UNLOADING:
            return model.since_ms + budget_ms(None)
        case _:
            return None


def is_machines_fault(known: KnownModel) -> bool:
    """Whether it waits for a disk: its supervisor tries again each second."""
    said = known.main().said
    return said is not None and said.is_machine


def back_off_ms(known: KnownModel) -> float:
    """After its last fault, or one of the machine: for so long others may have its room."""
    return BACK_OFF_MS[min(len(known.model.faults_ms), len(BACK_OFF_MS)) - 1]
