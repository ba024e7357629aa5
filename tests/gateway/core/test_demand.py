"""What the children of a gateway have, as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.demand import CHILD_STEP, TICKETS_MAX, ChildDemands
from pool.core.events import ModelDemand, Ticket, TicketKind
from pool.messages import CATALOGUE, FRAME_BYTES_MAX, DemandMsg

TICKETS = st.builds(
    Ticket,
    id=st.integers(1, 1_000),
    since_ms=st.floats(0, 1e6),
    priority=st.integers(-3, 3),
    kind=st.sampled_from(TicketKind),
)
DEMANDS = st.builds(
    ModelDemand,
    tickets=st.lists(TICKETS, max_size=4, unique_by=lambda each: each.id).map(
        lambda found: tuple(sorted(found, key=lambda each: each.id))
    ),
    in_flight=st.integers(0, 5),
    cannot_park=st.integers(0, 5),
    resuming=st.integers(0, 5),
    last_request_ms=st.none() | st.floats(0, 1e6),
    keep_alive_ms=st.none() | st.floats(0, 1e6),
    door=st.integers(0, 3),
)


@given(st.dictionaries(st.integers(1, 4), DEMANDS, min_size=1), st.integers(0, 3))
def test_nothing_is_left_out_and_the_slowest_child_decides(children, doors):
    demands = ChildDemands(("a", "b"))
    told = max((demands.tell("a", 70 + number) for number in range(doors)), default=0)
    for child, demand in children.items():
        demands.said(child, {"a": demand})
    whole = demands.whole()
    found = whole["a"]
    assert found.in_flight == sum(each.in_flight for each in children.values())
    assert found.cannot_park == sum(each.cannot_park for each in children.values())
    assert found.resuming == sum(each.resuming for each in children.values())
    is_obeyed = doors and min(each.door for each in children.values()) >= told
    assert found.door == (69 + doors if is_obeyed else 0)
    ids = [each.id for each in found.tickets]
    assert len(set(ids)) == len(ids) == sum(len(each.tickets) for each in children.values())
    assert ids == sorted(ids)
    assert whole["b"] == ModelDemand()


def test_a_door_of_another_pool_is_not_obeyed_since_its_number_is_the_same():
    """The pool has lost its state and counts from the beginning."""
    demands = ChildDemands("a")
    first = demands.tell("a", 1)
    demands.said(1, {"a": ModelDemand(door=first)})
    demands.tell("a", 1)
    assert demands.whole()["a"].door == 0


def test_what_one_message_cannot_carry_is_the_last_in_order():
    demands = ChildDemands("a")
    tickets = [Ticket(number, 1_000.0 - number) for number in range(1, TICKETS_MAX + 10)]
    tickets.append(Ticket(TICKETS_MAX + 10, 2_000.0, priority=-1))
    demands.said(2, {"a": ModelDemand(tickets=tuple(tickets))})
    found = [each.id - 2 * CHILD_STEP for each in demands.whole()["a"].tickets]
    assert found == list(range(11, TICKETS_MAX + 11))


def test_all_tickets_together_fit_into_one_message():
    """Goal: thousands of parked streams of many models are no message that cannot be sent."""
    models = [f"a-model-of-a-longer-name{number}" for number in range(100)]
    demands = ChildDemands(models)
    many = tuple(Ticket(number, 1e9, 5, 1e9, TicketKind.PARKED) for number in range(1, 400))
    demands.said(7, dict.fromkeys(models, ModelDemand(many, 500, 500, 1e9, 1e9, 2**40)))
    whole = demands.whole()
    assert len(CATALOGUE.encode(DemandMsg("0" * 16, whole))) < FRAME_BYTES_MAX
    assert {len(each.tickets) for each in whole.values()} == {20}
