"""Goal: a model's table is the specification's, cell by cell.

Method: the matrix of the specification is written out below. Each cell names every outcome that it
may have; each outcome is produced, and nothing else is legal.
"""

import itertools
import re

import pytest

from plumbing.pod.messages import Tier
from pool.core.events import Running
from pool.core.model import TRANSITIONS, IllegalModelSignal, Model, ModelSignal
from pool.core.states import ModelState

S, G = ModelState, ModelSignal

# x: illegal; =: stays; otherwise the state that it leads to; with a ! behind it, it is a fault. A
# condition stands before a colon: cold, offloaded, warm: the floor is that; to-…: the signal's tier
# is that; wanted, awake (the aim), again, recovering, exhausted, cut: as the model's attributes
# say; with a ! before it: not. The first that fits counts; where none does, it is illegal.
MATRIX = """
            |cold|loading|offloaded|warm|pending|waking|awake|draining|releasing|unloading|failed
want        |pending|=|pending|pending|=|=|=|=|=|=|=
unwant      |=|=|=|=|cold:cold offloaded:offloaded warm:warm|=|=|=|=|=|=
room        |x|x|x|x|cold:loading waking|x|x|x|x|x|x
too large   |x|awake:=|x|x|x|x|x|x|x|x|x
is rest     |recovering:to-offloaded:offloaded recovering:to-warm:warm|awake:waking wanted:pending \
to-offloaded:offloaded to-warm:warm|=|=|=|=|x|x|=|=|x
is awake    |recovering:awake|x|x|x|x|awake|=|=|x|x|x
yield       |to-awake:x =|to-awake:x again:unloading !wanted:unloading|to-awake:x \
to-cold:unloading =|to-awake:x to-cold:unloading to-offloaded:releasing =|to-awake:x cold:= \
to-cold:unloading to-warm:= offloaded:= to-offloaded:releasing|x|to-awake:x draining|to-awake:x =\
|to-awake:x =|to-awake:x =|to-awake:x =
unyield     |=|=|=|=|=|=|=|awake|=|=|=
quiet       |=|=|=|=|=|=|=|releasing|=|=|=
freed       |x|x|x|x|x|x|x|x|wanted:pending cold:cold offloaded:offloaded warm:warm\
|exhausted:failed wanted:pending cold|x
spent       |x|unloading!|x|x|x|unloading!|x|cut:unloading =|unloading|=|x
died        |=|=!|loading!|loading!|=|loading!|loading!|unloading|unloading|=|=
left        |=|=|loading|loading|=|loading|loading|unloading|unloading|=|=
over        |x|=|=|=|=|=!|waking|releasing|=|=|x
reset       |=|=|=|=|=|=|=|=|=|=|cold
order cold  |=|unloading|unloading|unloading|unloading|unloading|draining|=|=|=|=
"""


def cells():
    rows = [row.split("|") for row in MATRIX.replace("\\\n", "").strip().splitlines()]
    states = [S(name.strip()) for name in rows[0][1:]]
    for row in rows[1:]:
        assert len(row) == len(states) + 1, row
        for state, cell in zip(states, row[1:], strict=True):
            yield state, G(row[0].strip()), cell.strip()


CELLS = {(state, signal): cell for state, signal, cell in cells()}
FLOORS = {
    S.OFFLOADED: [Tier.OFFLOADED],
    S.WARM: [Tier.WARM],
    S.PENDING: [Tier.COLD, Tier.OFFLOADED, Tier.WARM],
    S.DRAINING: [Tier.COLD, Tier.OFFLOADED, Tier.WARM],
    S.RELEASING: [Tier.COLD, Tier.OFFLOADED, Tier.WARM],
}
NOW_MS = 1_000_000.0


