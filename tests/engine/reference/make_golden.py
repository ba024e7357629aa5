"""Makes the golden files that the reference decoder is checked against, with transformers.

Run it in its own environment, since torch and transformers are not dependencies:

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers safetensors
    /tmp/golden/bin/python tests/engine/reference/make_golden.py tests/engine/reference/golden

Each case is a tiny checkpoint as `save_pretrained` writes it, and a `golden.json` beside it:
prompts, the greedy tokens that follow, and the logits after the prompt, all in float32 from the
stored (rounded) weights. A seed is taken only if no choice is close, so that another machine's
rounding cannot change a token.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore] # only in the script's own environment
import transformers  # type: ignore[import-not-found,unused-ignore] # the same

NEW_TOKENS = 24
# Longer than one and two prefill chunks, and exactly one.
PROMPT_LENGTHS = (1, 7, 32, 75)
CLOSEST_CHOICE = 2e-3  # logits are about 3 apart; float32 sums differ by about 1e-5

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
CASES: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    # name: (configuration beside SMALL, stored dtype, largest shard)
    "tied-f32": ({"tie_word_embeddings": True, "head_dim": 12}, torch.float32, "1GB"),
    "untied-gqa-bf16": ({"num_key_value_heads": 2, "rms_norm_eps": 1e-5}, torch.bfloat16, "1GB"),
    "sharded-bf16": ({"num_key_value_heads": 1, "head_dim": 16}, torch.bfloat16, "24KB"),
}


def main(target: str) -> None:
    for name, (extra, dtype, shard) in CASES.items():
        directory = os.path.join(target, name)
        for seed in range(100):
            shutil.rmtree(directory, ignore_errors=True)
            cases, margin = make_case(directory, {**SMALL, **extra}, dtype, shard, seed)
            if margin > CLOSEST_CHOICE:
                break
        else:
            raise SystemExit(f"{name}: no seed below 100 gives clear choices")
        golden = {"transformers": transformers.__version__, "seed": seed, "cases": cases}
        with open(os.path.join(directory, "golden.json"), "w", encoding="utf-8") as file:
            file.write(json.dumps(golden) + "\n")
        print(f"{name}: seed {seed}, closest choice {margin:.4f}")


def make_case(
    directory: str, settings: dict[str, Any], dtype: torch.dtype, shard: str, seed: int
) -> tuple[list[dict[str, Any]], float]:
    """Save one random checkpoint and answer its prompts; also the smallest lead of a choice."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    for weight in model.parameters():  # norms: not all 1, or leaving them out would go unseen
        is_norm = weight.dim() == 1
        torch.nn.init.normal_(weight, is_norm, 0.2 if is_norm else 2.0 / weight.shape[1] ** 0.5)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    model = transformers.LlamaForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    cases, margin = [], float("inf")
    for length in PROMPT_LENGTHS:
        tokens = torch.randint(3, settings["vocab_size"], (length,)).tolist()
        seen = []
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                seen.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1])
            best = seen[-1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        logits = [round(float(value), 5) for value in seen[0]]
        cases.append({"prompt": tokens[:length], "tokens": tokens[length:], "logits": logits})
    return cases, margin


if __name__ == "__main__":
    main(sys.argv[1])
