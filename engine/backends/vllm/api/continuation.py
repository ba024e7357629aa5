"""Whether another engine can continue this engine's streams, and which one.

Two engines with the same id give the same answer to the same request and journal, but for floating
point: the same weights, tokenizer, template, parsers and sampling defaults. What shapes an answer
belongs here; an upgrade must not glue two models together.

Surprising: `exact` asks for more than an equal model. The kernels must be equal, too, so that then
the id stands for everything by which weights are shared.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from vllm import envs

from engine.backends.shards import digest_of
from engine.backends.vllm import versions
from engine.backends.vllm.resume.answer import Continuing
from engine.backends.vllm.worker.identity import files_of
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation

ID_CHARACTERS = 32

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


def continuing(engine: Any, args: argparse.Namespace, identity: dict[str, Any]) -> Continuing:
    """For an engine that can resume, with this identity of its weights."""
    is_exact = bool(envs.VLLM_BATCH_INVARIANT)
    adapters = {
        each.name: files_of(each.path) if os.path.isdir(each.path) else each.path
        for each in args.lora_modules or ()
    }
    document = {
        "adapters": adapters,
        "hop": hop.VERSION,
        "flags": {name: getattr(args, name, None) for name in FLAGS},
        "identity": identity if is_exact else identity.get("models"),
        "names": args.served_model_name or [args.model],
        # Each runner makes other noise of the same seed. vLLM may choose V1 for a feature, so that
        # VLLM_USE_V2_MODEL_RUNNER does not tell which one runs.
        "runner": versions.in_use(engine.vllm_config),
        "sampling": engine.model_config.get_diff_sampling_param(),
        "template": _text_of(args.chat_template),
        "tokenizer": _tokenizer(engine.get_tokenizer()),
        "vllm": versions.vllm_version().split(".")[:2],
    }
    return Continuing(
        Continuation.EXACT if is_exact else Continuation.STATE,
        digest_of(document)[:ID_CHARACTERS],
        adapters=frozenset(adapters),
    )


def _text_of(template: str | None) -> str | None:
    """A chat template is given as a file or as its text."""
    try:
        return Path(template or "").read_text(encoding="utf-8")
    except OSError:
        return template


def _tokenizer(tokenizer: Any) -> str:
    if tokenizer is None:
        return ""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = fast.to_str() if fast is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    about = [type(tokenizer).__name__, words, str(getattr(tokenizer, "chat_template", None))]
    return digest_of(about)
