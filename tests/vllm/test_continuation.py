"""Goal: which engines may continue each other's streams, and that one which cannot still serves.

Method: vLLM's configuration pretended, its sources real or with a contract broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
from vllm.sampling_params import RequestOutputKind
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.async_llm import AsyncLLM

from engine.backends.vllm import contracts
from engine.backends.vllm.api import features
from engine.backends.vllm.api.continuation import continuing
from engine.backends.vllm.api.features import KEEP_KV, RESUME, Features
from engine.backends.vllm.kv import INSTALL_ENV as KEEP_ENV
from engine.backends.vllm.kv.scheduler import Keeping
from engine.backends.vllm.resume import INSTALL_ENV, llm
from engine.backends.vllm.resume.answer import Continuing
from engine.backends.vllm.resume.llm import ContinuingLLM
from engine.backends.vllm.resume.scheduler import ResumingAsyncScheduler, ResumingScheduler
from plumbing.gateway_protocol import Continuation

IDENTITY = {"models": {"target": {"shards": "a"}}, "torch": "2.13"}
NO_OTHERS = {"keep_kv": "not asked", "sleep": "not asked", "offload": "not asked"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (INSTALL_ENV, KEEP_ENV):
        monkeypatch.setenv(variable, "")  # so that it is removed afterwards, whoever sets it
        monkeypatch.delenv(variable)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


def configured(*, is_async: bool = False, scheduler: str | None = None, v2: bool = False) -> Any:
    chosen = SimpleNamespace(scheduler_cls=scheduler, async_scheduling=is_async)
    model = SimpleNamespace(logits_processors=None)
    return SimpleNamespace(scheduler_config=chosen, use_v2_model_runner=v2, model_config=model)


def engine(template: str = "{{ text }}", *, v2: bool = False) -> Any:
    tokenizer = SimpleNamespace(chat_template=template, get_vocab=lambda: {"a": 1})
    return SimpleNamespace(
        get_tokenizer=lambda: tokenizer,
        vllm_config=SimpleNamespace(use_v2_model_runner=v2),
        model_config=SimpleNamespace(get_diff_sampling_param=lambda: {"temperature": 0.6}),
    )


def flags(**more: Any) -> argparse.Namespace:
    given = {"served_model_name": ["m"], "lora_modules": None, "chat_template": None, **more}
    return argparse.Namespace(**given)


def cannot_resume(config: Any, sources: Any) -> str:
    return Features.find(config, sources, **NO_OTHERS).why_not[RESUME]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("missing", [(), (KEEP_KV,), (RESUME,), (RESUME, KEEP_KV)])
def test_hooks_stand_for_what_vllm_would_choose(is_async: bool, missing: tuple[str, ...]):
    """Our scheduler of the same kind, in all of vLLM's processes, with what nothing is in the way
    of; stock vLLM where all is missing."""
    config = configured(is_async=is_async)
    found = Features(**dict.fromkeys(missing, "something is in the way"))
    kind = found.install(config)
    scheduler = config.scheduler_config.scheduler_cls
    assert kind is (AsyncLLM if RESUME in missing else ContinuingLLM)
    assert (INSTALL_ENV in os.environ) == (RESUME not in missing)
    assert (KEEP_ENV in os.environ) == (KEEP_KV not in missing)
    if len(missing) == 2:
        assert scheduler is None
        return
    made = resolve_obj_by_qualname(scheduler)
    assert issubclass(made, AsyncScheduler) == is_async
    assert issubclass(made, ResumingScheduler | ResumingAsyncScheduler) == (RESUME not in missing)
    assert issubclass(made, Keeping) == (KEEP_KV not in missing)


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_each_runner_can_resume_unless_a_contract_or_a_scheduler_is_in_the_way(v2: bool):
    """The installed vLLM, with the user's own scheduler, and with a file that both runners need
    taken away."""
    sources = contracts.installed()
    assert cannot_resume(configured(v2=v2), sources) == ""
    assert "--scheduler-cls" in cannot_resume(configured(v2=v2, scheduler="own.One"), sources)
    sources._parsed["v1/core/sched/scheduler.py"] = None
    assert "Scheduler can be imported" in cannot_resume(configured(v2=v2), sources)


def test_v2_does_not_tell_logits_processors_what_was_made(monkeypatch: pytest.MonkeyPatch):
    """One of the user's own could count wrongly after a resume; V1 gives it the output."""
    sources = contracts.installed()
    v1, v2 = configured(), configured(v2=True)
    for each in (v1, v2):
        each.model_config.logits_processors = ["own.One"]
    assert cannot_resume(v1, sources) == ""
    assert "logits processors" in cannot_resume(v2, sources)
    v2.model_config.logits_processors = None
    monkeypatch.setattr(features, "entry_points", lambda group: [group])
    assert "logits processors" in cannot_resume(v2, sources)


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_what_nobody_has_resumed_with_v2_ends_with_its_engine(v2: bool):
    """A thinking budget, a trace, a seed beside drafts, watermarks."""
    engine = ContinuingLLM.__new__(ContinuingLLM)
    engine.continuing = Continuing(Continuation.STATE)
    engine.vllm_config = SimpleNamespace(use_v2_model_runner=v2, speculative_config=object())

    def class_of(**sampling: Any) -> Continuation:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling)
        return engine._continuation_of({"prompt_token_ids": [1]}, params, None)

    untried = Continuation.NONE if v2 else Continuation.STATE
    assert class_of() is Continuation.STATE
    assert class_of(thinking_token_budget=5) is untried
    assert class_of(trace_decode_token_ids=[1]) is untried
    assert class_of(seed=3) is untried
    engine.vllm_config.speculative_config = None
    assert class_of(seed=3) is Continuation.STATE
    engine.vllm_config.watermark_config = object()
    assert class_of() is untried


