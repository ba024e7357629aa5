"""Goal: no body keeps the loop from its other streams, takes more memory than it has bytes, or is
quoted in an answer.

Method: outlines beside what `json` builds; bodies of every shape, cut as connections cut them, with
the process's CPU time and a trace of what Python allocates; one through real sockets.
"""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.answers import QUOTED_CHARS_MAX
from gateway.server.requests import (
    BLOCK_BYTES,
    LOOKED_BYTES_MAX,
    OUTLINE_BYTES_MAX,
    Outline,
    read_members,
    value_of,
)
from tests.gateway.server.harness import CHAT
from tests.gateway.server.test_models import body, models_scene

PART_BYTES = 256_000  # what uvloop reads at once
MIB = 1 << 20
SIZE = 8 * MIB

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
KEYS = st.sampled_from(["model", "stream", "priority", "messages", '"model"', "a\\", "[{", ""])


def outline_of(text: bytes, cuts: list[int]) -> Outline:
    found = Outline()
    places = sorted({each % (len(text) + 1) for each in cuts} | {0, len(text)})
    for start, end in pairwise(places):
        found.feed(text[start:end])
    return found


def filled(unit: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    return before + unit * (SIZE // len(unit)) + after


SHAPES = {
    "arrays as the model": filled(b"[],", b'{"model":[', b"[]]}"),
    "arrays in messages": filled(b"[],", b'{"model":"m","messages":[', b"[]]}"),
    "deeper arrays": filled(b"[" * 400 + b"]" * 400 + b",", b'{"model":"m","x":[', b"[]]}"),
    "too deep": b'{"model":"m","x":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2) + b"}",
    "many members": filled(b'"x":1,', b'{"model":"m",', b'"y":1}'),
    "many members of brackets": filled(
        b'"x":' + b"[" * 80 + b"]" * 80 + b",", b'{"model":"m",', b'"y":1}'
    ),
    "short strings": filled(b'"",', b'{"model":"m","x":[', b'""]}'),
    "tokens": filled(b"12345,", b'{"model":"m","prompt":[', b"1]}"),
    "an image": filled(b"abcdefgh/+", b'{"messages":[{"url":"', b'"}],"model":"m"}'),
    "a long text": filled(b"a text, ", b'{"prompt":"', b'","model":"m"}'),
    "a text of backslashes": filled(b"\\\\", b'{"prompt":"', b'","model":"m"}'),
    "a long model": filled(b"m", b'{"model":"', b'"}'),
    "a long key": filled(b"a", b'{"', b'":1,"model":"m"}'),
    "a long number": filled(b"9", b'{"model":"m","priority":', b"}"),
    "an array": filled(b"[],", b"[", b"[]]"),
    "no JSON": filled(b"\x00"),
}
NAMED = (
    *("arrays in messages", "deeper arrays", "short strings", "tokens", "an image", "a long text"),
    *("a text of backslashes", "a long key"),
)


@given(
    st.lists(st.tuples(KEYS | st.text(max_size=3), VALUES), max_size=6),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.booleans(),
)
def test_the_outline_says_what_the_body_says(members, cuts, is_ascii):
    """Method: members in any order, also twice, and cut anywhere, also within an escape."""
    dump = [
        f"{json.dumps(key, ensure_ascii=is_ascii)}: {json.dumps(value, ensure_ascii=is_ascii)}"
        for key, value in members
    ]
    try:
        text = ("{" + ", ".join(dump) + "}").encode()
    except UnicodeEncodeError:
        return
    found = outline_of(text, cuts)
    assert found.text is not None
    of_outline, fault = read_members(found.text)
    of_body, fault_of_body = read_members(text)
    assert (fault, fault_of_body) == ("", "")
    for name in ("model", "priority", "keep_alive", "stream"):
        said = json.loads(bytes(getattr(of_body, name)))
        outlined = json.loads(bytes(getattr(of_outline, name)))
        if isinstance(said, (dict, list)):
            assert outlined == type(said)()
        elif isinstance(said, str) and set(said) & {'"', "\\"}:
            assert isinstance(outlined, str)  # no name of a model
        else:
            assert outlined == said


@given(st.text('[]{}",:\\ a1', max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_what_is_no_json_object_has_no_outline_of_one_that_names_another_model(text, cuts):
    """Method: what msgspec refuses in the outline or reads as the body's own members."""
    data = b'{"model":"m",' + text.encode() + b"}"
    found = outline_of(data, cuts)
    whole, _ = read_members(data)
    if found.text is not None and not read_members(data)[1]:
        assert read_members(found.text)[1] == ""
        assert value_of(read_members(found.text)[0].stream) == value_of(whole.stream)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_body_of_any_shape_is_outlined_without_building_it(shape):
    """Goal: nearly all of a body is passed over by C code, and nothing of it is built. Method: the
    bytes that Python looks at, and what is allocated, which depends on a part's size only."""
    text = SHAPES[shape]
    looked_bytes = 0

    class Counting(Outline):
        def _keep_outside(self, part: bytes) -> None:
            nonlocal looked_bytes
            looked_bytes += len(part) if self.text is not None else 0
            super()._keep_outside(part)

    found = Counting()
    tracemalloc.start()
    try:
        for start in range(0, len(text), PART_BYTES):
            found.feed(text[start : start + PART_BYTES])
        assert tracemalloc.get_traced_memory()[1] < 80 * PART_BYTES
    finally:
        tracemalloc.stop()
    assert looked_bytes <= LOOKED_BYTES_MAX + BLOCK_BYTES
    assert found.text is None or len(found.text) <= OUTLINE_BYTES_MAX
    members, _ = read_members(b"" if found.text is None else found.text)
    assert (bytes(members.model) == b'"m"') is (shape in NAMED)


@models_scene()
async def test_a_body_that_names_no_model_of_the_pool_gets_a_short_answer(models):
    """Method: `{"model": [[],…]}`, names of megabytes in a body, and one of kilobytes in a path."""
    models.open("coder")
    for shape, code in (
        ("arrays as the model", "gateway.no_model"),
        ("many members", "gateway.bad_json"),
        ("too deep", "gateway.bad_json"),
        ("no JSON", "gateway.bad_json"),
        ("a long model", "model_not_found"),
        ("an image", "model_not_found"),
    ):
        answer = await models.bench.once(CHAT, SHAPES[shape])
        assert answer.error()["code"] == code, shape
        assert len(answer.body) < 600
    name = "\x00" * 5_000_000
    for document in (body(name), body("n" * 200)):
        answer = await models.bench.once(CHAT, document)
        assert answer.error()["code"] == "model_not_found"
        assert len(answer.body) < 12 * QUOTED_CHARS_MAX
    answer = await models.bench.once(f"/m/{'n' * 50_000}{CHAT}", body(None))
    assert answer.error()["code"] == "model_not_found"
    assert len(answer.body) < 12 * QUOTED_CHARS_MAX


@models_scene()
async def test_one_turn_of_the_loop_reads_one_part_of_a_large_body(models, monkeypatch):
    """Goal: other streams go on while it arrives. Method: a count of the loop's turns, beside the
    turns in which a part was outlined; uvloop by itself reads 32 parts in one."""
    turns, fed = 0, list[int]()
    feed = Outline.feed

    def counted(outline: Outline, part: bytes | bytearray) -> None:
        fed.append(turns)
        feed(outline, part)

    monkeypatch.setattr(Outline, "feed", counted)
    client = await models.bench.client()
    client.ask(CHAT, SHAPES["tokens"])
    asked = asyncio.ensure_future(client.answer())
    while not asked.done():
        turns += 1
        await asyncio.sleep(0)
    assert (await asked).status == 404
    assert len(fed) > 1
    assert len(set(fed)) == len(fed)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("is_named_first", [False, True])
@models_scene()
async def test_a_large_request_reaches_its_model_as_it_was_sent(models, is_chunked, is_named_first):
    noise = random.Random(1).randbytes(3 * MIB).hex()
    document = body("coder", max_tokens=3) | {"messages": [{"role": "user", "content": noise}]}
    members = document.items() if is_named_first else reversed(document.items())
    text = json.dumps(dict(members)).encode()
    models.open("coder")
    client = await models.bench.client()
    if is_chunked:
        client.send(
            b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"%x\r\n%b\r\n0\r\n\r\n" % (CHAT.encode(), len(text), text)
        )
    else:
        client.ask(CHAT, text)
    answer = await client.answer()
    assert (answer.status, answer.headers["x-understudy-engine"]) == (200, "coder-0")
    (request,) = models.engines["coder"].requests
    assert request.body == text
