"""Goal: one child serves wherever one can, a spare is kept, and nothing ends without a reason.

Method: scenes by hand, and random ones in virtual time whose invariants are checked at each step.
"""

from __future__ import annotations

import itertools
import random

import pytest

from gateway.core import children as ev
from gateway.core.children import (
    AVAILABLE,
    CHILDREN_WANTED,
    REAP_MS,
    RETIRE_MS,
    RETIRING_MAX,
    SILENT_MS,
    START_MS,
    STOP_MARGIN_MS,
    TURNS,
    Children,
    Place,
)
from plumbing.errors import GivenUpError, InvariantError
from plumbing.pod.supervision import BACKOFF_MS_MAX, DEATHS_MAX

EAGAIN, ENOENT = 11, 2
KILL = -9


class Bench:
    """The children, and a shell that starts processes and remembers what it was told."""

    def __init__(self) -> None:
        self.core = Children()
        self.now_ms = 1000.0
        self.done: list[ev.ParentEffect] = []
        self.cannot_start: int | None = None

    def feed(self, event: ev.ParentEvent) -> list[ev.ParentEffect]:
        found = self.core.handle(event, self.now_ms)
        self.done += found
        for effect in found:
            if isinstance(effect, ev.StartChild):
                self._start(effect.child)
        return found

    def _start(self, child: int) -> None:
        if self.cannot_start is None:
            self.feed(ev.ChildStarted(child, 100 + child))
        else:
            self.feed(ev.CannotStart(child, self.cannot_start, "no room"))

    def wait(self, ms: float) -> None:
        self.now_ms += ms
        self.feed(ev.ParentTick())

    def places(self) -> dict[int, str]:
        return {each.id: each.place.value for each in self.core.all.values()}

    def of(self, kind: type) -> list:
        return [each for each in self.done if isinstance(each, kind)]

    def told(self) -> list[str]:
        return [each.message for each in self.of(ev.Told)]

    def served(self) -> Bench:
        """One serves and a spare is ready."""
        self.feed(ev.SocketLent())
        self.wait(0)
        self.feed(ev.ChildReady(1))
        self.feed(ev.ChildReady(2))
        self.now_ms += 60_000
        self.done.clear()
        return self


def test_a_child_may_take_longer_to_start_than_to_answer():
    """Goal: imports on a busy machine are no hang; method: silence from the start on."""
    bench = Bench()
    bench.wait(0)
    bench.feed(ev.ChildSilent(1, START_MS))
    assert bench.places() == {1: "starting"}
    bench.feed(ev.ChildSilent(1, START_MS + 1))
    assert bench.places() == {1: "killed", 2: "starting"}


def test_a_program_that_cannot_run_ends_the_gateway_and_a_shortage_does_not():
    """Goal: what may end by itself is waited for; method: ENOENT, and EAGAIN for a long time."""
    bench = Bench()
    bench.cannot_start = ENOENT
    for _ in range(DEATHS_MAX):
        bench.wait(BACKOFF_MS_MAX)
    assert bench.of(ev.EndGateway)[0].exit_code == GivenUpError.exit_code
    bench = Bench()
    bench.cannot_start = EAGAIN
    for _ in range(50):
        bench.wait(BACKOFF_MS_MAX)
    assert not bench.of(ev.EndGateway)
    assert bench.core.problem == "no process of the gateway can be started: no room"
    assert len(bench.told()) == 1  # once while it lasts
    bench.cannot_start = None
    bench.wait(BACKOFF_MS_MAX)
    (only,) = bench.core.all
    bench.feed(ev.ChildReady(only))
    assert bench.core.spare is not None
    assert bench.core.problem is None


def test_a_spare_that_cannot_start_never_ends_a_gateway_that_serves():
    """Goal: a bad file harms nobody who is served; method: spares that die for minutes."""
    bench = Bench().served()
    bench.feed(ev.ChildEnded(2, KILL))
    for number in range(3, 3 + 3 * DEATHS_MAX):
        bench.feed(ev.ChildEnded(number, 2, "the certificate is bad"))
        bench.wait(BACKOFF_MS_MAX)
    assert not bench.of(ev.EndGateway)
    assert bench.places()[1] == "serving"
    assert "the certificate is bad" in (bench.core.problem or "")


def test_too_many_restarts_are_refused_and_a_child_that_never_finishes_is_killed():
    """Goal: no pile of old children; method: restarts while all have streams that last."""
    bench = Bench().served()
    ready = 3
    for _ in range(RETIRING_MAX):
        bench.feed(ev.RestartAsked())
        bench.feed(ev.ChildReady(ready))
        bench.feed(ev.ChildReady(ready + 1))
        ready += 2
    bench.feed(ev.RestartAsked())
    assert bench.of(ev.RestartRefused)[0].code == "gateway.restart_busy"
    assert "pid 101, pid 103 still finish" in bench.of(ev.RestartRefused)[0].reason
    bench.wait(RETIRE_MS + STOP_MARGIN_MS + 1)
    assert bench.places()[1] == bench.places()[3] == "killed"


