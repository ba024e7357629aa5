"""The HTTP interface as a client sees it: routes, limits, the shape of every refusal."""

from __future__ import annotations

import io
import json
from typing import Any

from plumbing import __version__
from plumbing import gateway_protocol as hop
from tests.engine.reference.resume_cases import CHAT, COMPLETIONS, GREEDY
from tests.engine.reference.resuming import MAX_CONTEXT, Pod, with_pod


async def refusal(answer: Any) -> tuple[int, str]:
    """Status and code; every refusal has OpenAI's shape and our headers."""
    assert answer.headers["X-Understudy-Engine"] == "engine-0"
    error = (await answer.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status, error["code"]


@with_pod
async def test_models_are_listed_and_named(engine: Pod):
    answer = await engine.client.get("/v1/models")
    listed = await answer.json()
    assert (answer.status, listed["object"], listed["data"][0]["id"]) == (200, "list", "tiny")
    headers = answer.headers
    assert (headers["X-Understudy-Engine"], headers["X-Understudy-Token"]) == ("engine-0", "7")


@with_pod
async def test_gateway_learns_who_answers(engine: Pod):
    engine.served.continuation_id = "an id"
    async with engine.client.get(hop.HELLO_PATH) as answer:
        assert answer.headers[hop.TOKEN] == "7"
        assert await answer.json() == {
            "engine": "engine-0",
            "token": 7,
            "continuation_id": "an id",
            "continuation": "exact",
            "body_bytes_max": 4 << 20,
            "models": ["tiny"],
            "problem": None,
            "version": hop.VERSION,
            "backend_version": __version__,
            "slots": 2,
        }


@with_pod
async def test_prompt_as_tokens_is_taken_as_it_is(engine: Pod):
    """Goal: nothing is added to token ids. Method: one letter as text and one token, counted."""

    async def complete(engine: Pod, prompt: Any) -> Any:
        return json.loads((await engine.ask(COMPLETIONS, {**GREEDY, "prompt": prompt}))[2])

    text, tokens = await complete(engine, "A"), await complete(engine, [65])
    assert text["usage"]["prompt_tokens"] == 2  # with the beginning of text
    assert tokens["usage"]["prompt_tokens"] == 1


BAD: list[tuple[str, bytes, int, str]] = [
    (COMPLETIONS, b"{", 400, "invalid_json"),
    (COMPLETIONS, b'{"prompt": "x", "model": "other"}', 404, "model_not_found"),
    (COMPLETIONS, b'{"prompt": [99999]}', 400, "invalid_value"),
    (COMPLETIONS, b'{"prompt": [99999999999999999999]}', 400, "invalid_value"),
    (CHAT, b'{"messages": []}', 400, "invalid_value"),
    (COMPLETIONS, b'{"prompt": []}', 400, "invalid_value"),
    (COMPLETIONS, b'{"prompt": "x", "logit_bias": {"262": 1}}', 400, "invalid_value"),
    (COMPLETIONS, b'{"prompt": "x", "stop_token_ids": [262]}', 400, "invalid_value"),
    (COMPLETIONS, b'{"prompt": "x", "min_tokens": 19}', 400, "invalid_value"),
    (COMPLETIONS, b'{"prompt": "%b"}' % (b"x" * (5 << 20)), 413, "body_too_large"),
    *(
        (COMPLETIONS, json.dumps({"prompt": prompt, "max_tokens": most}).encode(), 400, code)
        for prompt, most, code in (
            ([65] * MAX_CONTEXT, 1, "context_length_exceeded"),
            ([65] * (MAX_CONTEXT - 10), 20, "context_length_exceeded"),
            ("x" * 100_000, 1, "context_length_exceeded"),
        )
    ),
    ("/v1/nothing", b"{}", 404, "no_such_route"),
    ("/v1/models", b"{}", 405, "no_such_route"),
]


@with_pod
async def test_bad_requests_get_an_openai_error(engine: Pod):
    """Goal: refused before anything is generated. Method: one wrong request each, and one whose
    bytes are not what their encoding says."""
    for path, body, status, code in BAD:
        answer = await engine.client.post(path, data=io.BytesIO(body))
        assert await refusal(answer) == (status, code), body[:80]
    headers = {"Content-Encoding": "gzip"}
    answer = await engine.client.post(COMPLETIONS, data=b"this is no gzip", headers=headers)
    assert await refusal(answer) == (400, "bad_body")
    assert engine.link.started == 0
