"""The probe table, by what each probe is for."""

from __future__ import annotations

from engine.core.events import State
from engine.core.probes import TABLE, View, objection


def views(state: State) -> list[View]:
    def view(**facts: bool) -> View:
        usual = {
            "was_started": True,
            "is_budget_spent": False,
            "is_healthy": True,
            "is_crash_loop": False,
        }
        return View(state=state, **{**usual, **facts})

    return [
        view(was_started=False),
        view(),
        view(is_budget_spent=True),
        view(is_healthy=False),
        view(is_crash_loop=True),
    ]


PARKED = {State.STANDBY, State.RESTING}
UNTIL_STARTED = {State.INIT, State.DEAD}
PASSING = {State.INIT, State.WAKING, State.DRAINING, State.RELEASING, State.DEAD}


def ok(endpoint: str) -> list[set[State]]:
    """In which states `endpoint` answers 200, in each of the situations of `views`."""
    found: list[set[State]] = [set() for _ in range(5)]
    for state in State:
        for where, view in zip(found, views(state), strict=True):
            if not objection(endpoint, view):
                where.add(state)
    return found


def test_startup_passes_once_for_good():
    """Before the first standby it is 503 while it loads, or is launched again; later never."""
    first, *later = ok("startup")
    assert first == set(State) - UNTIL_STARTED
    assert later == [set(State)] * 4


def test_liveness_fails_only_where_a_restart_helps():
    """A budget that is spent, an unhealthy active engine, a crash loop; and the startup probe
    decides while it loads for the first time."""
    first, later, spent, unhealthy, loop = ok("live")
    assert first == set(State) - {State.INIT}
    assert later == set(State)
    assert spent == set(State) - PASSING
    assert unhealthy == set(State) - {State.ACTIVE}
    assert loop == set(State) - {State.DEAD}


def test_ready_is_what_can_serve_and_serving_what_does():
    assert ok("ready") == [{*PARKED, State.ACTIVE}] * 5
    assert ok("serving") == [{State.ACTIVE}] * 5


def test_cold_engine_is_started_and_alive_and_not_ready():
    """Goal: no kubelet restarts a container for being cold, also before its first launch."""
    view = View(State.DEAD, False, False, is_healthy=True, is_crash_loop=False, is_cold=True)
    answers = {name: not objection(name, view) for name in TABLE}
    assert answers == {"startup": True, "live": True, "ready": False, "serving": False}
