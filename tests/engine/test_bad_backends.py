"""Backends that are bad in one way each: what the supervisor makes of them, alone with its lock."""

from __future__ import annotations

import fcntl
import os
import signal

import pytest

from plumbing.pod.paths import loader_lock
from plumbing.service import procfs
from tests.engine.pod import QUICK
from tests.helpers import open_fds, until

# Hung after 0.3 s, although no standby is ready.
HASTY = ("--answer-ms", "200", "--hang-ms", "300", "--hang-alone-ms", "300")


@pytest.mark.parametrize(
    ("switches", "flags", "cause", "words"),
    [
        (("--crash-at", "launch"), (), "child_exit", "exited with code 13"),
        (("--crash-at", "wake"), (), "child_exit", "http (pid"),
        (("--fail-canary",), (), "canary_failed", "token 7 is 8"),
        (("--serve-early",), (), "backend_fault", "replied to wake with canary"),
        (("--grandchild", "bare"), (), "witness_missing", "does not hold the witness"),
        (("--fault", "out of luck"), (), "backend_fault", "out of luck"),
        (("--ranks", "a", "b"), (), "identity_mismatch", "rank 1 has other weights than rank 0"),
        (("--ranks", "a", "none"), (), "weights_missing", "of 2 ranks, 1 attached no weights"),
        (("--hang-at", "prepare"), ("--init-ms", "600"), "budget_exceeded", "budget of 0.6 s"),
        (("--hang-at", "wake"), ("--waking-ms", "200"), "budget_exceeded", "budget of 0.2 s"),
        (("--hang-at", "health"), HASTY, "unhealthy", "did not answer"),
    ],
)
def test_bad_backend_dies_and_is_launched_again(pod, lock, switches, flags, cause, words):
    """Each fault ends the incarnation with its cause, the tree is gone, the next one begins."""
    engine = pod.engine("e-0", *switches, flags=(*QUICK, *flags))
    engine.until_death(words, cause)
    until(lambda: engine.status()["engine"]["number"] >= 2, "the relaunch")


def test_short_lived_helpers_are_no_deaths(pod, lock):
    """A backend runs a program while it starts: it becomes active as if nothing had been."""
    engine = pod.engine("e-0", "--grandchild", "brief")
    assert engine.until("active")["deaths"] == []


def test_tree_dies_as_soon_as_one_process_begins_to(pod, lock):
    """The model's main thread ends and another one lives on, so that its pidfd would never say so:
    a lifeline says it before the kernel cleans up, and here nothing else does."""
    engine = pod.active("e-0", "--grandchild", "joined", flags=QUICK)
    pids = engine.pids()
    os.kill(pids["model"], signal.SIGUSR1)
    until(lambda: not procfs.is_alive(pids["http"]), "the other process to be gone")
    engine.until("active", number=2)
    death = engine.until_death(f"model (pid {pids['model']})", "child_exit")
    assert not death["is_rehearsed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hangs_at", "state"), [("prepare", "init"), ("", "standby"), ("wake", "waking")]
)
def test_stopped_process_is_found_long_before_the_budget_of_its_state(pod, lock, hangs_at, state):
    """Goal: SIGSTOP costs seconds, also where the backend is asked nothing and has a minute, two
    hours, or all the time. Method: stop a process while it is on its way, or stands by."""
    lock.auto = () if state == "standby" else lock.auto
    engine = pod.engine("e-0", "--hang-at", hangs_at, flags=QUICK)
    engine.until(state)
    pid, *_ = until(engine.pids, "its processes").values()
    os.kill(pid, signal.SIGSTOP)
    engine.until_death(f"(pid {pid})", "stopped")


def test_reconnect_claims_the_token(pod, directory, lock):
    """The lock server goes, and no standby is counted on; it comes back: its first want names the
    token."""
    engine = pod.engine("e-0")
    token = engine.until("active")["lock"]["token"]
    lock.call(lock.tell_standby, True)
    until(lambda: engine.status()["health"]["has_standby"], "the news of a standby")
    lock.run(lock.stop())
    until(lambda: not engine.status()["lock"]["connected"], "the loss to be seen")
    assert engine.state == "active"
    assert engine.status()["health"]["has_standby"] is False
    lock.wants.clear()
    lock.run(lock.start())
    want = until(lambda: lock.want, "a want on the new connection")
    assert (want.lock, want.is_wanted, want.token) == ("active", True, token)
    assert engine.state == "active"


def test_loader_lock_is_held_from_may_load_to_attached(pod, directory, lock):
    """The rank waits while another engine has the loader lock, loads, attaches: this engine has the
    lock exactly that long. No lock server is needed for it."""
    gate, path = directory / "gate", loader_lock(str(directory), "")
    lock.run(lock.stop())
    with open(path, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        engine = pod.engine("e-0", "--load", "--load-until", str(gate))
        until(lambda: "loader lock" in engine.reason, "it to wait")
    until(lambda: not is_free(path), "the lock to be taken")
    gate.touch()
    engine.until("standby")
    assert is_free(path)
    lock.run(lock.start())
    engine.until("active")


def is_free(path: str) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.slow
def test_no_descriptor_leaks_over_launches(pod, lock):
    """Eight rehearsed deaths: the supervisor comes back to the descriptors that it had before."""
    engine = pod.active("e-0", flags=QUICK)
    # A question of ours may still be open at either end: far fewer than eight leaks would be.
    before = len(open_fds(engine.process.pid))
    for number in range(1, 9):
        engine.until("active", number=number)
        engine.kill("backend-http")
    assert engine.until("active", number=9)["deaths"][-1]["is_rehearsed"]
    until(lambda: len(open_fds(engine.process.pid)) <= before, "every descriptor to be closed")


@pytest.mark.slow
def test_engine_that_makes_tokens_lives_however_late_it_answers(pod, lock, directory):
    """Goal: progress is life, and CPU load alone kills no engine. Method: a standby is ready, the
    backend's main thread answers nothing for many times hang_ms, and another one goes on making
    tokens."""
    late, impatient = directory / "late", ("--answer-ms", "100", "--hang-ms", "300")
    switches = ("--answer-late-if", str(late), "--advance")
    engine = pod.active("e-0", *switches, flags=(*QUICK, *impatient))
    lock.call(lock.tell_standby, True)
    until(lambda: engine.status()["health"]["has_standby"], "the news of a standby")
    late.touch()
    # More than twice the stretched budget.
    until(lambda: engine.status()["health"]["answer_late_ms"] > 2_000, "an answer that is late")
    assert "late" in engine.status()["engine"]["reason"]
    late.unlink()
    until(lambda: engine.status()["health"]["answer_late_ms"] == 0, "the late answer")
    assert (engine.state, engine.status()["deaths"]) == ("active", [])
