"""What the facts about a model lead to next, one step at a time.

Level-triggered like the messages: the state of now decides, not the last message. So a message that
was lost, repeated or late costs nothing. It does not depend on the plan.
"""

from __future__ import annotations

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.events import OpenDoor, ShutDoor
from pool.core.facts import Facts
from pool.core.model import HEADLESS_MS, NEXT_STAGE, PARKED, Model, lower
from pool.core.states import FALLING, REST, RISING, ModelState

S = ModelState


def next_step(facts: Facts, model: Model) -> bool:
    """Do what the facts about a model lead to, one thing at a time; False: nothing."""
    return (
        _stands(facts, model)
        or _wanted(facts, model)
        or _too_large(facts, model)
        or _reported(facts, model)
        or _quiet(facts, model)
        or _freed(facts, model)
        or _spent(facts, model)
        or facts.unload(model)
    )


def _stands(facts: Facts, model: Model) -> bool:
    """Whether who stood for it does no more: another engine took over, or all have died."""
    holder, stander, now_ms = model.holder, model.stander(), facts.now_ms
    if model.stood is None:
        if stander is not None:
            model.stood = stander.name, stander.incarnation
        return _died_unseen(facts, model)
    model.lost = None
    name, incarnation = model.stood
    if holder is not None and holder.engine != name:
        model.stood, model.headless_ms = (holder.engine, ""), None
        return _taken_over(facts, model, f"{holder.engine} took over from {name}")
    if not incarnation and stander is not None:
        model.stood = name, incarnation = stander.name, stander.incarnation
    if not _is_gone(model, name, incarnation):
        model.headless_ms = None
        return False
    if any(engine.name != name for engine in model.living()):
        model.headless_ms = now_ms if model.headless_ms is None else model.headless_ms
        if now_ms < model.headless_ms + HEADLESS_MS:
            return False  # the lock server will name it
    model.stood = model.headless_ms = None
    return _died(facts, model, name, incarnation)


def _taken_over(facts: Facts, model: Model, reason: str) -> bool:
    match model.state:
        case S.AWAKE:
            model.is_serving, model.is_again = False, True
            facts.settle(model, reason)
        case S.WAKING:
            model.add_fault(facts.now_ms, reason)
        case S.DRAINING:
            # Until every gateway obeys the shut door the successor may serve: the drain goes on.
            model.is_serving, model.is_again = False, True
        case _:
            return False
    facts.touch(model.name)
    return True


def _is_gone(model: Model, name: str, incarnation: str) -> bool:
    engine = model.engine(name)
    if engine is None or engine.said is None:
        return False  # nobody has said anything
    if not incarnation:
        return model.holder is None  # granted, and gone before it was heard
    return engine.incarnation != incarnation


def _died_unseen(facts: Facts, model: Model) -> bool:
    """One of its engines has died, and none had stood for it. While it is recovering, one that has
    not been heard may live, and serve."""
    if model.lost is None or model.is_recovering:
        return False
    (name, incarnation), model.lost = model.lost, None
    if any(engine.name != name for engine in model.living()):
        return False
    return _died(facts, model, name, incarnation)


def _died(facts: Facts, model: Model, name: str, incarnation: str) -> bool:
    """The last of its engines has ended. On the way down nobody needs it again."""
    if model.state not in (S.LOADING, *REST, S.WAKING, S.AWAKE, S.DRAINING, S.RELEASING):
        return False
    engine = model.engine(name)
    said = engine.said if engine is not None else None
    fault = f": {said.fault}" if said is not None and said.fault else ""
    reason, is_fault = f"{name} has died{fault}", False
    if model.goal is Tier.COLD:
        reason = model.reason  # it obeys
    elif engine is not None and incarnation and engine.leaving == incarnation:
        reason = f"{name} was told to stop"
    else:
        is_fault = said is None or not said.is_machine
    if model.state in FALLING:
        facts.fall(model, Tier.COLD, reason, S.UNLOADING)
        return True
    if is_fault:
        is_permanent = said is not None and said.is_permanent and bool(said.fault)
        model.add_fault(facts.now_ms, reason, is_permanent=is_permanent)
        model.blamed = name
    elif model.is_machines_fault:
        model.back_off(facts.now_ms)
    if model.state is not S.LOADING:
        model.floor, model.is_serving, model.is_again = Tier.COLD, False, True
    elif not is_fault:
        # Another launch, with a budget of its own; others may have its room meanwhile.
        model.stage_since_ms, model.is_again = facts.now_ms, True
    facts.settle(model, reason)
    return True


def _wanted(facts: Facts, model: Model) -> bool:
    is_wanted = facts.ticket_of(model) is not None
    if is_wanted is model.is_wanted or not (is_wanted or facts.demand.is_heard):
        return False
    model.is_wanted = is_wanted
    who = "a request waits" if facts.demand.tickets(model.name) else "an operator has asked"
    facts.settle(model, f"{who} for it" if is_wanted else "no request waits for it any more")
    return True


