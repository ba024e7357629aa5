"""A supervisor that runs out of descriptors, at every moment at which it needs one. Real processes;
the limit is lowered while they run. Meanwhile its status names the problem (asked over a connection
that was there before), and afterwards the engine is whole without help."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from engine import messages as m
from plumbing.wire.blocking import BlockingClient
from tests.engine.pod import QUICK, Engine
from tests.engine.test_leftovers import prefix
from tests.helpers import descriptors_below, open_fds, steady_fds, until

LIMIT = "at its limit of"
NONE = 3  # no descriptor below this one is ever free
__all__ = ["prefix"]  # a fixture


class Observer:
    """Asks one engine for its status over one connection."""

    def __init__(self, client: BlockingClient) -> None:
        self._client = client

    def status(self) -> dict[str, Any]:
        reply = self._client.request(m.StatusMsg(), timeout_s=30).message
        assert isinstance(reply, m.StatusReplyMsg)
        return reply.document

    def problem(self, words: str) -> str:
        """The problem with these words, waiting for it; it must name the limit."""
        shown = until(
            lambda: [each for each in self.status()["problems"] if words in each],
            f"{words!r} to be a problem",
        )[0]
        assert LIMIT in shown
        return str(shown)

    def without_problems(self) -> None:
        until(lambda: not self.status()["problems"], "the problems to be over")


@contextlib.contextmanager
def observer(engine: Engine) -> Iterator[Observer]:
    with engine.client() as client:
        watcher = Observer(client)
        watcher.status()  # so its connection was accepted
        yield watcher


def below_each_free_descriptor(pid: int, count: int) -> list[int]:
    """Limits that leave `pid` 0, 1, … `count` - 1 free descriptors."""
    used = steady_fds(pid)
    return [number for number in range(max(used) + count + 1) if number not in used][:count]


@pytest.mark.slow
def test_a_relaunch_at_a_limit_of_descriptors_fails_with_its_reason_or_succeeds(pod, lock):
    """Goal: no engine stays in `init` without a process. Method: kill the backend under every third
    limit, from none free to more than a launch takes; `make sweep` fails every single call."""
    engine = pod.engine("e-0", flags=(*QUICK, "--deaths-max", "1000"))
    engine.until("active")
    pid = engine.process.pid
    with observer(engine) as watcher:
        highest = max(open_fds(pid)) + 3
        for limit in range(NONE, highest, 3):
            before = watcher.status()["engine"]["number"]
            with descriptors_below(limit, pid):
                os.kill(watcher.status()["backend"]["pids"]["http"], signal.SIGKILL)

                def outcome(before: int = before) -> bool:
                    document = watcher.status()
                    number, state = document["engine"]["number"], document["engine"]["state"]
                    return (
                        number > before + 1
                        or (number > before and state == "active")
                        or (any(LIMIT in each for each in document["problems"]))
                    )

                until(outcome, f"an outcome below descriptor {limit}")
            engine.until("active", number=before + 1)
            watcher.without_problems()
        causes = {death["cause"] for death in watcher.status()["deaths"]}
    assert causes <= {"child_exit", "cannot_start", "backend_fault"}
    assert engine.process.poll() is None


def test_a_backend_is_not_prepared_before_its_witness_can_be_checked(pod, lock, directory):
    """Goal: what cannot be looked at is no proof. Method: a backend finishes loading while its
    supervisor can open nothing: it stays in `init` and says why, then stands by."""
    loaded = directory / "loaded"
    engine = pod.engine("e-0", "--load", "--load-until", str(loaded), flags=QUICK)
    until(lambda: lock.granted, "it to load")
    with observer(engine) as watcher:
        with descriptors_below(NONE, engine.process.pid):
            loaded.touch()
            until(
                lambda: (
                    "check what the backend's processes hold"
                    in watcher.status()["engine"]["reason"]
                ),
                "the reason",
            )
            assert watcher.status()["engine"]["state"] == "init"
        engine.until("active")


def test_a_grant_without_descriptors_is_acted_on_once_there_is_one(pod, directory, lock):
    """Goal: a grant survives a shortage. Method: grant the lock to a standby whose supervisor can
    open nothing, no private socket either. Then the same shortage once it is active there: its
    canaries pass all the same."""
    lock.auto = ("loader",)
    engine = pod.engine("e-0", flags=(*QUICK, "--idle-canary-ms", "1"))
    engine.until("standby")
    with observer(engine) as watcher:
        with descriptors_below(NONE, engine.process.pid):
            incarnation = watcher.status()["engine"]["incarnation"]
            lock.call(lock.grant, "active", "e-0", incarnation)
            watcher.problem("open the private socket")
            assert watcher.status()["engine"]["state"] == "waking"
        engine.until("active")
        watcher.without_problems()
        with descriptors_below(NONE, engine.process.pid):
            for _ in range(2):
                last = watcher.status()["backend"]["last_canary"]
                until(lambda last=last: watcher.status()["backend"]["last_canary"] != last, "more")
        assert watcher.status()["engine"]["incarnation"] == incarnation


def test_an_active_engine_without_descriptors_outlives_its_lock_server(pod, directory, lock):
    """Goal: a restart of the lock server ends no engine. Method: restart it while the engine's
    supervisor has 0, 1, 2, … descriptors left: it says what it lacks, and reconnects later."""
    engine = pod.engine("e-0", flags=QUICK)
    before = engine.until("active")["engine"]
    with observer(engine) as watcher:
        lock.run(lock.stop())
        until(lambda: not watcher.status()["lock"]["connected"], "the end of the connection")
        for limit in below_each_free_descriptor(engine.process.pid, 4):
            with descriptors_below(limit, engine.process.pid):
                lock.run(lock.start())
                until(
                    lambda: (
                        watcher.status()["lock"]["connected"]
                        or LIMIT in (watcher.status()["lock"]["problem"] or "")
                    ),
                    "a connection or a problem",
                )
                lock.run(lock.stop())
                until(lambda: not watcher.status()["lock"]["connected"], "the next end")
        lock.wants.clear()
        lock.run(lock.start())
        until(lambda: watcher.status()["lock"]["connected"], "the reconnect")
        watcher.without_problems()
        after = watcher.status()["engine"]
        assert (after["state"], after["incarnation"]) == ("active", before["incarnation"])
        # Its first message goes out after the engine has called itself connected.
        until(lambda: lock.want and lock.want.tokens, "its claim")


@pytest.mark.slow
def test_a_state_file_that_could_not_be_written_is_written_later(pod, lock, directory):
    """Goal: the file shows the last state, without waiting for the next. Method: a directory in its
    place when the engine becomes active; then that is removed."""
    path = directory / "engine_e-0.json"
    path.mkdir()
    engine = pod.engine("e-0")
    engine.until("active")
    until(lambda: "cannot write" in str(engine.status()["problems"]), "the problem")
    path.rmdir()
    until(lambda: path.is_file() and '"active"' in path.read_text(), "the file")
    until(lambda: not engine.status()["problems"], "the problem to be over")


def patched(patch: str) -> tuple[str, ...]:
    """A wrapper that runs `engine` with `patch` applied."""
    program = f"{patch}\nimport sys\ndel sys.argv[1:4]\nfrom engine.cli import main\nmain()"
    return (sys.executable, "-c", program)


def test_an_error_in_a_callback_of_the_supervisor_ends_it(pod, lock):
    """Goal: an OSError of our own is not taken for a peer's. Method: a tick that raises one: the
    process ends with it, and so does its backend."""
    patch = """
from engine.supervisor.leftovers import Leftovers
def tick(*_, **__):
    raise OSError(5, "injected")
Leftovers.tick = tick
"""
    engine = pod.engine("e-0", flags=QUICK, wrapper=patched(patch))
    assert engine.wait() == 1
    assert "injected" in engine.errors.read_text()


def test_an_effect_that_fails_is_a_death_and_the_next_launch_succeeds(pod, lock):
    """Goal: no effect is dropped silently. Method: the first launch raises an OSError that nothing
    there expects."""
    patch = """
from engine.supervisor.incarnation import Incarnation
launch = Incarnation.start
def fail(self):
    Incarnation.start = launch
    raise OSError(5, "injected")
Incarnation.start = fail
"""
    engine = pod.engine("e-0", flags=QUICK, wrapper=patched(patch))
    death = engine.until("active", number=2)["deaths"][0]
    assert death["cause"] == "own_fault"
    assert "START_TREE" in death["message"]
    assert "injected" in death["message"]
