"""Goal: who is before whom. Method: tickets of known ages and priorities."""

from pool.core.demand import Demand, TicketView, first_ticket, next_change_ms, order_of
from pool.core.events import DemandCame, Ticket, TicketKind
from pool.core.states import NEVER_MS, PoolRules

RULES = PoolRules()
NOW = 1_000_000.0


def test_first_is_the_best_level_and_then_the_oldest():
    tickets = [Ticket(1, NOW - 10.0, 1), Ticket(2, NOW - 5.0, 0), Ticket(3, NOW - 6.0, 0)]
    assert first_ticket(tickets, None, NOW, RULES) == TicketView(0, NOW - 6.0)
    assert first_ticket(tickets, None, NOW + 59_990.0, RULES) == TicketView(1, NOW - 10.0)
    assert first_ticket([], None, NOW, RULES) is None


def test_model_that_has_waited_long_goes_before_one_of_a_better_priority():
    """Goal: nobody waits for ever. Method: two models, at the instant at which age outweighs."""
    old, young = TicketView(2, NOW), TicketView(0, NOW + 110_000.0)
    for now, first in ((NOW + 119_999.0, young), (NOW + 120_000.0, old)):
        assert min(old, young, key=lambda each: order_of(each, now, RULES)) is first


def test_tickets_that_missed_their_models_last_turn_count_from_its_drain():
    """Goal: a long queue gives its model no second turn before others had one."""
    tickets = [Ticket(1, NOW - 500.0), Ticket(2, NOW - 90.0, kind=TicketKind.PARKED)]
    assert first_ticket(tickets, NOW - 100.0, NOW, RULES) == TicketView(0, NOW - 100.0)


def test_change_is_due_only_between_priorities():
    same = [Ticket(1, NOW - 10.0), Ticket(2, NOW)]
    assert next_change_ms(same, None, NOW, RULES) == NEVER_MS
    mixed = [Ticket(1, NOW - 10.0, 1), Ticket(2, NOW)]
    assert next_change_ms(mixed, None, NOW, RULES) == NOW - 10.0 + 60_000.0


def test_new_gateway_takes_the_place_of_one_that_has_ended_and_else_of_one_that_nobody_watches():
    """Goal: after a restart of the pool, no gateway that lives is taken for dead. Method: two are
    on file, and one of them, which was heard since, ends."""
    demand = Demand()
    demand.restore(["first", "second"])
    demand.hear(DemandCame("second", {}))
    demand.lose("second", is_dead=True, is_watched=False)
    demand.hear(DemandCame("third", {}))
    assert demand.gateways == ("first", "third")
    assert not demand.is_quiet("a", 0)
    demand.hear(DemandCame("fourth", {}))
    assert demand.gateways == ("third", "fourth")
    assert demand.is_quiet("a", 0)
