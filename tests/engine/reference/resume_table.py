"""Two ways to continue a stream, for each kind of request: how many cuts each of them gets wrong.

`journal`: the same request, with the tokens so far as output. `appended`: what other gateways do,
the tokens so far behind the prompt and `max_tokens` reduced.
`python -m tests.engine.reference.resume_table` prints the table as JSON.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from engine.backends.reference.random_model import write_random_model
from tests.engine.reference.resume_cases import CASES, COMPLETIONS
from tests.engine.reference.resuming import Pod, Stream, pod


def said(streams: list[Stream]) -> tuple[str, Any]:
    """What a client is left with: the text, and why it ended."""
    text = "".join(group.text for stream in streams for group in stream.groups)
    return text, streams[-1].groups[-1].events[-1]["choices"][0]["finish_reason"]


async def appended(engine: Pod, path: str, document: dict[str, Any], tokens: list[int]) -> Stream:
    tokenizer = engine.served.tokenizer
    if path == COMPLETIONS:
        prompt = document["prompt"]
        prompt = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    else:
        prompt = tokenizer.encode(tokenizer.render_chat(document["messages"]), special=False)
    others = {name: value for name, value in document.items() if name != "messages"}
    rest = {"prompt": [*prompt, *tokens], "max_tokens": document["max_tokens"] - len(tokens)}
    stream, _ = await engine.stream(COMPLETIONS, {**others, **rest})
    return stream


async def wrong_cuts(engine: Pod, path: str, document: dict[str, Any]) -> dict[str, int]:
    whole, _ = await engine.stream(path, document)
    expected, cuts = said([whole]), range(1, len(whole.tokens))
    wrong = {"cuts": len(cuts), "journal": 0, "appended": 0}
    for made in cuts:
        tokens = whole.tokens[:made]
        resumed, _ = await engine.stream(path, document, tokens)
        wrong["journal"] += said([resumed]) != expected
        before = Stream(whole.groups[:made], (), False)
        try:
            after = await appended(engine, path, document, tokens)
        except AssertionError:  # refused: min_tokens exceeds what is left, for example
            wrong["appended"] += 1
        else:
            wrong["appended"] += said([before, after]) != expected
    return wrong


async def table(directory: Path) -> dict[str, dict[str, int]]:
    async with pod(directory) as engine:
        return {name: await wrong_cuts(engine, *case) for name, case in CASES.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(directory)
        print(json.dumps(asyncio.run(table(Path(directory))), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
