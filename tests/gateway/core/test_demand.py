"""What the children of a gateway have, as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.demand import CHILD_STEP, TICKETS_MAX, Demands
from pool.core.events import ModelDemand, Ticket, TicketKind

TICKETS = st.builds(
    Ticket,
    id=st.integers(1, 1_000),
    since_ms=st.floats(0, 1e6),
    priority=st.integers(-3, 3),
    kind=st.sampled_from(TicketKind),
)
DEMANDS = st.builds(
    ModelDemand,
    tickets=st.lists(TICKETS, max_size=4, unique_by=lambda each: each.id).map(tuple),
    in_flight=st.integers(0, 5),
    cannot_park=st.integers(0, 5),
    last_request_ms=st.none() | st.floats(0, 1e6),
    keep_alive_ms=st.none() | st.floats(0, 1e6),
    door=st.integers(0, 9),
)


@given(st.dictionaries(st.integers(1, 4), DEMANDS, min_size=1))
def test_nothing_is_left_out_and_the_slowest_child_decides(children):
    demands = Demands()
    for child, demand in children.items():
        demands.said(child, {"a": demand})
    whole = demands.whole({"a": 9, "b": 4})
    found = whole["a"]
    assert found.in_flight == sum(each.in_flight for each in children.values())
    assert found.cannot_park == sum(each.cannot_park for each in children.values())
    assert found.door == min(each.door for each in children.values())
    ids = [each.id for each in found.tickets]
    assert len(set(ids)) == len(ids) == sum(len(each.tickets) for each in children.values())
    assert ids == sorted(ids)
    assert whole["b"] == ModelDemand(door=4)


def test_the_youngest_child_knows_what_was_asked_last():
    demands = Demands()
    demands.said(1, {"a": ModelDemand(last_request_ms=5.0, keep_alive_ms=1.0)})
    demands.said(2, {"a": ModelDemand(last_request_ms=9.0)})
    found = demands.whole({"a": 1})["a"]
    assert (found.last_request_ms, found.keep_alive_ms) == (9.0, None)


def test_a_child_that_is_gone_has_nothing_and_holds_no_door():
    demands = Demands()
    demands.said(1, {"a": ModelDemand(in_flight=3, door=4)})
    demands.said(2, {"a": ModelDemand(door=5)})
    assert demands.whole({"a": 5})["a"].door == 4
    demands.gone(1)
    assert demands.whole({"a": 5})["a"] == ModelDemand(door=5)
    demands.gone(2)
    assert demands.whole({"a": 6})["a"] == ModelDemand(door=6)


def test_what_one_message_cannot_carry_is_the_last_in_order():
    demands = Demands()
    tickets = [Ticket(number, 1_000.0 - number) for number in range(1, TICKETS_MAX + 10)]
    tickets.append(Ticket(TICKETS_MAX + 10, 2_000.0, priority=-1))
    demands.said(2, {"a": ModelDemand(tickets=tuple(tickets))})
    found = [each.id - 2 * CHILD_STEP for each in demands.whole({"a": 1})["a"].tickets]
    assert found == list(range(11, TICKETS_MAX + 11))
