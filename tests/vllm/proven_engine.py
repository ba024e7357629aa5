"""Runs the self-test in a real engine, healthy and with each planted fault:
`proven_engine.py MODEL ANSWER [FAULT…]`. Without a FAULT: all of them, and healthy again.

The engine core, the scheduler and the worker are one process, in which `proven_worker.py` plants
the faults. The report, as JSON, has what the self-test says of each. vLLM starts processes by
importing this file again, so nothing happens at the top level.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from tests.vllm.proven_faults import FAULTS

WORKER = "tests.vllm.proven_worker.FaultyWorker"
EXECUTOR = "tests.vllm.proven_worker.InCore"
HEALTHY = "healthy"


async def prove(model: str, faults: list[str]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from engine.backends.vllm.api.features import Features
    from engine.backends.vllm.api.self_test import SelfTest
    from engine.backends.vllm.resume.answer import Continuing
    from plumbing.gateway_protocol import Continuation

    usage = UsageContext.OPENAI_API_SERVER
    config = AsyncEngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        generation_config="vllm",  # not the checkpoint's sampling
        max_model_len=512,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        worker_cls=WORKER,
        distributed_executor_backend=EXECUTOR,
    ).create_engine_config(usage_context=usage)
    began = time.monotonic()
    kind = Features(keep_kv="not asked").install(config)
    engine = kind.from_vllm_config(config, usage_context=usage)
    engine.continuing = Continuing(Continuation.STATE)
    report: dict[str, Any] = {"start_s": time.monotonic() - began}
    report["runner"] = "v2" if config.use_v2_model_runner else "v1"

    async def park() -> None:
        await engine.sleep(level=1)

    async def take() -> None:
        (answer,) = await engine.collective_rpc("understudy_scratch")
        assert not answer["problem"], answer

    await park()
    for fault in [HEALTHY, *(faults or [*FAULTS, HEALTHY])]:
        if fault != HEALTHY:
            await engine.collective_rpc("plant", args=(fault,))
        began = time.monotonic()
        problem = await SelfTest(engine, park, take).run()
        about = {"problem": problem, "seconds": round(time.monotonic() - began, 2)}
        if not report.get(HEALTHY):
            (report["last_block"],) = await engine.collective_rpc("find_last_block")
        report.setdefault(fault, []).append(about)
        print(f"{fault:40} {about['seconds']:6.2f} s  {problem}", flush=True)
        if fault != HEALTHY:
            await engine.collective_rpc("heal")
    engine.shutdown()
    return report


def main(model: str, answer_path: str, *faults: str) -> None:
    report = asyncio.run(prove(model, list(faults)))
    with open(answer_path, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
