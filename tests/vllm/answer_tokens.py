"""Stock vLLM's greedy tokens, in a separate process: `answer_tokens.py JOB ANSWER`, two files.

JOB is {"model": directory, "prompts": [[token, …], …], "tokens": number, "ranks": number}; ANSWER
becomes {"tokens": [[token, …], …], "left": [[path, device, inode], …]}: vLLM leaves some of its
shared memory behind even after a normal exit, and the caller removes it. vLLM starts processes by
importing this file again, so nothing happens at the top level.
"""

from __future__ import annotations

import json
import os
import sys

from engine.supervisor import leftovers
from plumbing.service.procfs import descendants


def main(job_path: str, answer_path: str) -> None:
    from vllm import LLM, SamplingParams

    with open(job_path) as file:
        job = json.load(file)
    engine = LLM(
        job["model"],
        dtype="float32",
        enforce_eager=True,
        generation_config="vllm",  # not the checkpoint's sampling
        kv_cache_memory_bytes=64 << 20,
        max_model_len=512,
        tensor_parallel_size=job["ranks"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    held = leftovers.held_by([os.getpid(), *descendants(os.getpid())])
    found = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "left": [[name.path, name.dev, name.ino] for name in held],
    }
    with open(answer_path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
