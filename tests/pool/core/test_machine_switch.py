"""Goal: two models take turns on one device, and nothing is told before it is safe."""

from pool.core import events as ev
from pool.core.states import ModelState
from tests.pool.core.pod import MIB, Pod

S = ModelState


def awake_for_parked_streams():
    pod = Pod(total_bytes=1300 * MIB).start()
    pod.ask("a", kind=ev.TicketKind.PARKED)
    for _ in range(3):
        pod.obey_goals()
    assert pod.state("a") is S.AWAKE
    return pod


def resuming(pod, *, parked=0, count=0):
    """`a` is awake; so many of its streams wait for their next token."""
    tickets = tuple(ev.Ticket(n + 1, pod.now_ms, kind=ev.TicketKind.PARKED) for n in range(parked))
    demand = ev.ModelDemand(tickets, in_flight=3, resuming=count, door=pod.obeyed["a"])
    waits = ev.ModelDemand((ev.Ticket(9, pod.now_ms - 60_000.0),))
    pod.handle(ev.DemandCame("gateway", {"a": demand, "b": waits}))


def test_protection_of_a_turn_counts_from_when_its_streams_have_resumed():
    """Goal: no model only ever replays its streams. Method: a replay that takes longer than the
    protection, while an older ticket waits."""
    pod = awake_for_parked_streams()
    resuming(pod, parked=3)
    pod.tick(12_000)  # above `min_runtime`
    resuming(pod, count=3)
    pod.tick(12_000)
    assert pod.state("a") is S.AWAKE
    resuming(pod)
    known = pod.pool.facts.models["a"]
    assert known.costs.resume_ms == 24_000.0
    pod.tick(23_999)  # the protection is at least what the switch has cost
    assert pod.state("a") is S.AWAKE
    pod.tick(1)
    assert pod.state("a") is S.DRAINING


def test_streams_that_never_resume_do_not_keep_the_device():
    pod = awake_for_parked_streams()
    resuming(pod, count=3)
    due_ms = pod.pool.facts.models["a"].raise_due_ms
    pod.tick(due_ms - pod.now_ms)
    assert pod.state("a") is S.AWAKE
    assert pod.pool.due_ms is not None
    pod.tick(due_ms + 100_000.0 - pod.now_ms)
    for _ in range(3):
        pod.tick(max(0.0, pod.pool.due_ms - pod.now_ms))
    assert pod.state("a") is S.DRAINING