def _too_large(facts: Facts, model: Model) -> bool:
    """What was measured while it loads is above the estimate and does not fit: it must not wake
    into memory that others have.

    A device or an engine that has not been heard since the pool started proves nothing. Behind an
    open door the engine may serve already, so it keeps its goal.
    """
    if model.state is not S.LOADING or model.goal is not Tier.AWAKE:
        return False
    if model.is_recovering or isinstance(model.door, OpenDoor):
        return False
    ledger, devices = facts.ledger, model.rules.devices
    if not all(ledger.is_known(device) for device in devices):
        return False
    if all(ledger.free_bytes(device) >= 0 for device in devices):
        return False
    # It comes to rest, and then waits for room.
    model.goal, model.is_raised_for_ticket = Tier.WARM, False
    facts.settle(model, model.reason)
    return True


def _reported(facts: Facts, model: Model) -> bool:
    """What the engine that stands for it says of its tier, if it obeys our last goal."""
    engine = model.stander()
    if engine is not None and engine.said is not None and engine.has_obeyed:
        said = engine.said
        match model.state:
            case S.LOADING if model.goal is Tier.AWAKE and said.tier is not Tier.COLD:
                model.floor = lower(said.tier, Tier.WARM)
                facts.settle(model, f"{engine.name} is ready")
                return True
            case S.LOADING if said.tier is model.goal and said.state in PARKED:
                model.floor = said.tier
                facts.settle(model, f"{engine.name} is ready")
                return True
            case S.WAKING if said.state == "active":
                model.is_serving = True
                facts.settle(model, f"{engine.name} serves")
                return True
    return _failed_for_good(facts, model)


def _failed_for_good(facts: Facts, model: Model) -> bool:
    """A fault that no further try would cure."""
    if model.state not in RISING:
        return False
    engine = model.main()
    said = engine.said
    is_final = said is not None and bool(said.fault) and said.is_permanent and engine.has_obeyed
    if said is None or not is_final or any(True for _ in model.living()):
        return False
    model.add_fault(facts.now_ms, f"{engine.name}: {said.fault}", is_permanent=True)
    facts.kill(model, model.fault)
    return True


def _quiet(facts: Facts, model: Model) -> bool:
    """Nothing is in flight, by both counts, behind a door that every gateway obeys."""
    if model.falls_to is None or model.state is not S.DRAINING:
        return False
    engine, is_shut = model.stander(), isinstance(model.door, ShutDoor)
    if engine is None or engine.said is None or not engine.is_connected or engine.said.in_flight:
        return False
    if not is_shut or not facts.demand.is_quiet(model.name, model.door_number):
        return False
    facts.fall(model, model.falls_to, model.reason, S.RELEASING)
    return True


def _freed(facts: Facts, model: Model) -> bool:
    if model.frees is None:
        return False
    wanted = facts.ledger.entries_at(model, model.goal)
    if any(key not in wanted for key in facts.ledger.booked(model)):
        return False
    if model.frees is S.UNLOADING:
        model.has_failed = model.is_exhausted(facts.now_ms)
    model.frees = None
    facts.settle(model, model.reason)
    return True


def _spent(facts: Facts, model: Model) -> bool:
    """A budget is spent."""
    now_ms = facts.now_ms
    if model.state in RISING and model.is_exhausted(now_ms):
        model.add_fault(now_ms, model.fault)
        facts.kill(model, model.fault)
        return True
    due_ms = model.deadline_ms()
    if due_ms is None or now_ms < due_ms:
        return False
    spent_s = (now_ms - model.stage_since_ms) / 1000
    reason = f"{model.state} for {spent_s:.0f} s: {model.reason}"
    match model.state:
        case S.LOADING | S.WAKING:
            model.add_fault(now_ms, reason)
            facts.kill(model, reason)
        case S.DRAINING if model.running in NEXT_STAGE:
            model.running, model.stage_since_ms = NEXT_STAGE[model.running], now_ms
            facts.touch(model.name)
        case S.DRAINING | S.RELEASING:
            facts.kill(model, reason)
        case _:
            _alarm(facts, model)
    return True


def _alarm(facts: Facts, model: Model) -> None:
    """Memory does not come back: it stays booked, and nobody counts on it."""
    model.stage_since_ms = facts.now_ms
    facts.touch(model.name)
    why = facts.ledger.why_not_free(model) or "its memory is not proven to be free"
    model.alarm = f"model {model.name} was unloaded and still has memory: {why}"
    facts.say(ev.Alarm("pool.memory_not_freed", model.name, model.alarm))


def begin_turn(facts: Facts, model: Model) -> None:
    """Its protection counts from when its streams have resumed: one that only replays its streams
    in each turn would never get on. What that takes is part of the raise."""
    if model.awake_since_ms is None or model.turn_since_ms is not None:
        return
    if facts.demand.is_resuming(model.name):
        model.has_resumed = True
        if facts.now_ms < model.raise_due_ms:
            return
    model.turn_since_ms = facts.now_ms
    if model.has_resumed:
        model.costs.learn("resume_ms", facts.now_ms - model.awake_since_ms)
    model.has_resumed = False
