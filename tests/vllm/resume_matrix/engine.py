"""One vLLM engine as a gateway finds it, without supervisor, lock and memory service.

    python -m tests.vllm.resume_matrix.engine MODEL SOCKET [vLLM's flags]

The backend's own parts, in the order in which a supervisor would ask for them. If there is no
MODEL, a random one is written. Prints `ready`; a line `drain` on its input hands its streams over
and the end of the input ends it all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path

from engine.backends.process import ENGINE_ID_ENV
from engine.backends.vllm import process_tuning
from engine.backends.vllm.api.main import ENVIRONMENT, make_engine
from engine.messages import Counts
from plumbing.wire.fds import OwnedFd
from tests.vllm.overlapping import keep_async_scheduling
from tests.vllm.resume_matrix.model import ADAPTER, RANK, write_adapter, write_thinking_model

BLOCK_TOKENS = 32
FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=1024",
    f"--kv-cache-memory-bytes={64 << 20}",
    f"--block-size={BLOCK_TOKENS}",  # smaller than most answers: what is cached reaches into them
    "--max-num-seqs=48",
    "--max-num-batched-tokens=48",  # prompts are computed in parts
    "--reasoning-parser=deepseek_r1",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--served-model-name=m",
    "--uvicorn-log-level=warning",
)
VARIABLES = {
    **ENVIRONMENT,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ASYNC_FLAG, LORA_FLAG = "--async-scheduling", "--enable-lora"
GRAPHS_FLAG = "--no-enforce-eager"  # graphs and compiled code, as vLLM runs on a GPU
DRAIN_S = 5.0
ENGINE, TOKEN = "engine-0", 1


async def serve(model: str, path: str, flags: list[str]) -> None:
    from engine.backends.vllm.api import arguments
    from engine.backends.vllm.api.backend import StepCounter, VllmBackend
    from engine.backends.vllm.api.continuation import continuing
    from engine.backends.vllm.api.http import Front, bind

    if ASYNC_FLAG in flags:
        keep_async_scheduling()
    if LORA_FLAG in flags:
        adapter = Path(f"{model}-{ADAPTER}")
        write_adapter(adapter)
        flags = [*flags, f"--lora-modules={ADAPTER}={adapter}", f"--max-lora-rank={RANK}"]
    parsed = arguments.parse([model, *FLAGS, *flags])
    args, steps = parsed.vllm, StepCounter(Counts())
    args.worker_cls = "tests.vllm.resume_matrix.worker.Worker"
    args.load_format, args.model_loader_extra_config = "auto", {}
    private = bind(args, f"{path}.trial")
    os.environ[ENGINE_ID_ENV] = ENGINE
    engine, features = make_engine(parsed, steps)
    front = await Front.start(engine, args, private)
    find = partial(continuing, engine, args)
    backend = VllmBackend(engine, front, features, find_continuing=find)
    prepared = await backend.prepare()
    if not prepared.continuation:
        raise SystemExit("; ".join(prepared.warnings))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        fd = OwnedFd(listening.detach())
    with fd:
        await backend.wake(TOKEN, "", fd)
    canary = await backend.run_canary()
    assert canary.ok, canary.detail
    await backend.serve()
    say("ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.strip() == "drain":
            await backend.drain(DRAIN_S, resume=True)
            say("drained")


def say(word: str) -> None:
    print(word, flush=True)


def main() -> None:
    import uvloop

    model, path, *flags = sys.argv[1:]
    if not os.path.exists(model):
        write_thinking_model(Path(model))
    os.environ.update(VARIABLES)
    if GRAPHS_FLAG in flags:
        del os.environ["TORCH_COMPILE_DISABLE"]
    process_tuning.tune()
    os.setpgid(0, 0)  # vLLM's processes outlive their parent; they are all of this group
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(model, path, flags))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