def test_stop_kills_what_is_late_and_does_not_wait_for_what_cannot_be_reaped():
    """Goal: the gateway always ends; method: a child that never finishes nor dies."""
    bench = Bench().served()
    bench.feed(ev.StopAsked(1000))
    bench.wait(1000 + STOP_MARGIN_MS + 1)
    assert 1 in [each.child for each in bench.of(ev.KillChild)]
    assert not bench.of(ev.EndGateway)
    bench.wait(REAP_MS)
    assert bench.of(ev.EndGateway) == [ev.EndGateway(0)]


def test_a_second_stop_kills_at_once_and_a_restart_is_refused_meanwhile():
    """Goal: the second SIGTERM is final; method: both requests during a drain."""
    bench = Bench().served()
    bench.feed(ev.StopAsked(30_000))
    bench.feed(ev.RestartAsked())
    assert bench.of(ev.RestartRefused)[0].code == "gateway.stopping"
    bench.feed(ev.StopAsked(30_000))
    assert set(bench.places().values()) == {"killed"}


def test_stop_answers_a_restart_that_is_under_way():
    """Goal: nobody waits for ever; method: SIGTERM between the request and the fresh child."""
    bench = Bench().served()
    bench.feed(ev.RestartAsked())
    bench.feed(ev.StopAsked(0))
    assert bench.of(ev.RestartRefused)[0].code == "gateway.stopping"


def test_no_other_move_is_possible_and_no_other_event_known():
    """Goal: the table is the enforcer; method: every pair that it lacks."""
    turns = {turn for _, turn in TURNS}
    for place, turn in itertools.product(Place, turns):
        if (place, turn) in TURNS:
            continue
        child = Bench().served().core.all[1]
        child.place = place
        with pytest.raises(InvariantError):
            Children()._turn(child, turn, 0.0)
        assert child.place is place
    with pytest.raises(InvariantError):
        Bench().feed(ev.ParentEvent())


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_one_serves_wherever_one_can(seed: int):
    """Goal: the invariants; method: random events, a shell that may be unable to start, and checks
    behind each event; then everything gets better, and one serves with a spare."""
    rng = random.Random(seed)
    bench = Bench()
    core = bench.core
    for _ in range(rng.randrange(10, 120)):
        if core.is_stopping:
            break
        bench.cannot_start = rng.choice([None] * 8 + [EAGAIN])
        ids = list(core.all) or [0]
        child = rng.choice(ids)
        bench.feed(
            rng.choice(
                [
                    *[ev.ChildReady(child)] * 4,
                    *[ev.ParentTick()] * 2,
                    ev.SocketLent(),
                    ev.ChildSilent(child, rng.choice([100.0, SILENT_MS + 1, START_MS + 1])),
                    ev.ChildEnded(child, rng.choice([0, 7, KILL, KILL])),
                    ev.RestartAsked(),
                ]
            )
        )
        bench.now_ms += rng.choice([0, 100, 20_000])
        check(bench)
    if bench.of(ev.EndGateway):
        return
    bench.cannot_start = None
    bench.feed(ev.SocketLent())
    for _ in range(12):
        bench.wait(BACKOFF_MS_MAX)
        for each in list(core.all.values()):
            if each.place is Place.KILLED:
                bench.feed(ev.ChildEnded(each.id, KILL))
            elif each.place is Place.STARTING:
                bench.feed(ev.ChildReady(each.id))
        check(bench)
    assert core.serving is not None
    assert core.spare is not None
    bench.feed(ev.StopAsked(1000))
    bench.wait(1000 + STOP_MARGIN_MS + REAP_MS + 1)
    bench.wait(1)
    assert bench.of(ev.EndGateway)


def check(bench: Bench) -> None:
    core = bench.core
    if core.is_stopping:
        assert not [each for each in core.all.values() if each.place in AVAILABLE]
        return
    assert len(core.at(Place.SERVING)) <= 1
    assert len(core.at(Place.STARTING)) <= 1
    assert len(core.at(Place.RETIRING)) <= RETIRING_MAX + 1
    available = [each for each in core.all.values() if each.place in AVAILABLE]
    assert len(available) <= CHILDREN_WANTED + any(each.is_restart for each in available)
    if core.has_socket and core.spare is not None:
        assert core.serving is not None
    told = [each.child for each in bench.of(ev.LetAccept)]
    assert all(core.all[child].is_ready for child in told if child in core.all)
