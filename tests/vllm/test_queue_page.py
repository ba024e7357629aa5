"""What vLLM's scheduler has queued is on the page that a gateway reads after the engine's death."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from engine.backends.process import ENGINE_ID_ENV
from engine.backends.vllm.kv.scheduler_resuming import (
    KeepingResumingAsyncScheduler,
    KeepingResumingScheduler,
)
from engine.backends.vllm.resume.answer import attempt_of, made_by, with_made
from plumbing.pod.paths import engine_queue
from plumbing.pod.queue_page import QueueReader, attempt_name
from tests.vllm.kept_world import HASHER, config_of, scheduler_of

US = 17  # a gateway's process


class Queue:
    """A scheduler of vLLM, and its page as the gateway reads it."""

    def __init__(self, model: Path, directory: Path, *, is_async: bool) -> None:
        self.scheduler = scheduler_of(
            config_of(model, is_async=is_async, by_priority=False),
            (KeepingResumingScheduler, KeepingResumingAsyncScheduler),
        )
        self.reader = QueueReader(engine_queue(str(directory), "e-0"))

    def add(self, number: int, made: tuple[int, ...] = ()) -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        params.update_from_generation_config({}, None)
        params = with_made(params, made, attempt_name(US, number))
        self.scheduler.add_request(
            Request(str(number), [0, 1, 2, 1], params, None, block_hasher=HASHER)
        )

    @property
    def queued(self) -> set[int]:
        return set(self.reader.queued(US))


@pytest.fixture(params=[False, True], ids=["one by one", "overlapping"])
def queue(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Queue]:
    monkeypatch.setenv(ENGINE_ID_ENV, "e-0")
    monkeypatch.setenv("UNDERSTUDY_DIR", str(tmp_path))
    found = Queue(model, tmp_path, is_async=request.param)
    yield found
    found.reader.close()


def test_request_is_on_the_page_until_it_is_scheduled_for_the_first_time(queue: Queue):
    """Method: steps of ten tokens, requests of four; some of them are resumed."""
    for number in range(1, 10):
        queue.add(number, (1, 2) if number % 3 == 0 else ())
    assert queue.queued == set(range(1, 10))
    ran: set[int] = set()
    for _ in range(3):
        ran |= {int(name) for name in queue.scheduler.schedule().num_scheduled_tokens}
        assert queue.queued == set(range(1, 10)) - ran
    assert 2 < len(ran) < 9


def test_scheduler_that_fails_clears_nobody(queue: Queue, monkeypatch: pytest.MonkeyPatch):
    """Goal: the request that it looked at may be the cause."""
    queue.add(1)
    monkeypatch.setattr(Scheduler, "_make_cached_request_data", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        queue.scheduler.schedule()
    assert queue.queued == set()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=2, temperature=1.0),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")),
    ],
    ids=["one of several choices", "its grammar is compiled while it waits"],
)
def test_request_for_which_something_is_done_before_has_no_name(params: Any):
    assert attempt_of(with_made(params, (), attempt_name(US, 1))) == b""


def test_client_cannot_name_an_attempt():
    forged = SamplingParams(extra_args={"understudy_attempt": "x" * 16, "other": 1})
    assert attempt_of(forged) == b""
    assert with_made(forged, ()).extra_args == {"other": 1}
    given = with_made(forged, (5, 6), attempt_name(US, 1))
    assert (attempt_of(given), list(made_by(given))) == (attempt_name(US, 1), [5, 6])
    assert forged.extra_args == {"understudy_attempt": "x" * 16, "other": 1}
