"""A writer without progress is refused at its deadline; progress keeps it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from plumbing.errors import UnderstudyError
from tests.gms.bench import ClientProcess, GmsProcess
from tests.helpers import until

Start = Callable[..., ClientProcess]
STALL_S = 0.8


@pytest.fixture
def hasty(directory: str, device: str) -> Iterator[GmsProcess]:
    """A server that gives a writer up after less than a second."""
    server = GmsProcess(directory, device=device, stall_s=STALL_S).start()
    yield server
    server.stop()


def test_stalled_writer_gets_the_reason_and_the_next_one_writes(hasty: GmsProcess, client: Start):
    """A writer that says nothing any more: at its deadline it is told so, its memory is given up,
    and who waited is granted RW as soon as it has let go."""
    with hasty.writer() as writer:
        waiter = client(engine="engine-1")
        steps = itertools.count(1)

        def is_waited_for() -> bool:
            writer.progress(next(steps), 10**6)  # a process takes its time to start
            return bool(hasty.status()["waiting"])

        until(is_waited_for, "somebody to wait")
        assert "engine-0" in waiter.expect("waiting")["reason"]
        until(lambda: not hasty.status()["sessions"], "the writer to be given up")
        with pytest.raises(UnderstudyError) as caught:
            writer.place("t", 4, (4,), "uint8")
        assert caught.value.code == "gms.writer_stalled"
        assert "no progress for 0.8 s" in caught.value.message
    waiter.expect("writer")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
def test_writer_that_hangs_is_dropped_and_named_until_it_is_gone(
    hasty: GmsProcess, client: Start, end: signal.Signals
):
    """SIGSTOP a writer that has memory: its session ends at the deadline, but it may still touch
    what it maps, so the next writer waits and is told for whom. Killed, or awake and hearing that
    it was dropped, it lets go: RW is granted at once, with no second copy in between."""
    hung = client(engine="engine-0")
    hung.expect("writer")
    hung.do("place 4")
    waiter = client(engine="engine-1")
    steps = itertools.count(1)

    def is_waited_for() -> bool:
        hung.do(f"report {next(steps)}")  # a process takes its time to start
        return bool(hasty.status()["waiting"])

    until(is_waited_for, "the next writer to wait")
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        until(lambda: not hasty.status()["sessions"], "the writer to be given up")
        unowned = until(
            lambda: (found := hasty.status()["unowned"])[0]["holders"] and found, "its name"
        )
        assert unowned[0]["phase"] == "releasing"
        assert hung.pid in unowned[0]["holders"]
        assert [w["engine"] for w in hasty.status()["waiting"]] == ["engine-1"]
    finally:
        os.kill(hung.pid, end)
    if end is signal.SIGCONT:
        hung.do("close")
    waiter.expect("writer")


@pytest.mark.slow
def test_progress_keeps_a_writer_and_repeating_it_does_not(hasty: GmsProcess):
    """Report one more byte again and again for several deadlines: the writer stays. Report the
    same again and again: it is dropped."""
    with hasty.writer() as writer:
        end, done = time.monotonic() + 2.5 * STALL_S, 0

        def reports() -> bool:
            nonlocal done
            done += 1
            writer.progress(done, 10**6)
            return time.monotonic() > end

        until(reports, "several deadlines to pass")
        assert hasty.status()["sessions"][0]["done_bytes"] > 0

        def is_dropped() -> bool:
            try:
                writer.progress(done, 10**6)
            except UnderstudyError:
                return True
            return not hasty.status()["sessions"]

        until(is_dropped, "the writer that repeats itself to be dropped")
