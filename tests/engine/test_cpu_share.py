"""A relaunching engine runs on half of the CPUs while another one serves; real processes' masks."""

from __future__ import annotations

import os

import pytest

from engine.supervisor.cpu_share import cpu_list, half_of
from plumbing.service import procfs
from tests.engine.pod import Engine, Pod
from tests.helpers import until

ALL = frozenset(os.sched_getaffinity(0))
LOWEST = min(ALL)

needs_two_cpus = pytest.mark.skipif(len(ALL) < 2, reason="one CPU cannot be halved")


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
