"""In each of vLLM's processes: what Triton's interpreter does wrong, or too slowly."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Called by vLLM."""
    _patch_the_language_once()
    _keep_truth_values()
    _top_k_by_torch()


class _Kept:
    """A patch of `triton.language` that stays."""

    def restore(self) -> None:
        pass


def _patch_the_language_once() -> None:
    """The interpreter exchanges every function of `triton.language` at each launch, and at each
    call of one kernel's function by another, and back: more work than the kernels. Here nothing is
    ever compiled, so that the exchange can stay. Kernels see the language by one of two modules."""
    from triton.runtime import interpreter

    exchange, done = interpreter._patch_lang, set[frozenset[int]]()
    modules = (interpreter.tl, interpreter.tl.core)

    def once(kernel: Any) -> _Kept:
        seen = {id(each) for each in modules if any(each is v for v in kernel.__globals__.values())}
        if frozenset(seen) not in done:
            exchange(kernel)
            done.add(frozenset(seen))
        return _Kept()

    interpreter._patch_lang = once


def _keep_truth_values() -> None:
    """A scalar truth value that is spread over a block becomes an int32 in Triton 3.9, which no
    mask may be: the kernel of grammars fails."""
    from triton.runtime.interpreter import InterpreterBuilder

    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, block_type: Any, scalar: Any) -> Any:
        made = spread(self, block_type, scalar)
        if scalar.data.dtype == bool:
            made.data = made.data.astype(bool)
        return made

    InterpreterBuilder.create_splat = create_splat


def _top_k_by_torch() -> None:
    """vLLM's kernel for top-k and top-p calls a method of a loop's variable, which the interpreter
    makes a plain int. It has no state of a request, so torch may do it, as with V1 on the CPU."""
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    def by_torch(logits: Any, k: Any, p: Any, **_: Any) -> Any:
        return ops.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    ops.apply_top_k_top_p_triton = by_torch
