"""A relaunching engine runs on half of the CPUs while another one serves; real processes' masks."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from engine.supervisor.cpu_share import cpu_list, half_of
from engine.supervisor.engine import TICK_MS
from plumbing.service import procfs
from tests.engine.pod import Engine, Pod
from tests.helpers import until

ALL = frozenset(os.sched_getaffinity(0))
LOWEST = min(ALL)
SAID = "limited to CPUs"

needs_two_cpus = pytest.mark.skipif(len(ALL) < 2, reason="one CPU cannot be halved")
needs_taskset = pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset here")


def half() -> frozenset[int]:
    found = half_of(ALL)
    assert found is not None
    return found


def masks(engine: Engine) -> list[frozenset[int]]:
    """Of every thread of every process of the backend."""
    return [
        frozenset(os.sched_getaffinity(int(thread)))
        for pid in procfs.descendants(engine.process.pid)
        for thread in os.listdir(f"/proc/{pid}/task")
    ]


def serving_and_loading(pod: Pod, *switches: str, wrapper: tuple[str, ...] = ()) -> list[Engine]:
    """engine-0 active; engine-1 was in standby and loads again, until the gate opens."""
    pod.start_lock()
    gate = pod.directory / "gate"
    gate.touch()
    first = pod.engine("engine-0", "--crash-if", str(pod.directory / "broken"), wrapper=wrapper)
    first.until("active")
    held = ("--grandchild", "joined", "--load", "--load-until", str(gate), *switches)
    second = pod.engine("engine-1", *held, wrapper=wrapper)
    second.until("standby")
    gate.unlink()
    second.kill("backend-http")
    second.until("init", number=2)
    until(lambda: set(second.pids()) == {"http", "model"}, "both processes of the relaunch")
    return [first, second]


@needs_two_cpus
def test_relaunch_has_half_of_the_cpus_until_it_is_prepared(pod):
    """Goal: loading leaves the active engine its CPUs, and costs the standby nothing. Method: a
    backend with a child, a thread, and a thread that binds itself, held while it loads."""
    first, second = serving_and_loading(pod, "--bind", str(LOWEST))
    until(lambda: len(masks(second)) == 4, "four threads")
    until(lambda: frozenset({LOWEST}) in masks(second), "the thread that binds itself")
    loading = masks(second)
    assert loading.count(half()) == 3
    limited = f"CPUs {cpu_list(half())} of {cpu_list(ALL)} until prepared"
    # Until it is granted the loader lock, it says that it waits for that.
    until(lambda: limited in second.until("init")["engine"]["reason"], "the limit as the reason")
    assert second.until("init")["cpus"] == {"available": cpu_list(ALL), "limit": cpu_list(half())}
    assert set(masks(first)) == {ALL}

    (pod.directory / "gate").touch()
    assert second.until("standby", number=2)["cpus"]["limit"] is None
    prepared = masks(second)
    assert prepared.count(ALL) == 3
    assert prepared.count(frozenset({LOWEST})) == 1
    assert os.sched_getaffinity(second.process.pid) == ALL
    assert "on all CPUs again" in second.errors.read_text()


@needs_two_cpus
@pytest.mark.parametrize("target", ["backend-http", "supervisor"])
def test_limit_is_lifted_when_the_active_engine_dies(pod, target):
    """Goal: an engine whose relaunch is the way back to service has the whole machine. Method: kill
    the active engine while the other one loads; it cannot be launched again."""
    first, second = serving_and_loading(pod)
    assert set(masks(second)) == {half()}
    (pod.directory / "broken").touch()
    first.kill(target)
    until(lambda: set(masks(second)) == {ALL}, "all CPUs")
    assert second.state == "init"
    assert "no other engine holds the lock" in second.errors.read_text()


@pytest.mark.slow
@needs_two_cpus
def test_supervisor_that_comes_back_limits_its_backend(pod):
    """Goal: the death of a supervisor is no exception. Method: kill the standby's and start another
    one, which is not connected yet when it launches."""
    _, second = serving_and_loading(pod)
    second.process.send_signal(signal.SIGKILL)
    second.wait()
    again = pod.engine("engine-1", "--hang-at", "prepare")
    again.until("init", number=3)
    assert set(until(lambda: masks(again), "its backend")) == {half()}

    def has_ticked() -> bool:
        status = again.status()
        assert status is not None
        return status["lock"]["connected"] and status["budget"]["spent_ms"] > 2 * TICK_MS

    until(has_ticked, "two ticks with the lock server's connection")
    assert set(masks(again)) == {half()}


def test_engine_that_is_alone_has_all_cpus(pod):
    """Goal: neither the first launch nor a relaunch is limited while nobody serves. Method: one
    engine, killed once."""
    pod.start_lock()
    alone = pod.engine("engine-0")
    alone.until("active")
    alone.kill("backend-http")
    alone.until("active", number=2)
    assert set(masks(alone)) == {ALL}
    assert SAID not in alone.errors.read_text()


@needs_taskset
def test_one_cpu_is_not_halved(pod):
    """Method: both engines are bound to one CPU from outside."""
    bound = ("taskset", "--cpu-list", str(LOWEST))
    _, second = serving_and_loading(pod, wrapper=bound)
    assert set(masks(second)) == {frozenset({LOWEST})}
    assert SAID not in second.errors.read_text()
    status = second.status()
    assert status is not None
    assert status["cpus"] == {"available": str(LOWEST), "limit": None}


def test_half_is_half_of_the_cores(monkeypatch):
    """Goal: with two CPUs per core the other engine has cores of its own. Method: both usual ways
    of numbering them."""
    assert half_of({7}) is None
    monkeypatch.setattr("engine.supervisor.cpu_share._core_of", lambda cpu: cpu)
    assert half_of({0, 1}) == {1}
    assert half_of({0, 1, 2}) == {2}
    monkeypatch.setattr("engine.supervisor.cpu_share._core_of", lambda cpu: cpu % 4)
    assert half_of(range(8)) == {2, 3, 6, 7}
    monkeypatch.setattr("engine.supervisor.cpu_share._core_of", lambda cpu: cpu - cpu % 2)
    assert half_of(range(8)) == {4, 5, 6, 7}


def test_cpus_are_shown_as_the_kernel_shows_them():
    assert [cpu_list(cpus) for cpus in ([3], [3, 2, 0], range(8, 16), [0, 2, 4])] == [
        "3",
        "0,2-3",
        "8-15",
        "0,2,4",
    ]
