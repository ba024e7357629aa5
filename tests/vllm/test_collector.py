"""The garbage collector is off while vLLM is imported, and on again in every process of ours."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator

import pytest

from engine.backends.process import INCARNATION_ENV
from engine.backends.vllm import membership, process_tuning
from engine.backends.vllm.worker import plugin

COUNT = 10_000  # objects, which are frozen or not


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.mark.parametrize("is_spawned", [True, False])
def test_plugin_resumes_it_in_spawned_processes(is_spawned: bool, monkeypatch: pytest.MonkeyPatch):
    """The main process has more to import after its plugin; it resumes the collector itself."""
    monkeypatch.setenv(INCARNATION_ENV, "i")
    monkeypatch.setattr(membership, "join", lambda: None)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: is_spawned or None)
    process_tuning.pause_collector()
    new, frozen = [[number] for number in range(COUNT)], gc.get_freeze_count()
    plugin.register()
    assert gc.isenabled() is is_spawned
    assert (gc.get_freeze_count() >= frozen + len(new)) is is_spawned
