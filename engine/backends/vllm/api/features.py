"""What this engine does beside serving, and for each thing that it cannot do, why not.

The reasons are looked for in this order, and the first one stays: the command line, vLLM's
configuration, vLLM's sources (the contracts of those of our files that need them), each rank once
it has loaded, and on a GPU the self-test. Whatever is missing, the engine serves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from engine.backends.vllm import contracts, versions
from engine.backends.vllm.contracts import Sources
from engine.backends.vllm.kv import INSTALL_ENV as KEEP_ENV
from engine.backends.vllm.resume import INSTALL_ENV as RESUME_ENV

RESUME = "resume"  # take up streams of another engine
KEEP_KV = "keep_kv"  # leave KV blocks to the next engine
SLEEP = "sleep"
OFFLOAD = "offload"  # sleep without its weights
# Our files that rely on vLLM's, by how their names begin.
FILES: Mapping[str, tuple[str, ...]] = {
    RESUME: ("resume/", "api/continuation.py"),
    KEEP_KV: ("kv/",),
    SLEEP: ("core_serving.py",),
    OFFLOAD: (),
}
PROVEN = (RESUME, KEEP_KV, SLEEP)  # by the self-test
PROCESSORS = "vllm.logits_processors"  # entry points of packages that are installed
# Hashes of the others are made with a seed of the process, or collide.
HASH_ALGORITHMS = ("sha256", "sha256_cbor")


class Features:
    """`why_not`: by feature, why this engine does without it; "" of those that it has. `is_tested`:
    it has those of `PROVEN` only if its self-test passes. `warnings` are for the operator."""

    is_tested = False
    warnings: tuple[str, ...] = ()

    def __init__(self, **why_not: str) -> None:
        self.why_not = dict.fromkeys(FILES, "") | why_not

    @classmethod
    def find(cls, config: Any, sources: Sources, **refused: str) -> Features:
        """Before the engine starts, from its `VllmConfig` and vLLM's `sources`. `refused`: by the
        command line."""
        found, runner = cls(**refused), versions.in_use(config)
        for feature, files in FILES.items():
            if found.has(feature) and feature in PROBLEMS:
                found.lacks(feature, PROBLEMS[feature](config))
            if found.has(feature):
                found.lacks(feature, contracts.changed(sources, files, runner))
        return found

    def has(self, feature: str) -> bool:
        return not self.why_not[feature]

    def lacks(self, feature: str, why: str) -> None:
        """Without `feature`, because of `why`, unless that is empty."""
        self.why_not[feature] = self.why_not[feature] or why

    def learn(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """The workers have answered with their status."""
        for rank in ranks:
            for feature in FILES:
                if why := rank.get(f"cannot_{feature}"):
                    self.lacks(feature, f"rank {rank['rank']}: {why}")

    def install(self, config: Any) -> Any:
        """Before the engine starts: its processes read the configuration and the environment.
        Returns the engine's class."""
        for feature, variable in ((RESUME, RESUME_ENV), (KEEP_KV, KEEP_ENV)):
            os.environ.pop(variable, None)
            if self.has(feature):
                os.environ[variable] = "1"
        if self.has(RESUME) or self.has(KEEP_KV):
            config.scheduler_config.scheduler_cls = self._scheduler(config)
        if not self.has(RESUME):
            return AsyncLLM
        from engine.backends.vllm.resume.llm import ContinuingLLM

        return ContinuingLLM

    def _scheduler(self, config: Any) -> str:
        """Our subclass of the scheduler that vLLM would choose."""
        kind = "AsyncScheduler" if config.scheduler_config.async_scheduling else "Scheduler"
        place = "kv.scheduler.Keeping" if self.has(KEEP_KV) else "resume.scheduler.Resuming"
        if self.has(KEEP_KV) and self.has(RESUME):
            place = "kv.scheduler_resuming.KeepingResuming"
        return f"engine.backends.vllm.{place}{kind}"


def _cannot_resume(config: Any) -> str:
    if config.scheduler_config.scheduler_cls is not None:
        return "it has a scheduler of its own (--scheduler-cls)"
    has_own = config.model_config.logits_processors or entry_points(group=PROCESSORS)
    if versions.in_use(config) == versions.V2 and has_own:
        return (
            "it has logits processors of its own, and vLLM's model runner V2 does not give them "
            "the tokens already generated"
        )
    return ""


def _cannot_keep_kv(config: Any) -> str:
    """Any doubt means no. The memory is still shared between engines, but no content is
    believed."""
    cache, parallel = config.cache_config, config.parallel_config
    if not cache.enable_prefix_caching:
        return "prefix caching is off"
    if cache.prefix_caching_hash_algo not in HASH_ALGORITHMS:
        return (
            f"hashes by {cache.prefix_caching_hash_algo} are valid in one process only; use"
            " --prefix-caching-hash-algo sha256"
        )
    if getattr(cache, "calculate_kv_scales", False):
        return "the scales of the KV cache are computed by each engine"
    if config.speculative_config is not None:
        return "speculative decoding was not tried with it"
    if config.kv_transfer_config is not None:
        return "a connector writes to the KV cache, too"
    if parallel.decode_context_parallel_size > 1:
        return "with --decode-context-parallel-size a block lies in parts on several ranks"
    if config.scheduler_config.scheduler_cls is not None:
        return "vLLM has a scheduler of its own (--scheduler-cls)"
    return ""


def _cannot_sleep(config: Any) -> str:
    connector = "a KV connector has the addresses of its KV cache, too"
    return connector if config.kv_transfer_config is not None else ""


# Why an engine with this `VllmConfig` does without a feature, or nothing.
PROBLEMS: Mapping[str, Callable[[Any], str]] = {
    RESUME: _cannot_resume,
    KEEP_KV: _cannot_keep_kv,
    SLEEP: _cannot_sleep,
}
