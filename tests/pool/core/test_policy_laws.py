"""Goal: what must hold of every plan, whatever the pool. Method: random pools that are consistent
(Hypothesis), and the law read off the views, not off the policy's code."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbing.pod.messages import Tier
from pool.core.demand import TicketView, level_of
from pool.core.model import Leaving
from pool.core.states import ModelState
from pool.core.who_wakes import Never, Raise, Wait, Yield, plan
from tests.pool.core.views import GIB, NO_MARGIN, a_model, devices_of

S = ModelState
NOW = 1_000_000.0
RAISABLE = (S.COLD, S.OFFLOADED, S.WARM, S.PENDING)
DOWN = (S.DRAINING, S.RELEASING, S.UNLOADING)
TIMES = st.sampled_from([0.0, 300.0, 2_000.0, 4_000.0, 9_000.0, 11_000.0, 70_000.0, 200_000.0])
TIER_ORDER = [Tier.COLD, Tier.OFFLOADED, Tier.WARM, Tier.AWAKE]


@st.composite
def pools(draw):
    """Models in any state, on devices that hold at least what is booked."""
    count = draw(st.integers(1, 3))
    names = [str(number) for number in range(count)]
    models = [_model(draw, f"m{number}", names) for number in range(draw(st.integers(1, 6)))]
    totals = {}
    for name in names:
        (device,) = devices_of(models, {name: 0}).values()
        totals[name] = -device.free_bytes // GIB + draw(st.integers(0, 12))
    return models, devices_of(models, totals)


def _model(draw, name, devices):
    state = draw(st.sampled_from(list(S)))
    tier = {S.PENDING: draw(st.sampled_from(TIER_ORDER[:3]))}.get(state)
    if state in DOWN:
        tier = Tier.COLD if state is S.UNLOADING else draw(st.sampled_from(TIER_ORDER[1:3]))
    must_wait = state is S.PENDING
    waits = must_wait or draw(st.booleans())
    on = draw(st.lists(st.sampled_from(devices), min_size=1, max_size=2, unique=True))
    has_plan = state in RAISABLE and waits and draw(st.integers(0, 4)) == 0
    return a_model(
        name,
        state,
        tier=tier,
        base=draw(st.integers(0, 2)),
        weights=draw(st.integers(0, 6)),
        kv=draw(st.integers(1, 8)),
        on=on,
        waits_since=NOW - draw(TIMES) if waits else None,
        priority=draw(st.integers(-1, 1)),
        rules={"is_pinned": draw(st.integers(0, 5)) == 0},
        awake_since_ms=NOW - draw(TIMES) if state is S.AWAKE else None,
        last_request_ms=NOW - draw(TIMES),
        in_flight=draw(st.integers(0, 2)) if state in (S.AWAKE, S.DRAINING) else 0,
        has_plan=has_plan,
        has_copy=draw(st.booleans()),
        is_raised_for_ticket=state in (S.LOADING, S.WAKING) and waits,
        is_again=state is S.LOADING and draw(st.booleans()),
        leaving=draw(st.sampled_from(Leaving)) if state in DOWN else None,
        switch_ms=500.0,
    )


def extra_of(model):
    held = model.needs[model.tier] if model.state in DOWN else model.booked
    return {name: size - held.get(name, 0) for name, size in model.needs[Tier.AWAKE].items()}


def freed_by(victim, model):
    """What it gives, from where it would stay otherwise."""
    stays = model.state in (*RAISABLE, S.DRAINING, S.RELEASING)
    held = model.needs[model.tier] if stays else model.booked
    return {name: size - model.needs[victim.tier].get(name, 0) for name, size in held.items()}


def is_enough(head, victims, devices, by_name, raised=()):
    """Whether the head fits, of what is free, what leaves and what these give."""
    for name, more in extra_of(head).items():
        room = devices[name].free_bytes + devices[name].leaving_bytes
        room += sum(freed_by(each, by_name[each.model]).get(name, 0) for each in victims)
        room -= sum(max(0, extra_of(each).get(name, 0)) for each in raised)
        if more > max(room, 0):
            return False
    return True


def shallower(victim):
    return [
        msgspec.structs.replace(victim, tier=tier)
        for tier in TIER_ORDER[TIER_ORDER.index(victim.tier) + 1 : 3]
    ]


def what_is_raised_fits_at_once(models, devices, by_name, found):
    raised = [each for each in models if isinstance(found.decisions.get(each.name), Raise)]
    for name, device in devices.items():
        more = sum(max(0, extra_of(each).get(name, 0)) for each in raised)
        assert more <= max(device.free_bytes, 0)


def victims_are_allowed_to_be_asked(models, devices, by_name, found):
    """Nobody pinned or on its way up for a ticket, and nobody with work before its time."""
    for name, decision in found.decisions.items():
        head = by_name[name]
        for victim in decision.victims if isinstance(decision, Yield) else ():
            asked = by_name[victim.model]
            assert asked is not head
            assert not asked.rules.is_pinned
            assert asked.state not in (S.WAKING, S.UNLOADING, S.FAILED, S.COLD)
            if asked.state is S.LOADING:
                assert asked.ticket is None or asked.is_again
            quiet_ms = NOW - max(asked.last_request_ms, asked.awake_since_ms or 0.0)
            is_idle = not asked.in_flight and asked.ticket is None and quiet_ms >= 500.0
            if asked.state is S.AWAKE and not is_idle:
                assert NOW - asked.awake_since_ms >= asked.rules.min_runtime_ms
                assert NOW - head.ticket.since_ms >= head.rules.max_wait_ms
                level = level_of(head.ticket.priority, head.ticket.since_ms, NOW, NO_MARGIN)
                assert level <= asked.rules.priority


def victims_are_enough_and_none_too_many_or_too_deep(models, devices, by_name, found):
    for name, decision in found.decisions.items():
        if not isinstance(decision, Yield):
            continue
        head, victims = by_name[name], decision.victims
        assert is_enough(head, victims, devices, by_name)
        for victim in victims:
            others = [each for each in victims if each is not victim]
            assert not is_enough(head, others, devices, by_name)
            # A load can only be broken off.
            if by_name[victim.model].state is not S.LOADING:
                for less in shallower(victim):
                    is_copied = less.tier is not Tier.OFFLOADED or by_name[less.model].has_copy
                    assert not is_copied or not is_enough(head, [*others, less], devices, by_name)


def backfill_leaves_every_head_what_it_needs(models, devices, by_name, found):
    raised = [each for each in models if isinstance(found.decisions.get(each.name), Raise)]
    for name, decision in found.decisions.items():
        if isinstance(decision, Yield):
            assert is_enough(by_name[name], decision.victims, devices, by_name, raised)


def only_the_first_claim_of_a_device_evicts(models, devices, by_name, found):
    claimed = set()
    for name, decision in found.decisions.items():
        head = by_name[name]
        is_behind = isinstance(decision, Wait) and " is behind " in decision.why
        if isinstance(decision, Yield):
            assert claimed.isdisjoint(head.rules.devices)
        if is_behind or isinstance(decision, (Raise, Yield)):
            claimed.update(head.rules.devices)
    order = [
        (not by_name[name].has_plan, *_order(by_name[name].ticket), name)
        for name in found.decisions
    ]
    assert order == sorted(order)


LAWS = (
    what_is_raised_fits_at_once,
    victims_are_allowed_to_be_asked,
    victims_are_enough_and_none_too_many_or_too_deep,
    backfill_leaves_every_head_what_it_needs,
    only_the_first_claim_of_a_device_evicts,
)


@settings(max_examples=200, deadline=None)
@given(pools())
def test_every_plan_keeps_the_laws(pool):
    models, devices = pool
    by_name = {each.name: each for each in models}
    found = plan(NOW, models, devices, NO_MARGIN)
    for law in LAWS:
        law(models, devices, by_name, found)


def _order(ticket: TicketView):
    return level_of(ticket.priority, ticket.since_ms, NOW, NO_MARGIN), ticket.since_ms


@settings(max_examples=100, deadline=None)
@given(pools(), st.randoms(use_true_random=False))
def test_order_of_models_and_strangers_change_nothing(pool, random):
    """Goal: a pure function of the facts. Method: the models shuffled, and one more that is at rest
    on a device of its own."""
    models, devices = pool
    found = plan(NOW, models, devices, NO_MARGIN)
    stranger = a_model("stranger", on=("far",), last_request_ms=NOW)
    more = [*models, stranger]
    random.shuffle(more)
    other = plan(NOW, more, {**devices, **devices_of([stranger], {"far": 99})}, NO_MARGIN)
    assert [*other.decisions] == [*found.decisions]
    for name, decision in found.decisions.items():
        now = other.decisions[name]
        if not isinstance(decision, (Wait, Never)):
            assert now == decision
        else:
            assert type(now) is type(decision)
    assert set(other.rests) == set(found.rests)


@settings(max_examples=100, deadline=None)
@given(pools(), st.floats(0.0, 1.0))
def test_time_alone_changes_nothing_before_it_is_due(pool, part):
    models, devices = pool
    found = plan(NOW, models, devices, NO_MARGIN)
    later_ms = NOW + min(found.due_ms - NOW, 500_000.0) * part
    if later_ms >= found.due_ms:
        return
    later = plan(later_ms, models, devices, NO_MARGIN)
    assert later.rests == found.rests
    for name, decision in later.decisions.items():
        assert type(decision) is type(found.decisions[name])
        if not isinstance(decision, Yield):
            assert decision == found.decisions[name]
