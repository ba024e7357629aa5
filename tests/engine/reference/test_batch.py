from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.backends.reference.generation import (
    PREFILL_CHUNK,
    Request,
    Scheduler,
    TokenPace,
    Work,
    prefill_end,
)
from plumbing.errors import InvariantError

CONTEXT = 100
TOKENS = 10
STOP = 9


def request(number: int, prompt: int = 3, max_tokens: int = 4, made: int = 0) -> Request:
    return Request(
        number, (1,) * prompt, max_tokens + made, stop_token_ids=(STOP,), made=(2,) * made
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Random submit, cancel and work: no slot is shared, lost or idle while a request waits."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(3, CONTEXT)
        self.next_id = 0
        self.unfinished: dict[int, Request] = {}
        self.slot_of: dict[int, int] = {}
        self.position: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.turns_since: dict[int, int] = {}

    def forget(self, number: int) -> None:
        for table in (self.unfinished, self.slot_of, self.position, self.made, self.turns_since):
            table.pop(number, None)

    @precondition(lambda self: len(self.unfinished) < 3 + 4)
    @rule(prompt=st.integers(1, CONTEXT - 1), max_tokens=st.integers(1, 8), made=st.integers(0, 3))
    def submit(self, prompt: int, max_tokens: int, made: int) -> None:
        self.next_id += 1
        wanted = request(self.next_id, prompt, max_tokens, min(made, CONTEXT - 1 - prompt))
        self.scheduler.submit(wanted)
        self.unfinished[wanted.id] = wanted
        self.made[wanted.id] = len(wanted.made)

    @precondition(lambda self: self.unfinished)
    @rule(choice=st.integers(0, 100))
    def cancel(self, choice: int) -> None:
        number = sorted(self.unfinished)[choice % len(self.unfinished)]
        assert self.scheduler.cancel(number)
        assert not self.scheduler.cancel(number)
        self.forget(number)

    @rule(token=st.integers(0, TOKENS - 1))
    def work(self, token: int) -> None:
        work = self.scheduler.next_work()
        if work is None:
            assert not self.unfinished
            return
        number = work.request.id
        wanted = self.unfinished[number]
        self.check_place(work, wanted)
        reason = self.scheduler.done(work, token if work.samples else None)
        if not work.samples:
            assert reason is None
            return
        self.made[number] += 1
        full = len(wanted.prompt) + self.made[number] == CONTEXT
        expected = "length" if full or self.made[number] == wanted.max_tokens else None
        assert reason == ("stop" if token == STOP else expected)
        if reason is not None:
            self.forget(number)

    def check_place(self, work: Work, wanted: Request) -> None:
        number = work.request.id
        # The same slot throughout, and no other request's.
        assert self.slot_of.setdefault(number, work.slot) == work.slot
        assert [slot for slot in self.slot_of.values() if slot == work.slot] == [work.slot]
        # Positions without a gap, and never beyond the cache.
        assert work.start == self.position.get(number, 0)
        self.position[number] = work.start + len(work.tokens)
        assert self.position[number] <= CONTEXT
        total = (*wanted.prompt, *wanted.made)
        assert work.tokens == total[work.start : self.position[number]] or work.start >= len(total)
        # A prompt goes in chunks; what was made goes one by one, as it was made.
        assert self.position[number] <= len(wanted.prompt) or len(work.tokens) == 1
        assert work.samples == (self.position[number] >= len(total))
        assert len(work.answer) == self.made[number]
        # No starvation: every other running request had a turn since.
        self.turns_since[number] = 0
        for other in self.turns_since:
            self.turns_since[other] += other != number
            assert self.turns_since[other] <= 2 * 3

    @invariant()
    def slots_are_all_accounted_for(self) -> None:
        assert self.scheduler.running + len(self.scheduler._free) == 3
        assert self.scheduler.running + len(self.scheduler._waiting) == len(self.unfinished)
        assert not len(self.scheduler._waiting) or not len(self.scheduler._free)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.integers(1, 500))
def test_prefill_end_cuts_by_position_only(prompt: int):
    """Chunks tile the prompt, and all but the last end where every longer prompt's would."""
    start = 0
    while start < prompt:
        end = prefill_end(start, prompt)
        assert start < end <= prompt
        assert end == min(prefill_end(start, 10_000), prompt)
        assert end % PREFILL_CHUNK == 0 or end == prompt
        start = end


def test_cancel_running_request_gives_its_slot_to_the_first_waiting_one():
    """A client that leaves frees its slot at once: the next work is the waiting request's."""
    scheduler = Scheduler(1, CONTEXT)
    for number in (1, 2, 3):
        scheduler.submit(request(number))
    scheduler.cancel(1)
    work = scheduler.next_work()
    assert work is not None
    assert work.request.id == 2
    assert len(scheduler._waiting) == 1


@pytest.mark.parametrize(
    "bad",
    [
        *(Request(1, (), 4), request(1, prompt=CONTEXT), request(1, max_tokens=0)),
        *(request(1, max_tokens=0, made=4), request(1, prompt=CONTEXT - 4, made=4)),
    ],
)
def test_submit_request_that_the_http_process_should_have_refused_is_our_own_fault(bad: Request):
    """Checks are the HTTP process's; what does not fit must still not reach the cache."""
    scheduler = Scheduler(1, CONTEXT)
    with pytest.raises(InvariantError):
        scheduler.submit(bad)
    scheduler.submit(request(1))
    with pytest.raises(InvariantError):
        scheduler.submit(request(1))


def test_done_for_work_that_was_not_handed_out_is_our_own_fault():
    """The caller's slip is not papered over: each misuse raises InvariantError."""
    scheduler = Scheduler(1, CONTEXT)
    scheduler.submit(request(1))
    work = scheduler.next_work()
    assert work is not None
    with pytest.raises(InvariantError):
        scheduler.next_work()
    with pytest.raises(InvariantError):
        scheduler.cancel(1)
    with pytest.raises(InvariantError):
        scheduler.done(work, None)
    assert scheduler.done(work, STOP) == "stop"
    with pytest.raises(InvariantError):
        scheduler.done(work, STOP)


def test_request_that_rests_makes_no_token_and_delays_nobody():
    scheduler = Scheduler(2, CONTEXT)
    scheduler.submit(request(1, prompt=1))
    scheduler.submit(request(2, prompt=1, made=2))
    seen = []
    for _ in range(4):
        work = scheduler.next_work(paused=(1,))
        assert work is not None
        seen.append((work.request.id, work.samples))
        scheduler.done(work, 0 if work.samples else None)
    assert seen == [(2, False), (2, False), (2, True), (2, True)]
    assert scheduler.next_work(paused=(1, 2)) is None
    assert scheduler.next_work() is not None


def test_pace_rests_each_request_for_its_interval():
    now_s = [10.0]
    pace = TokenPace(200, lambda: now_s[0])
    assert not pace.paused()
    pace.made(1)
    now_s[0] += 0.1
    pace.made(2)
    assert set(pace.paused()) == {1, 2}
    assert pace.pause_ms() == 0  # a prompt may still be computed
    pace.is_idle = True
    assert pace.pause_ms() == 100
    now_s[0] += 0.1
    assert set(pace.paused()) == {2}


def test_pace_without_an_interval_rests_nobody():
    pace = TokenPace(0)
    pace.made(1)
    pace.is_idle = True
    assert not pace.paused()
    assert pace.pause_ms() == 0
