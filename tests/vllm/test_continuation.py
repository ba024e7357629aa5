"""Goal: which engines may continue each other's streams, and that one which cannot still serves.

Method: vLLM's configuration pretended, its sources real or with a contract broken.
"""

from __future__ import annotations

import argparse
import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm import contracts
from engine.backends.vllm.resume import INSTALL_ENV
from plumbing.hop import Continuation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM say of themselves as they are imported
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine.backends.vllm.api.continuation import FLAGS, Hooks
    from engine.backends.vllm.resume.llm import ContinuingLLM

IDENTITY = {"models": {"target": {"shards": "a"}}, "torch": "2.13"}
FINE = [{"rank": 0, "cannot_resume": "", "identity": IDENTITY}]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTALL_ENV, "")  # so that it is removed afterwards, whoever sets it
    monkeypatch.delenv(INSTALL_ENV)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


def configured(*, is_async: bool = False, scheduler: str | None = None, v2: bool = False) -> Any:
    chosen = SimpleNamespace(scheduler_cls=scheduler, async_scheduling=is_async)
    return SimpleNamespace(scheduler_config=chosen, use_v2_model_runner=v2)


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


@pytest.mark.parametrize("is_async", [False, True])
def test_hooks_stand_for_what_vllm_would_choose(is_async: bool):
    """Nothing is in the way: our scheduler of the same kind, in all of vLLM's processes."""
    config = configured(is_async=is_async)
    hooks = Hooks.install(config, may_be_untested=False)
    assert hooks.problem == ""
    assert ("Async" in config.scheduler_config.scheduler_cls) == is_async
    assert os.environ[INSTALL_ENV]
    assert hooks.engine_class() is ContinuingLLM


@pytest.mark.parametrize("why", ["contract", "scheduler", "runner"])
def test_an_engine_that_cannot_resume_is_stock_and_says_why(why: str, monkeypatch):
    """A broken contract, a scheduler of the user's own, a runner with which it was never tried:
    stock vLLM, class none, and a sentence."""
    if why == "contract":
        broken = contracts.BrokenContract("something holds", "resume/x.py", "v1/x.py: X")
        monkeypatch.setattr(contracts, "broken", lambda sources, users: [broken])
    config = configured(scheduler="own.One" if why == "scheduler" else None, v2=why == "runner")
    hooks = Hooks.install(config, may_be_untested=False)
    found = hooks.find(engine(), flags(), FINE)
    assert (found.best, found.id) == (Continuation.NONE, "")
    said = {"contract": "something holds", "scheduler": "--scheduler-cls", "runner": "runner V2"}
    assert said[why] in found.problem
    assert hooks.engine_class() is AsyncLLM
    assert INSTALL_ENV not in os.environ


def test_the_untested_runner_can_be_tried():
    assert Hooks.install(configured(v2=True), may_be_untested=True).problem == ""


def test_a_worker_that_could_not_install_its_hook_is_named():
    found = Hooks("").find(engine(), flags(), [*FINE, {"rank": 1, "cannot_resume": "no batch"}])
    assert (found.best, found.problem) == (Continuation.NONE, "rank 1: no batch")


def test_the_id_stands_for_what_shapes_an_answer(tmp_path, monkeypatch):
    """The same twice; another template, flag, model, runner or noise of seeds; and not another
    torch, unless answers are promised bit by bit. The variable for the runner changes nothing."""
    file = tmp_path / "template"
    file.write_text("{{ other }}")
    same = Hooks("").find(engine(), flags(), FINE)
    assert Hooks("").find(engine(), flags(), FINE) == same
    assert same.best is Continuation.STATE
    other_model = [{**FINE[0], "identity": {**IDENTITY, "models": {"target": {"shards": "b"}}}}]
    other_torch = [{**FINE[0], "identity": {**IDENTITY, "torch": "2.14"}}]
    assert Hooks("").find(engine(), flags(), other_torch).id == same.id
    others = [
        Hooks("").find(engine("{{ else }}"), flags(), FINE),
        Hooks("").find(engine(), flags(chat_template=str(file)), FINE),
        Hooks("").find(engine(), flags(reasoning_parser="deepseek_r1"), FINE),
        Hooks("").find(engine(), flags(), other_model),
    ]
    others += [
        Hooks("").find(engine(v2=True), flags(), FINE),
        Hooks("").find(engine(v2=True), flags(use_fp64_gumbel=True), FINE),
    ]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert Hooks("").find(engine(), flags(), FINE) == same
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    exact = [Hooks("").find(engine(), flags(), each) for each in (FINE, other_torch)]
    assert exact[0].best is Continuation.EXACT
    assert len({each.id for each in (same, *others, *exact)}) == 9


def test_flags_that_shape_answers_are_vllms():
    """At least these are flags of the installed vLLM; others are of other versions."""
    from engine.backends.vllm.api import arguments

    known = {action.dest for action in arguments._parser()._actions}
    assert len(set(FLAGS) & known) > len(FLAGS) * 0.8