def test_a_resumed_stream_waits_for_its_place_in_vllms_queue(monkeypatch: pytest.MonkeyPatch):
    """Its response has begun, so a refusal would end it; there is one after the deadline."""
    monkeypatch.setattr(llm, "ADMIT_POLL_S", 0.0)
    engine = ContinuingLLM.__new__(ContinuingLLM)
    refusals = [QueueOverflowError(), MaxQueuedTokensError()]
    asked = []

    def check_admission(request_id: str) -> None:
        asked.append(request_id)
        if refusals:
            raise refusals.pop()

    monkeypatch.setattr(engine, "check_admission", check_admission, raising=False)
    asyncio.run(engine._admit("r"))
    assert asked == ["r"] * 3
    monkeypatch.setattr(llm, "ADMIT_S", -1.0)
    refusals.append(QueueOverflowError())
    with pytest.raises(QueueOverflowError):
        asyncio.run(engine._admit("r"))


def test_a_worker_that_could_not_install_its_hook_is_named():
    found = Features()
    found.learn([{"rank": 0, "cannot_resume": ""}, {"rank": 1, "cannot_resume": "no batch"}])
    assert found.why_not[RESUME] == "rank 1: no batch"


def test_the_id_stands_for_what_shapes_an_answer(tmp_path, monkeypatch):
    """The same twice; another template, flag, model, runner or noise of seeds; and not another
    torch, unless answers are promised bit by bit. The variable for the runner changes nothing."""
    file = tmp_path / "template"
    file.write_text("{{ other }}")
    same = continuing(engine(), flags(), IDENTITY)
    assert continuing(engine(), flags(), IDENTITY) == same
    assert same.best is Continuation.STATE
    other_model = {**IDENTITY, "models": {"target": {"shards": "b"}}}
    other_torch = {**IDENTITY, "torch": "2.14"}
    assert continuing(engine(), flags(), other_torch).id == same.id
    others = [
        continuing(engine("{{ else }}"), flags(), IDENTITY),
        continuing(engine(), flags(chat_template=str(file)), IDENTITY),
        continuing(engine(), flags(reasoning_parser="deepseek_r1"), IDENTITY),
        continuing(engine(), flags(), other_model),
        continuing(engine(v2=True), flags(), IDENTITY),
        continuing(engine(v2=True), flags(use_fp64_gumbel=True), IDENTITY),
    ]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert continuing(engine(), flags(), IDENTITY) == same
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    exact = [continuing(engine(), flags(), each) for each in (IDENTITY, other_torch)]
    assert exact[0].best is Continuation.EXACT
    assert len({each.id for each in (same, *others, *exact)}) == 9
