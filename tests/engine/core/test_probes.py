"""The probe table, checked against the table of the design, cell by cell."""

from __future__ import annotations

import pytest

from engine.core.events import State
from engine.core.probes import TABLE, View, answer

# endpoint → state → the answer as (first, later, budget spent, unhealthy, crash loop), where
# `first` is before any standby and the other four after it.
DESIGN = {
    "startup": {
        "init": (503, 200, 200, 200, 200),
        "standby": (200, 200, 200, 200, 200),
        "waking": (200, 200, 200, 200, 200),
        "active": (200, 200, 200, 200, 200),
        "draining": (200, 200, 200, 200, 200),
        "releasing": (200, 200, 200, 200, 200),
        "resting": (200, 200, 200, 200, 200),
        "dead": (503, 200, 200, 200, 200),
    },
    "live": {
        "init": (503, 200, 503, 200, 200),
        "standby": (200, 200, 200, 200, 200),
        "waking": (200, 200, 503, 200, 200),
        "active": (200, 200, 200, 503, 200),
        "draining": (200, 200, 503, 200, 200),
        "releasing": (200, 200, 503, 200, 200),
        "resting": (200, 200, 200, 200, 200),
        "dead": (200, 200, 503, 200, 503),
    },
    "ready": {
        "init": (503,) * 5,
        "standby": (200,) * 5,
        "waking": (503,) * 5,
        "active": (200,) * 5,
        "draining": (503,) * 5,
        "releasing": (503,) * 5,
        "resting": (200,) * 5,
        "dead": (503,) * 5,
    },
    "serving": {
        "init": (503,) * 5,
        "standby": (503,) * 5,
        "waking": (503,) * 5,
        "active": (200,) * 5,
        "draining": (503,) * 5,
        "releasing": (503,) * 5,
        "resting": (503,) * 5,
        "dead": (503,) * 5,
    },
}


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


@pytest.mark.parametrize("endpoint", list(DESIGN))
@pytest.mark.parametrize("state", list(State))
def test_probe_answers_to_the_letter(endpoint, state):
    """Every cell in every situation gives what the design's table says, and a reason."""
    answers = [answer(endpoint, view) for view in views(state)]
    assert tuple(200 if each.ok else 503 for each in answers) == DESIGN[endpoint][state]
    assert all(each.reason for each in answers)


def test_table_is_complete():
    """Four questions, six states, no gap: compare the keys."""
    assert set(TABLE) == set(DESIGN)
    assert all(set(row) == set(State) for row in TABLE.values())


def test_reason_is_one_word():
    """Programs read the reason: it has no spaces in any cell."""
    for endpoint in TABLE:
        for state in State:
            assert all(" " not in answer(endpoint, view).reason for view in views(state))


def test_of_several_members_one_takes_traffic():
    """Goal: no traffic is sent to a member that does not serve. Method: an active one of each kind;
    nothing else differs."""
    for takes_traffic in (True, False):
        view = View(State.ACTIVE, True, False, True, False, takes_traffic=takes_traffic)
        assert answer("serving", view).ok == takes_traffic
        assert all(answer(endpoint, view).ok for endpoint in ("startup", "live", "ready"))
    assert answer("serving", view).reason == "another_member_serves"
