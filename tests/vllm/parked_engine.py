"""vLLM's engine with our worker and private weights: `parked_engine.py MODEL ANSWER`.

Parks, wakes and asks it, and writes a report to ANSWER, as JSON. vLLM starts processes by importing
this file again, so nothing happens at the top level.
"""

from __future__ import annotations

import json
import sys
from typing import Any

WORKER = "tests.vllm.parked_worker.PrivateWorker"
PROMPTS = [[65, 66, 67], list(range(40, 90))]


def main(model: str, answer_path: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from engine.backends.vllm import kv_size

    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "generation_config": "vllm",  # not the checkpoint's sampling
        "max_model_len": 512,
        "distributed_executor_backend": "mp",
    }
    config = EngineArgs(model=model, **arguments).create_engine_config()
    proposed = kv_size.propose(config).size_bytes
    engine = LLM(model, kv_cache_memory_bytes=proposed, worker_cls=WORKER, **arguments)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def tokens() -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def ask(method: str, *arguments: Any) -> Any:
        (answer,) = engine.collective_rpc(method, args=arguments)
        return answer

    report: dict[str, Any] = {"proposed_bytes": proposed}
    report["blocks"] = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
    report["block_tokens"] = engine.llm_engine.vllm_config.cache_config.block_size
    report["tokens"] = [tokens()]
    report["scratch"] = ask("understudy_status")
    for _ in range(2):
        engine.sleep(1)
        engine.sleep(1)
        report["parked"] = ask("understudy_status")
        ask("find_free", 0)
        report["refused"] = ask("understudy_take_kv", 0.0)
        report["still_parked"] = ask("understudy_status")
        ask("find_free", 1 << 40)
        report["taken"] = ask("understudy_take_kv", 5.0)
        ask("understudy_take_kv", 5.0)
        engine.wake_up()
        engine.wake_up()
        report["tokens"].append(tokens())
        report["used"] = ask("understudy_status")
    for name, method in (("reload", "reload_weights"), ("warm_up", "compile_or_warm_up_model")):
        try:
            ask(method)
        except Exception as error:
            report[name] = str(error)
    report["tokens"].append(tokens())
    with open(answer_path, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
