"""Who is woken next: the plan, a pure function of what is so now.

    claims      models with a ticket that are below awake; those whose plan stands first, then by
                level and age
    head        a claim that could fit, with no claim before it on its devices: it may evict
    backfill    any other claim, if it fits into room that no head needs

Nothing is remembered from one call to the next. That a plan stands is the bit `has_plan` of its
model, set when `Yield` is obeyed: then the head goes first, whatever came since,
until it is awake, gone or impossible. A model that is booked and on its way up blocks none.

The surprising thing: a claim that cannot fit claims nothing. If only what never yields is in its
way (pinned models, leases, strangers) its tickets are told so at once; if it is memory that no
engine can be asked for (of an engine that is lost, say), it waits, and others go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from msgspec import Struct

from plumbing.pod.messages import Tier
from plumbing.text import duration, size
from pool.core import who_yields
from pool.core.demand import next_change_ms, order_of
from pool.core.ledger import DeviceView
from pool.core.model import LEASE_PREFIX, Leaving, Model
from pool.core.states import FALLING, HOST, NEVER_MS, REST, ModelState, PoolRules
from pool.core.who_sleeps import Victim, rests_of
from pool.core.who_yields import (
    IDLE_MS_MAX,
    Candidate,
    Head,
    idle_after_ms,
    protection_ms,
    spares,
    unloads,
)

MAY_BE_RAISED = frozenset({ModelState.COLD, *REST, ModelState.PENDING})
_CLAIMS_NOTHING = frozenset({ModelState.AWAKE, ModelState.WAKING, ModelState.FAILED})


class Raise(Struct, frozen=True):
    """Book it to `AWAKE` and raise it now."""


class Yield(Struct, frozen=True):
    """Ask these, then look again when memory is free. Empty: those that were asked suffice."""

    victims: tuple[Victim, ...]


class Wait(Struct, frozen=True):
    """Look again when something has changed, or the plan is due. `why`: a sentence for operators,
    which does not change while the reason is the same (so it names no remaining time). `victims`:
    models that are going to be asked then; `behind`: the model, or lease, that goes first."""

    why: str
    victims: tuple[str, ...] = ()
    behind: str = ""


class Never(Struct, frozen=True):
    """It fits only if something goes that never does by itself. `why` says who holds what."""

    why: str


Decision = Raise | Yield | Wait | Never


class Plan(Struct, frozen=True):
    """`decisions`: for each model with a ticket that is not awake or on its way up, in the order of
    the policy. `rests`: models that go down because they had no requests. `unyields`: models
    whose room no head needs any more, and that still drain. `due_ms`: when time alone changes the
    plan."""

    decisions: Mapping[str, Decision]
    rests: tuple[Victim, ...] = ()
    unyields: tuple[str, ...] = ()
    due_ms: float = NEVER_MS


def plan(
    now_ms: float,
    models: Sequence[Model],
    devices: Mapping[str, DeviceView],
    rules: PoolRules,
) -> Plan:
    """What each claim is to do, and who rests."""
    return _Planner(now_ms, models, devices, rules).plan()


@dataclass
class _Planner:
    """One call. `free` shrinks as models are raised; `room` is what of it no head needs."""

    now_ms: float
    models: Sequence[Model]
    devices: Mapping[str, DeviceView]
    rules: PoolRules

    def __post_init__(self) -> None:
        models, devices = self.models, self.devices
        self.free = {name: device.free_bytes for name, device in devices.items()}
        self.room = dict(self.free)
        self.claimed: dict[str, Head] = {}
        self.waiting: list[Head] = []  # heads that are not raised in this call
        self.going: set[str] = set()  # models that a head asks, or will ask
        self.asked: set[str] = set()
        self.due_ms = NEVER_MS
        self.held_for_ever = dict.fromkeys(devices, 0)
        self.models_on: dict[str, list[Model]] = {HOST: [*models]}
        for model in models:
            for name in model.rules.devices:
                self.models_on.setdefault(name, []).append(model)
            if model.is_pinned:
                for name, size_bytes in model.booked.items():
                    self.held_for_ever[name] = self.held_for_ever.get(name, 0) + size_bytes

    def plan(self) -> Plan:
        decisions: dict[str, Decision] = {}
        blocked: list[tuple[Head, Head]] = []
        claims = self._claims()
        for claim in claims:
            name = claim.model.name
            excluded, before = self._excluded(claim), self._before(claim)
            if excluded is not None:
                decisions[name] = excluded
            elif before is None:
                decisions[name] = self._head(claim)
            else:
                decisions[name] = Wait("")  # its place in the order
                blocked.append((claim, before))
                self._claim(claim)
        for claim, before in blocked:
            decisions[claim.model.name] = self._backfill(claim, before)
        unyields = self._unyields()
        rests, rest_due_ms = rests_of(self.models, self.asked, self.now_ms)
        tickets = [claim.ticket for claim in claims]
        order_due_ms = next_change_ms(tickets, None, self.now_ms, self.rules)
        due_ms = min(self.due_ms, rest_due_ms, order_due_ms)
        return Plan(decisions, rests, unyields, due_ms)

    # ------------------------------------------------------------------ who claims what

    def _claims(self) -> list[Head]:
        found = []
        for model in self.models:
            if model.ticket is None or model.is_blind or model.state in _CLAIMS_NOTHING:
                continue
            if model.state is ModelState.LOADING and model.is_raised_for_ticket:
                continue
            extra = self._extra(model)
            if model.state is ModelState.LOADING and not extra:
                continue
            for name in model.rules.devices:  # overbooked: sizes were measured above the estimate
                if self.free.get(name, 0) < 0:
                    extra.setdefault(name, 0)
            places = model.rules.devices
            if HOST in extra and HOST not in places:
                places = (*places, HOST)
            order = order_of(model.ticket, self.now_ms, self.rules)
            found.append(Head(model, model.ticket, order, extra, places))
        found.sort(key=lambda claim: (not claim.model.has_plan, claim.order, claim.model.name))
        return found

    def _before(self, claim: Head) -> Head | None:
        """The first claim on one of its devices."""
        for name in claim.places:
            if name in self.claimed:
                return self.claimed[name]
        return None

    def _claim(self, claim: Head) -> None:
        for name in claim.places:
            self.claimed.setdefault(name, claim)

    def _extra(self, model: Model) -> dict[str, int]:
        """What is to be booked to raise it; on its way down, on top of where that ends. Of unknown
        size, it takes all of its devices."""
        needs = model.needs.get(Tier.AWAKE)
        if needs is None:
            measured = [self.devices[it] for it in model.rules.devices if it in self.devices]
            needs = {device.name: device.usable_bytes for device in measured}
        held = model.needs.get(model.tier, {}) if model.state in FALLING else model.booked
        return {
            name: needed - held.get(name, 0)
            for name, needed in needs.items()
            if needed > held.get(name, 0)
        }

    def _excluded(self, claim: Head) -> Decision | None:
        """The decision on a claim that can be no head now, whatever is before it."""
        model = claim.model
        for name in claim.places:
            if name not in self.devices:
                return Wait(f"device {name} has not been measured yet")
        back_off_ms = model.back_off_until_ms
        if back_off_ms is not None and back_off_ms > self.now_ms:
            self.due_ms = min(self.due_ms, back_off_ms)
            return Wait(f"{model.name} has failed; the pool retries it soon")
        if model.state is ModelState.UNLOADING:
            return Wait(f"{model.name} is being unloaded")
        for name, more in claim.extra.items():
            needed = more if model.state in FALLING else more + model.booked.get(name, 0)
            others = self.held_for_ever[name]
            if model.is_pinned:
                others -= model.booked.get(name, 0)
            if needed > self.devices[name].usable_bytes - others:
                return Never(never(model, needed, self.devices[name], self.models))
        return None

    # ------------------------------------------------------------------ heads

    def _head(self, claim: Head) -> Decision:
        model, extra = claim.model, claim.extra
        if model.state not in MAY_BE_RAISED:
            self._reserve(claim)
            return Wait(_moving(model))
        if self._raises(claim, self.free):
            return Raise()
        short = {}
        for name, more in extra.items():
            missing = more - self.free[name] - self.devices[name].leaving_bytes
            if missing > 0:
                short[name] = missing
        if not short:
            self._reserve(claim)
            return Yield(())
        models = [*{each.name: each for name in short for each in self.models_on[name]}.values()]
        found = who_yields.candidates(claim, short, models, self.now_ms, self.rules)
        ready_ms = who_yields.ready_ms(found, short)
        if ready_ms is None:
            return Wait(stuck(claim, self.free, models))
        chosen = who_yields.choose([each for each in found if each.ready_ms <= ready_ms], short)
        last_ms = claim.ticket.since_ms + IDLE_MS_MAX
        if ready_ms <= self.now_ms < last_ms and unloads(chosen, models):
            ready_ms, chosen = spares(found, short, last_ms) or (ready_ms, chosen)
        self._reserve(claim, chosen, tuple(short))
        # Whom it asks, or waits for, changes whenever one of them becomes ready, or idle.
        changes_ms = [ready_ms, *(at for each in found for at in (each.ready_ms, each.idle_ms))]
        self.due_ms = min([self.due_ms, *(at_ms for at_ms in changes_ms if at_ms > self.now_ms)])
        if ready_ms <= self.now_ms:
            self.asked.update(victim.model for victim in chosen)
            return Yield(tuple(chosen))
        why = waiting(claim, self.free, found, chosen, self.rules)
        names = tuple(victim.model for victim in chosen)
        return Wait(why, names)

    def _raises(self, claim: Head, room: Mapping[str, int]) -> bool:
        """Whether it fits there; then it is booked."""
        if any(more > room[name] for name, more in claim.extra.items()):
            return False
        self._claim(claim)
        for name, more in claim.extra.items():
            self.free[name] -= more
            self.room[name] -= more
        return True

    def _reserve(
        self,
        claim: Head,
        chosen: Mapping[Victim, Sequence[int]] = MappingProxyType({}),
        short: tuple[str, ...] = (),
    ) -> None:
        """Others may have what is left once this head is raised, of what is free already."""
        self._claim(claim)
        self.waiting.append(claim)
        self.going.update(victim.model for victim in chosen)
        freed = dict(zip(short, map(sum, zip(*chosen.values(), strict=True)), strict=True))
        for name, more in claim.extra.items():
            coming = self.devices[name].leaving_bytes + freed.get(name, 0)
            self.room[name] = min(self.free[name], self.free[name] + coming - more)

    # ------------------------------------------------------------------ the others

    def _backfill(self, claim: Head, before: Head) -> Decision:
        model = claim.model
        if model.state not in MAY_BE_RAISED:
            return Wait(_moving(model), behind=before.model.name)
        if model.name not in self.going and self._raises(claim, self.room):
            return Raise()
        why = f"{name_of(model)} is behind {name_of(before.model)}"
        return Wait(why, behind=before.model.name)

    def _unyields(self) -> tuple[str, ...]:
        """Models that drain though no head waits there: asked for one that is gone, or put to sleep
        when a request came."""
        return tuple(
            model.name
            for model in self.models
            if model.state is ModelState.DRAINING
            and not model.is_blind
            and model.name not in self.going
            and (
                model.leaving is Leaving.HEAD
                or (model.leaving is Leaving.IDLE and model.ticket is not None)
            )
            and all(
                head.model is model or set(head.places).isdisjoint(model.booked)
                for head in self.waiting
            )
        )


# -------------------------------------------------------------------------------- why

# No sentence names a remaining time: it would be another one at every look.
_HARD_TO_MOVE = frozenset({ModelState.UNLOADING, ModelState.RELEASING, ModelState.FAILED})
NAMED_MAX = 4  # holders in one sentence: it is read by people


def never(model: Model, needed: int, device: DeviceView, models: Sequence[Model]) -> str:
    """Only what never yields is in the way."""
    parts = []
    for other in models:
        held = other.booked.get(device.name, 0)
        if held and other.is_pinned and other is not model:
            verb = "holds" if other.is_lease else "is pinned and holds"
            parts.append(f"{name_of(other)} {verb} {size(held)}")
    more = len(parts[NAMED_MAX:])
    parts[NAMED_MAX:] = [f"{more} more"] if more else []
    if device.outside_bytes:
        parts.append(f"{size(device.outside_bytes)} is used by programs outside the pool")
    margin_bytes = device.total_bytes - device.outside_bytes - device.usable_bytes
    if margin_bytes:
        parts.append(f"`margin` keeps {size(margin_bytes)} free")
    where = f"{_where(device.name)}, which has {size(device.total_bytes)}"
    return f"{name_of(model)} needs {size(needed)} {where}{': ' * bool(parts)}{', '.join(parts)}"


def waiting(
    head: Head,
    free: Mapping[str, int],
    found: Sequence[Candidate],
    chosen: Collection[Victim],
    rules: PoolRules,
) -> str:
    """A model that is needed cannot be asked yet, or is waited for rather than another unloaded."""
    names = {victim.model for victim in chosen}
    parts = [
        each.obstacle.format(
            name=each.model.name,
            state=each.model.state.value,
            quiet=duration(idle_after_ms(each.model)),
            turn=duration(protection_ms(each.model, rules)),
            wait=duration(head.model.rules.max_wait_ms),
        )
        for each in found
        if each.model.name in names and each.obstacle
    ]
    return _wants(head, free, parts or [f"work of {', '.join(sorted(names))} may end soon"])


def stuck(head: Head, free: Mapping[str, int], models: Iterable[Model]) -> str:
    """No model that could be asked has enough, and it is not held for ever either."""
    parts = []
    for other in models:
        held = sum(other.booked.get(name, 0) for name in head.extra)
        if held and other.name != head.model.name:
            if other.is_blind:
                parts.append(f"{other.name} is not fully known yet and holds {size(held)}")
            elif other.state in _HARD_TO_MOVE:
                parts.append(f"{other.name} is {other.state.value} and holds {size(held)}")
    return _wants(head, free, parts or ["processes that the pool cannot evict hold the rest"])


def _moving(model: Model) -> str:
    """It was asked to make room, or loads for no ticket, and cannot turn round any more."""
    return f"{model.name} is {model.state.value}; after that it waits for its turn"


def unheard(device: str) -> str:
    """Nothing is given away on a device of which something is not known yet."""
    where = _where(device)
    return f"an engine {where}, or the memory service, has not reported since the pool started"


def _wants(head: Head, free: Mapping[str, int], why: Sequence[str]) -> str:
    name = max(head.extra, key=lambda each: head.extra[each] - free[each])
    who, room = name_of(head.model), free[name]
    text = f"needs {size(head.extra[name])} more {_where(name)}, where {size(max(0, room))} is free"
    if room < 0:
        text = f"waits: {size(-room)} more is in use {_where(name)} than fits"
    return f"{who} {text}: {'; '.join(why[:NAMED_MAX])}"


def _where(device: str) -> str:
    return "in host memory" if device == HOST else f"on device {device}"


def name_of(model: Model) -> str:
    """As people know it."""
    if model.is_lease:
        return f"lease {model.name.removeprefix(LEASE_PREFIX)}"
    return model.name