def situations(state):
    """Every model that differs in what any cell looks at."""
    floors = FLOORS.get(state, [Tier.COLD])
    flags = itertools.product([False, True], repeat=4)
    runnings = list(Running) if state is S.DRAINING else [Running.FINISH]
    for floor, aim, running, (wanted, again, recovering, exhausted) in itertools.product(
        floors, [Tier.WARM, Tier.AWAKE], runnings, flags
    ):
        faults = (NOW_MS - 3, NOW_MS - 2, NOW_MS - 1) if exhausted else (NOW_MS - 700_000,) * 3
        yield Model(
            "m",
            state,
            floor=floor,
            aim=aim,
            running=running,
            is_wanted=wanted,
            is_again=again,
            is_recovering=recovering,
            faults_ms=faults,
        )


def holds(condition, model, tier):
    if condition.startswith("to-"):
        return tier is Tier(condition.removeprefix("to-"))
    if condition.startswith("!"):
        return not holds(condition[1:], model, tier)
    if condition in list(Tier) and condition != Tier.AWAKE:
        return model.floor is Tier(condition)
    return {
        "wanted": model.is_wanted,
        "awake": model.aim is Tier.AWAKE,
        "again": model.is_again,
        "recovering": model.is_recovering,
        "exhausted": model.is_exhausted(NOW_MS),
        "cut": model.running is Running.CUT,
    }[condition]


def expected(cell, model, tier):
    """The state that the matrix asks for, and whether it is a fault; None: illegal."""
    for outcome in cell.split():
        *conditions, target = outcome.split(":")
        if all(holds(condition, model, tier) for condition in conditions):
            is_fault = target.endswith("!")
            target = target.removesuffix("!")
            if target == "x":
                return None
            return (model.state if target == "=" else S(target)), is_fault
    return None


def fields(model):
    return {name: getattr(model, name) for name in Model.__dataclass_fields__}


def test_the_matrix_has_every_pair():
    assert set(CELLS) == set(itertools.product(S, G))
    legal = {pair for pair, cell in CELLS.items() if cell != "x"}
    assert legal == set(TRANSITIONS)


@pytest.mark.parametrize("signal", list(G))
@pytest.mark.parametrize("state", list(S))
def test_each_signal_leads_where_the_matrix_says_and_an_illegal_one_changes_nothing(state, signal):
    needs_tier = signal in (G.YIELD, G.IS_REST)
    tiers = {G.YIELD: list(Tier), G.IS_REST: [Tier.OFFLOADED, Tier.WARM]}.get(signal, [None])
    seen = set()
    for model in situations(state):
        for tier in tiers:
            now = Model(**fields(model))
            before = fields(now)
            wanted = expected(CELLS[state, signal], model, tier)
            assert now.may(signal, tier) is (wanted is not None)
            if wanted is None:
                with pytest.raises(IllegalModelSignal):
                    now.fire(signal, NOW_MS, "why", tier=tier)
                assert fields(now) == before
                continue
            target, is_fault = wanted
            assert now.fire(signal, NOW_MS, "why", tier=tier) is (target is not state)
            assert now.state is target, (model, tier)
            assert (now.fault == "why") is is_fault
            seen.add(target)
    named = set(re.findall(r"[a-z]+(?=!?(?:\s|$))", CELLS[state, signal])) - {"x"}
    assert {S(name) for name in named} <= seen
    assert needs_tier or len(tiers) == 1


def fired(state, *signals, **attributes):
    model = Model("m", state, **attributes)
    for signal in signals:
        signal, tier = signal if isinstance(signal, tuple) else (signal, None)
        model.fire(signal, NOW_MS, "why", tier=tier)
    return model


def test_tier_to_which_a_model_falls_only_goes_down():
    model = fired(S.AWAKE, (G.YIELD, Tier.WARM))
    assert model.floor is Tier.WARM
    model = fired(S.AWAKE, (G.YIELD, Tier.OFFLOADED), (G.YIELD, Tier.WARM))
    assert model.floor is Tier.OFFLOADED
    model = fired(S.AWAKE, (G.YIELD, Tier.WARM), G.QUIET, (G.YIELD, Tier.COLD), G.FREED)
    assert model.state is S.COLD
    model = fired(S.AWAKE, (G.YIELD, Tier.WARM), G.ORDER_COLD, G.QUIET)
    assert (model.goal, model.floor) == (Tier.COLD, Tier.COLD)


