"""A resumed request is the request: cut anywhere, joined, it equals the run that was never cut."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from typing import Any

import pytest

from engine.backends.reference.application import MarkedStream
from plumbing import gateway_protocol as hop
from tests.engine.reference.resume_cases import CASES, CHAT, COMPLETIONS, GREEDY, TALK
from tests.engine.reference.resuming import Pod, Stream, read_stream, with_pod
from tests.helpers import auntil


def check_joined(whole: Stream, made: int, resumed: Stream) -> None:
    """What is replayed is what was delivered, in one group; behind it every event is the same."""
    groups = resumed.groups
    if made:
        before = whole.groups[:made]
        replayed, *groups = groups
        assert replayed.tokens == tuple(whole.tokens[:made])
        assert replayed.text == "".join(group.text for group in before)
        assert str(replayed.events).count("'role'") == str(before).count("'role'")
        if made == len(whole.groups):
            assert replayed.events[-1] == before[-1].events[-1]  # the one with the finish reason
    assert groups == whole.groups[made:]
    assert resumed.rest == whole.rest
    assert resumed.is_whole


@pytest.mark.parametrize("name", CASES)
@with_pod
async def test_cut_behind_any_token_and_resumed_is_the_uninterrupted_answer(engine: Pod, name: str):
    """Goal: class `exact`, every event, usage and finish too. Method: each kind of request, cut
    behind each of its groups; the tokens so far are the journal. One that ends the answer is played
    without the model. Cut anywhere else, the groups that came whole are the same."""
    path, document = CASES[name]
    whole, body = await engine.stream(path, document)
    assert whole.is_whole
    assert len(whole.groups) == len(whole.tokens)
    for made in range(len(whole.tokens) + 1):
        asked_before = engine.link.started
        resumed, _ = await engine.stream(path, document, whole.tokens[:made])
        check_joined(whole, made, resumed)
        assert engine.link.started - asked_before == (made < len(whole.tokens))
    for cut in range(0, len(body), 17):  # also inside an event, a comment, a character
        groups = read_stream(body[:cut]).groups
        assert groups == whole.groups[: len(groups)]


BAD: list[tuple[str, dict[str, Any], list[int]]] = [
    ("longer than max_tokens", {"max_tokens": 2}, [65, 66, 67]),
    ("beyond the vocabulary", {}, [65, 262]),
    ("behind a stop token", {"stop_token_ids": [66]}, [65, 66, 67]),
    ("behind an end token", {}, [65, 257, 67]),
    ("behind a stop string", {"stop": "AB"}, [65, 66, 67]),
    ("a stop token too early", {"stop_token_ids": [66], "min_tokens": 3}, [65, 66]),
]


@pytest.mark.parametrize(("what", "more", "journal"), BAD, ids=[what for what, _, _ in BAD])
@with_pod
async def test_journal_that_the_request_cannot_have_made_is_refused(
    engine: Pod, what: str, more: dict[str, Any], journal: list[int]
):
    """Goal: two requests are never glued together. Method: one impossible journal each, whose
    beginning is possible."""
    document = {**GREEDY, **more, "stream": True}
    status, headers, body = await engine.ask(COMPLETIONS, document, journal)
    assert (status, b"resume.bad_journal" in body) == (400, True), (what, body)
    assert headers[hop.CONTINUATION] == "retry"
    assert engine.link.started == 0
    assert (await engine.ask(COMPLETIONS, document, journal[:1]))[0] == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@with_pod
async def test_answer_without_a_stream_is_of_class_retry_and_says_the_same(engine: Pod, path: str):
    """Goal: what was not delivered is asked for again. Method: the same request without a stream,
    also with a journal."""
    document = GREEDY if path == COMPLETIONS else TALK
    whole, _ = await engine.stream(path, document)
    status, headers, body = await engine.ask(path, document)
    assert (status, headers[hop.CONTINUATION]) == (200, "retry")
    again = json.loads((await engine.ask(path, document, whole.tokens[:5]))[2])
    # A second may have passed.
    assert again | {"created": 0} == json.loads(body) | {"created": 0}


@pytest.mark.parametrize("is_compressed", [False, True])
@with_pod
async def test_gateway_of_another_version_of_the_hop_gets_a_plain_stream(
    engine: Pod, is_compressed: bool
):
    """Goal: during an upgrade nobody has to read another release's comments; and a journal behind a
    compressed body could not be told from it. Method: a newer gateway's header, and gzip: class
    `none`, and nothing that a gateway would have to cut off."""
    data = json.dumps({**GREEDY, "stream": True}).encode()
    headers = {hop.GATEWAY: str(hop.VERSION + 1)}
    if is_compressed:
        data, headers = gzip.compress(data), {hop.GATEWAY: "1", "Content-Encoding": "gzip"}
    async with engine.client.post(COMPLETIONS, data=data, headers=headers) as answer:
        assert (answer.status, answer.headers[hop.CONTINUATION]) == (200, "none")
        body = await answer.read()
    assert body.endswith(b"data: [DONE]\n\n")
    assert hop.GROUP_MARK not in body


@with_pod
async def test_direct_engine_ignores_what_only_a_gateway_may_say(engine: Pod):
    """Goal: a client cannot mark or resume anything itself. Method: the gateway's headers and paths
    at an engine that is not behind one."""
    engine.served.is_behind_gateway = False
    status, headers, body = await engine.ask(COMPLETIONS, {**GREEDY, "stream": True})
    assert status == 200
    assert hop.CONTINUATION not in headers
    assert hop.GROUP_MARK not in body
    assert hop.END not in body
    assert b"invalid_json" in (await engine.ask(COMPLETIONS, GREEDY, [65]))[2]
    status, _, _ = await engine.ask(hop.HELLO_PATH, {})
    assert status == 405


class Connection(asyncio.Protocol):
    is_lost = False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True


async def test_stream_that_the_gateway_has_left_is_left_alone():
    """Goal: a gateway that parks a stream itself, just before the drain, costs the engine nothing.
    Method: uvloop's transport of a connection that the peer has closed, which refuses writes."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    transport, protocol = await asyncio.get_running_loop().connect_accepted_socket(Connection, ours)
    stream = MarkedStream(transport)
    stream.has_begun = True
    theirs.close()
    await auntil(lambda: protocol.is_lost, "the end to be seen")
    stream.leave()
