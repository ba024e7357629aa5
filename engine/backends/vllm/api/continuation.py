"""Whether another engine can continue this engine's streams, and which one.

Two engines with the same id give the same answer to the same request and journal, but for floating
point: the same weights, tokenizer, template, parsers and sampling defaults. What shapes an answer
belongs here; an upgrade must not glue two models together.

Surprising: `exact` asks for more than an equal model. The kernels must be equal, too, so that then
the id stands for everything by which weights are shared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from msgspec import Struct
from vllm import envs
from vllm.v1.engine.async_llm import AsyncLLM

from engine.backends.vllm import contracts, versions
from engine.backends.vllm.contracts import Sources
from engine.backends.vllm.resume import INSTALL_ENV
from engine.backends.vllm.worker.identity import files_of
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation

logger = logging.getLogger(__name__)

SCHEDULERS = "engine.backends.vllm.resume.scheduler"
RESUME_FILES = ("resume/", "api/continuation.py")
ID_CHARACTERS = 32
PROCESSORS = "vllm.logits_processors"  # entry points of packages that are installed

# vLLM's flags that shape an answer, by the names that any supported version gives them.
FLAGS = (
    "anthropic_disabled_thinking_effort",
    "chat_template_content_format",
    "cohere_format",
    "cohere_is_reasoning_model",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "enable_force_include_usage",
    "enable_per_request_metrics",
    "enable_prompt_tokens_details",
    "exclude_tools_when_tool_choice_none",
    "fingerprint_mode",
    "fingerprint_value",
    "generation_config",
    "hf_overrides",
    "logits_processors",
    "logprobs_mode",
    "max_logprobs",
    "max_model_len",
    "mm_processor_kwargs",
    "override_generation_config",
    "reasoning_config",
    "reasoning_parser",
    "reasoning_parser_plugin",
    "response_role",
    "return_tokens_as_token_ids",
    "structured_outputs_config",
    "tokenizer_mode",
    "tool_call_parser",
    "tool_parser_plugin",
    "tool_strict_level",
    "trust_request_chat_template",
    "use_fp64_gumbel",
)


class Continuing(Struct, frozen=True):
    """The best class of this engine's streams, the id of engines that may continue them, and why
    there are none."""

    best: Continuation = Continuation.NONE
    id: str = ""
    problem: str = ""
    adapters: frozenset[str] = frozenset()


class Hooks:
    """Those by which requests are taken up, if nothing is in the way."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    @classmethod
    def install(cls, config: Any, problem: str) -> Hooks:
        """Before the engine starts: its processes read the configuration and the environment."""
        os.environ.pop(INSTALL_ENV, None)
        if not problem:
            os.environ[INSTALL_ENV] = "1"
            config.scheduler_config.scheduler_cls = scheduler_of(config)
        return cls(problem)

    def engine_class(self) -> Any:
        if self.problem:
            return AsyncLLM
        from engine.backends.vllm.resume.llm import ContinuingLLM

        return ContinuingLLM

    def find(
        self, engine: Any, args: argparse.Namespace, ranks: Sequence[dict[str, Any]]
    ) -> Continuing:
        """Once its workers have answered with their status."""
        for rank in ranks:
            if not self.problem and rank["cannot_resume"]:
                self.problem = f"rank {rank['rank']}: {rank['cannot_resume']}"
        if self.problem:
            logger.warning("streams end with this engine: %s", self.problem)
            return Continuing(problem=self.problem)
        found = continuing(engine, args, ranks[0]["identity"])
        from engine.backends.vllm.resume.llm import Abilities

        engine.abilities = Abilities(found.best, found.adapters)
        return found


def continue_nothing(engine: Any, problem: str) -> Continuing:
    """For an engine that was about to continue streams."""
    if hasattr(engine, "abilities"):
        from engine.backends.vllm.resume.llm import Abilities

        engine.abilities = Abilities()
    return Continuing(problem=problem)


def problem_with(config: Any, sources: Sources) -> str:
    """Why an engine with this `VllmConfig` cannot take up a request, or nothing. Reads vLLM's
    `sources`."""
    if config.scheduler_config.scheduler_cls is not None:
        return "it has a scheduler of its own (--scheduler-cls)"
    if versions.in_use(config) == versions.V2 and (
        config.model_config.logits_processors or entry_points(group=PROCESSORS)
    ):
        return (
            "it has logits processors of its own, and vLLM's model runner V2 does not give them "
            "the tokens already generated"
        )
    return contracts.changed(sources, RESUME_FILES, versions.in_use(config))


def scheduler_of(config: Any) -> str:
    """Our scheduler that stands for vLLM's choice."""
    is_async = bool(config.scheduler_config.async_scheduling)
    return f"{SCHEDULERS}.{'ResumingAsyncScheduler' if is_async else 'ResumingScheduler'}"


def continuing(engine: Any, args: argparse.Namespace, identity: dict[str, Any]) -> Continuing:
    """For an engine whose hooks are in place."""
    is_exact = bool(envs.VLLM_BATCH_INVARIANT)
    modules = args.lora_modules or ()
    document = {
        "adapters": {each.name: _adapter(each.path) for each in modules},
        "hop": hop.VERSION,
        "flags": {name: getattr(args, name, None) for name in FLAGS},
        "identity": identity if is_exact else identity.get("models"),
        "names": args.served_model_name or [args.model],
        # Each runner makes other noise of the same seed. vLLM may choose V1 for a feature, so that
        # VLLM_USE_V2_MODEL_RUNNER does not tell which one runs.
        "runner": "v2" if engine.vllm_config.use_v2_model_runner else "v1",
        "sampling": engine.model_config.get_diff_sampling_param(),
        "template": _text_of(args.chat_template),
        "tokenizer": _tokenizer(engine.get_tokenizer()),
        "vllm": versions.vllm_version().split(".")[:2],
    }
    text = json.dumps(document, sort_keys=True, default=str)
    return Continuing(
        Continuation.EXACT if is_exact else Continuation.STATE,
        hashlib.sha256(text.encode()).hexdigest()[:ID_CHARACTERS],
        adapters=frozenset(each.name for each in modules),
    )


def _adapter(path: str) -> Any:
    return files_of(path) if os.path.isdir(path) else path


def _text_of(template: str | None) -> str | None:
    """A chat template is given as a file or as its text."""
    if template is None:
        return None
    try:
        with open(template, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return template


def _tokenizer(tokenizer: Any) -> str:
    if tokenizer is None:
        return ""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = fast.to_str() if fast is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    about = [type(tokenizer).__name__, words, str(getattr(tokenizer, "chat_template", None))]
    return hashlib.sha256("\0".join(about).encode()).hexdigest()
