"""The HTTP interface as a client sees it, on real processes under the stub supervisor."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.reference_process.active import serving

GREEDY = {"temperature": 0, "max_tokens": 12}
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("pod")
    with serving(directory, model, "--served-model-name", "tiny", "--slots", "3") as base:
        yield base


def call(url: str, document: Any = None, *, body: bytes | None = None) -> tuple[int, Any, Any]:
    """Status, headers and the raw body."""
    data = body if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def complete(url: str, **more: Any) -> Any:
    status, _, body = call(f"{url}/v1/completions", {"prompt": "hello", **GREEDY, **more})
    assert status == 200, body
    return json.loads(body)


def error_of(answer: tuple[int, Any, bytes]) -> tuple[int, Any]:
    return answer[0], json.loads(answer[2])["error"]


def test_models_are_listed_and_named(url: str):
    """Goal: /v1/models in OpenAI's shape. Method: list, get one, get one that is not there."""
    status, headers, body = call(f"{url}/v1/models")
    listed = json.loads(body)
    assert (status, listed["object"], listed["data"][0]["id"]) == (200, "list", "tiny")
    assert (headers["X-Understudy-Engine"], headers["X-Understudy-Token"]) == ("engine-0", "1")
    assert json.loads(call(f"{url}/v1/models/tiny")[2]) == listed["data"][0]
    status, error = error_of(call(f"{url}/v1/models/other"))
    assert (status, error["code"]) == (404, "model_not_found")


def test_prompt_as_tokens_is_taken_as_it_is(url: str):
    """Goal: nothing is added to token ids. Method: one letter as text and one token, counted."""
    assert complete(url, prompt="A")["usage"]["prompt_tokens"] == 2  # with the beginning of text
    assert complete(url, prompt=[65])["usage"]["prompt_tokens"] == 1
    assert complete(url, prompt=[[65]])["choices"] == complete(url, prompt=[65])["choices"]


def test_seed_repeats_and_company_changes_nothing(url: str):
    """Goal: an answer depends on nothing but its request. Method: eight at once on three slots."""
    requests = [{"prompt": f"p{n}", "temperature": 0.9, "seed": n} for n in range(8)]
    alone = [complete(url, **request)["choices"] for request in requests]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda r: complete(url, **r)["choices"], requests))
    assert together == alone
    assert len({choices[0]["text"] for choices in alone}) == 8


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", b"{", 400, "invalid_json"),
        ("/v1/completions", b'{"prompt": "x", "model": "other"}', 404, "model_not_found"),
        ("/v1/completions", b'{"prompt": ""}', 200, None),  # the beginning of text alone
        ("/v1/completions", b'{"prompt": [99999]}', 400, "invalid_value"),
        ("/v1/completions", b'{"prompt": [99999999999999999999]}', 400, "invalid_value"),
        ("/v1/nothing", b"{}", 404, "no_such_route"),
        ("/v1/models", b"{}", 405, "no_such_route"),
    ],
)
def test_bad_requests_get_an_openai_error(url: str, path: str, body: bytes, status: int, code: Any):
    """Goal: every refusal has OpenAI's shape and our headers. Method: one wrong request each."""
    answer = call(url + path, body=body)
    assert answer[0] == status
    assert answer[1]["X-Understudy-Engine"] == "engine-0"
    if code is not None:
        error = error_of(answer)[1]
        assert error["code"] == code
        assert set(error) == {"message", "type", "param", "code"}


def test_prompt_beyond_the_context_is_refused_with_both_numbers(url: str):
    """Goal: 400 before anything is generated. Method: prompts around the limit of 2048."""
    for document in (
        {"prompt": [65] * 2048, "max_tokens": 1},
        {"prompt": [65] * 2000, "max_tokens": 100},
        {"prompt": "x" * 100_000, "max_tokens": 1},
    ):
        status, error = error_of(call(f"{url}/v1/completions", document))
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "2048" in error["message"]


def test_body_beyond_the_limit_is_413(url: str):
    """Goal: a huge body is refused by size, in OpenAI's shape. Method: 5 MiB of prompt."""
    status, error = error_of(call(f"{url}/v1/completions", {"prompt": "x" * (5 << 20)}))
    assert (status, error["code"]) == (413, "body_too_large")


def test_body_in_a_broken_encoding_is_400(url: str):
    """Goal: bytes that are not what their encoding says are the sender's fault, not a failure of
    the engine."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=b"this is no gzip",
        headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as answer:
        assert answer.code == 400
        assert json.load(answer)["error"]["code"] == "bad_body"