def test_pending_keeps_the_tier_that_was_held():
    model = fired(S.WARM, G.WANT, floor=Tier.WARM)
    assert (model.goal, model.floor) == (Tier.WARM, Tier.WARM)
    model.fire(G.YIELD, NOW_MS, "an older ticket", tier=Tier.OFFLOADED)
    model.fire(G.FREED, NOW_MS, "why")
    assert (model.state, model.floor) == (S.PENDING, Tier.OFFLOADED)
    model.fire(G.YIELD, NOW_MS, "an older ticket", tier=Tier.COLD)
    model.fire(G.FREED, NOW_MS, "why")
    assert (model.state, model.floor) == (S.PENDING, Tier.COLD)


def test_death_at_rest_loads_up_to_the_tier_that_was_held():
    model = fired(S.OFFLOADED, G.DIED, floor=Tier.OFFLOADED)
    assert (model.state, model.goal) == (S.LOADING, Tier.OFFLOADED)
    model = fired(S.AWAKE, G.DIED)
    assert (model.state, model.goal) == (S.LOADING, Tier.AWAKE)


def test_model_that_is_too_large_loads_on_to_rest_and_is_asked_for_room_again():
    model = fired(S.LOADING, G.TOO_LARGE, is_wanted=True)
    assert (model.state, model.goal) == (S.LOADING, Tier.WARM)
    model.fire(G.IS_REST, NOW_MS, "why", tier=Tier.WARM)
    assert (model.state, model.goal) == (S.PENDING, Tier.WARM)
    model.fire(G.ROOM, NOW_MS, "why")
    assert (model.state, model.goal) == (S.WAKING, Tier.AWAKE)


def test_a_drain_has_three_stages_before_the_kill():
    model = fired(S.AWAKE, (G.YIELD, Tier.WARM))
    stages = [model.running]
    for _ in range(2):
        model.fire(G.SPENT, NOW_MS, "why")
        stages.append(model.running)
    assert stages == [Running.FINISH, Running.PARK, Running.CUT]
    model.fire(G.SPENT, NOW_MS, "why")
    assert model.state is S.UNLOADING


def test_three_faults_in_ten_minutes_are_a_failure_and_older_ones_are_not():
    model = Model("m", S.LOADING)
    for at_ms in (0.0, 400_000.0, 700_000.0):
        model.fire(G.DIED, at_ms, "why")
    assert not model.is_exhausted(700_000.0)
    model.fire(G.DIED, 900_000.0, "why")
    assert model.is_exhausted(900_000.0)


def test_permanent_fault_fails_at_once_and_reset_forgets_it():
    model = Model("m", S.LOADING)
    model.fire(G.SPENT, NOW_MS, "no such file", is_permanent=True)
    model.fire(G.FREED, NOW_MS, "why")
    assert (model.state, model.fault) == (S.FAILED, "no such file")
    model.fire(G.RESET, NOW_MS, "why")
    assert (model.state, model.is_exhausted(NOW_MS)) == (S.COLD, False)


def test_reset_forgets_the_faults_of_a_model_that_has_not_failed_yet():
    model = Model("m", S.LOADING)
    for at_ms in (1.0, 2.0):
        model.fire(G.DIED, at_ms, "why")
    model.fire(G.RESET, 3.0, "why")
    assert model.state is S.LOADING
    model.fire(G.DIED, 4.0, "why")
    assert not model.is_exhausted(4.0)


def test_wanted_is_remembered_in_every_state():
    for state in S:
        model = fired(state, G.WANT, floor=FLOORS.get(state, [Tier.COLD])[0])
        assert model.is_wanted
        model.fire(G.UNWANT, NOW_MS, "why")
        assert not model.is_wanted
