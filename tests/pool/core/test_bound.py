"""Goal: the bound of a wait is the formula of the documentation. Method: small pools, by hand."""

from pool.core.who_yields import bound_ms, sharing_with
from tests.pool.core.views import NO_MARGIN, a_model

TIMES = {"switch_ms": 40_000.0, "release_ms": 100.0}  # so the budget of a raise is 80 s


def test_worse_priority_and_requests_that_cannot_be_parked():
    models = [
        a_model("a", priority=3, **TIMES),
        a_model("b", priority=1, cannot_park=1, **TIMES),
    ]
    turn_ms = 80_000 + 40_000 + 30_000 + 100
    assert bound_ms("a", 3, models, NO_MARGIN) == 5_000 + 2_100 + turn_ms + 80_000 + 2 * 60_000
    never_cut = a_model("b", cannot_park=1, rules={"cut_ms": float("inf")}, **TIMES)
    assert bound_ms("a", 3, [models[0], never_cut], NO_MARGIN) == float("inf")


def test_sharing_goes_through_others_and_pinned_models_take_no_turns():
    models = [
        a_model("a", on=("0",), raise_ms=1.0),
        a_model("b", on=("0", "1"), raise_ms=1.0),
        a_model("c", on=("1",), raise_ms=1.0),
        a_model("far", on=("2",)),
        a_model("pinned", on=("1",), rules={"is_pinned": True}),
    ]
    assert [each.name for each in sharing_with("a", models)] == ["b", "c", "pinned"]
    assert bound_ms("a", 0, models, NO_MARGIN, is_measured=True) == 7_000 + 2 * 12_000 + 3


def test_what_raises_took_stands_in_the_place_of_their_budgets_once_all_are_measured():
    models = [
        a_model("a", raise_ms=30.0, release_ms=100.0),
        a_model("b", raise_ms=200.0, release_ms=100.0),
        a_model("far", on=("1",)),
    ]
    found = bound_ms("a", 0, models, NO_MARGIN, is_measured=True)
    assert found == 5_000 + 2_100 + (200 + 10_000 + 2_000 + 100) + 30
    less = [models[0], a_model("b"), models[2]]
    assert bound_ms("a", 0, less, NO_MARGIN, is_measured=True) is None
