"""P17 for every plan of the policy: who is raised out of turn leaves a head the room it counts on.

A head counts on what is free, what is leaving, and what its victims give. The pool's planner is an
argument of its constructor, so each plan is judged before it is obeyed. Written from the
specification: what a claim needs, and what a victim gives, is counted anew from what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plumbing.pod.messages import Tier
from pool.core import who_wakes
from pool.core.ledger import DeviceView
from pool.core.model import Model
from pool.core.states import ModelState, PoolRules
from pool.core.who_wakes import Plan, Raise, Wait, Yield

Sizes = Mapping[str, int]

GOES_DOWN = (ModelState.DRAINING, ModelState.RELEASING)


def judged_plan(
    now_ms: float,
    models: Sequence[Model],
    devices: Mapping[str, DeviceView],
    rules: PoolRules,
) -> Plan:
    plan = who_wakes.plan(now_ms, models, devices, rules)
    seen = {model.name: model for model in models}
    order = list(plan.decisions)
    raised = {name for name in order if isinstance(plan.decisions[name], Raise)}
    if not raised:
        return plan
    for place, name in enumerate(order):
        head = seen[name]
        if not is_head(head, plan, now_ms):
            continue
        counts_on = room_of(head, plan, seen, devices)
        before = [more_of(seen[each]) for each in order[:place] if each in raised]
        after = [more_of(seen[each]) for each in order[place:] if each in raised]
        taken = {device: sum(each.get(device, 0) for each in before) for device in devices}
        if not fits(more_of(head), counts_on, taken):
            continue  # it waits for something else as well
        late = {device: sum(each.get(device, 0) for each in after) for device in devices}
        together = {device: size + late[device] for device, size in taken.items()}
        assert fits(more_of(head), counts_on, together), (
            f"P17: {sorted(raised - set(order[:place]))} take the room that {name} waits for:"
            f" {plan.decisions[name]}"
        )
    return plan


def is_head(model: Model, plan: Plan, now_ms: float) -> bool:
    """Somebody makes room for it, or it waits for its turn with nobody before it."""
    match plan.decisions[model.name]:
        case Yield():
            return True
        case Wait(behind=""):
            is_trying = model.back_off_until_ms is None or model.back_off_until_ms <= now_ms
            return is_trying and model.state is not ModelState.UNLOADING
        case _:
            return False


def fits(more: Sizes, room: Sizes, taken: Sizes) -> bool:
    return all(size <= room.get(device, 0) - taken.get(device, 0) for device, size in more.items())


def more_of(model: Model) -> Sizes:
    """What it has to be given before it can be awake; on its way down, on top of where that
    ends. Nothing is known to be enough for a model of unknown size."""
    needs = model.needs.get(Tier.AWAKE)
    if needs is None:
        return dict.fromkeys(model.rules.devices, 1 << 62)
    held = model.needs.get(model.tier, {}) if model.state in GOES_DOWN else model.booked
    more = {device: size - held.get(device, 0) for device, size in needs.items()}
    return {device: size for device, size in more.items() if size > 0}


def room_of(
    head: Model, plan: Plan, seen: Mapping[str, Model], devices: Mapping[str, DeviceView]
) -> Sizes:
    room = {name: device.free_bytes + device.leaving_bytes for name, device in devices.items()}
    match plan.decisions[head.name]:
        case Yield(victims=victims):
            given = [given_by(seen[each.model], each.tier) for each in victims]
        case Wait(victims=names) if names:  # not asked yet: how deep is not said
            given = [given_by(seen[name], Tier.COLD) for name in names]
        case _:
            given = []
    for device in room:
        room[device] += sum(each.get(device, 0) for each in given)
    return room


def given_by(victim: Model, tier: Tier) -> Sizes:
    kept = victim.needs.get(tier, {})
    return {device: max(0, size - kept.get(device, 0)) for device, size in victim.booked.items()}
