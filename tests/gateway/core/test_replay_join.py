"""What events amount to, the check of a replay, and the exchange of ids in bytes."""

from __future__ import annotations

import json
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import replay_join
from gateway.core.replay import TOKEN_MAX, Replay, ReplayMismatch, Rewriter, Transcript
from gateway.core.replay_join import Joined, events_in
from tests.gateway.core.model import KINDS, Play


def run_of(kind: str, seed: int, prompt: str = "p", **options) -> bytes:
    play = Play(kind, prompt, 20, random.Random(seed), **options)
    return b"".join([*(events for events, _, _ in play.groups()), play.tail()])


@pytest.mark.parametrize("kind", KINDS)
def test_joined_runs_of_one_request_are_the_same_and_others_are_not(kind):
    """Goal: neither the cut of events nor ids matter, and a word does. Method: twenty runs."""
    first = Joined(run_of(kind, 0))
    for seed in range(1, 20):
        assert Joined(run_of(kind, seed)).is_same(first)
        assert not Joined(run_of(kind, seed, "q")).is_same(first)
        assert not Joined(run_of(kind, seed, misspells=True)).is_same(first)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_notices_every_event_that_is_lost_or_doubled(kind):
    """Goal: nothing goes missing unseen. Method: leave each event out, and say each twice."""
    raw = run_of(kind, 3)
    whole = Joined(raw)
    events = [event + b"\n\n" for event in raw.split(b"\n\n")[:-1]]
    for place, event in enumerate(events):
        if b'"content": ""' in event or b'"arguments": ""' in event:
            continue  # the opening of a chat, which says nothing twice
        for changed in ([], [event, event]):
            other = Joined(b"".join([*events[:place], *changed, *events[place + 1 :]]))
            if changed and b'"finish_reason": "length"' in event and b'": ""' in event:
                continue  # an end said twice is the same end
            is_opening = kind == "tools" and b"role" in event
            assert other.is_same(whole) == (is_opening and bool(changed)), event


@pytest.mark.parametrize(
    "raw",
    [
        b"data: [1,2]\n\n",
        b"data: {\n\n",
        b"data: \xff\n\n",
        b'data: {"a":"\xff"}\n\n',  # JSON, but for its text
        b"data: %b\n\n" % (b"[" * 5000),
        b'data: {"choices":[{"index":{"a":1},"delta":{"content":"x"}}]}\n\n',
        b'data: {"choices":[[[]],3,"x"]}\n\n',
        b'data: {"type":"a.delta","index":[1],"delta":"x"}\n\n',
        b'data: {"a":"b"}\n\n',
        b"data: half an event",
    ],
)
def test_joined_takes_whatever_an_engine_sends(raw):
    """Goal: an engine's nonsense costs no other stream. Method: nonsense; once is not twice."""
    assert Joined(raw).is_same(Joined(raw))
    assert not Joined(raw).is_same(Joined())


def test_events_are_found_with_either_end_of_line():
    """Goal: servers that write CRLF. Method: both, with a comment and two lines of data."""
    for end in (b"\n", b"\r\n"):
        raw = end.join([b": hm", b"", b"event: x", b"data: 1", b"data:2", b"", b""])
        assert [data for data, _ in events_in(raw)] == [b"", b"1\n2"]
        assert [after for _, after in events_in(raw)][-1] == len(raw)


def test_replay_must_have_the_journals_tokens_and_its_content():
    """Goal: nothing is glued. Method: each way to differ; then the right one."""
    events = b'data: {"choices":[{"index":0,"delta":{"content":"a b"}}]}\n\n'
    other = events.replace(b"a b", b"a c")

    def replay():
        return Replay(Joined(events), array("I", [1, 2]))

    for groups, why in [
        ([(events, [1, 3], False)], "another answer"),
        ([(events, [3], False)], "another answer"),  # at once, however little was played
        ([(events, [1, 2, 3], False)], "beyond"),
        ([(b"", [1], False), (b"", [2, 3], False)], "beyond"),
        ([(events, [1, -2], False)], "another answer"),
        ([(other, [1, 2], False), (b"", [], True)], "content"),
        ([(other, [1, 2], False), (events, [3], False)], "content"),
        ([(events, [1], False), (b"", [], True)], "ended after 1 of 2"),
    ]:
        playing = replay()
        for group in groups[:-1]:
            assert playing.feed(*group) is None
        with pytest.raises(ReplayMismatch, match=why):
            playing.feed(*groups[-1])
    playing = replay()
    assert playing.feed(events[:0], [1], False) is None
    rest = playing.feed(events + b"data: [DONE]\n\n", [2], False)
    assert rest is not None
    assert (rest.events, rest.has_new_tokens) == (b"data: [DONE]\n\n", False)


TEXT = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ['"id":"m-new"', '"created":22,', 'm-new","id": "m-new', '\\"id":"m-new"', "22"]
    ),
)


@settings(max_examples=150, deadline=None)
@given(TEXT, TEXT, st.booleans(), st.booleans())
def test_rewriter_changes_ids_and_nothing_that_was_written(text, key, is_spaced, is_ascii):
    """Goal: a user's or model's text is never touched. Method: any text, with what looks like an id
    in it, as a value and as a key; decode and compare."""
    old = Joined(b'data: {"id":"m-old","created":11,"choices":[]}\n\n')
    new = Joined(b'data: {"id":"m-new","created":22,"choices":[]}\n\n')
    rewriter = Rewriter.between(old, new)
    assert rewriter is not None
    event = {"id": "m-new", "created": 22, "choices": [{"delta": {"content": text}, "x": [key]}]}
    event["nested"] = {"item_id": "m-new", "created_at": 220, "text": "m-new", "k" + key: 22}
    separators = (", ", ": ") if is_spaced else (",", ":")
    raw = json.dumps(event, separators=separators, ensure_ascii=is_ascii)
    raw_bytes = raw.encode("utf-8", "surrogatepass")
    found = json.loads(rewriter.rewrite(raw_bytes).decode("utf-8", "surrogatepass"))
    event |= {"id": "m-old", "created": 11}
    event["nested"]["item_id"] = "m-old"
    assert found == json.loads(json.dumps(event))


def test_rewriter_exchanges_values_in_one_pass_and_goes_on_counting_events():
    """Goal: ids that are another engine's ids too are not exchanged twice. Method: a swap."""

    def delta(first, second, number):
        said = {"type": "x", "a": {"id": first}, "b": {"id": second}, "sequence_number": number}
        return b"data: %b\n\n" % json.dumps(said).encode()

    rewriter = Rewriter.between(Joined(delta("p", "q", 9)), Joined(delta("q", "p", 4)))
    assert rewriter is not None
    assert rewriter.rewrite(delta("p", "q", 5)) == delta("q", "p", 10)
    same = Joined(delta("p", "q", 4))
    assert Rewriter.between(same, same) is None


def test_transcript_amounts_to_what_it_took_and_stays_small():
    """Goal: nothing is lost in blocks, and a long answer takes no more memory than its tokens.
    Method: many groups, of one token or of several, packed at any time."""
    transcript, sent = Transcript(), b""
    tokens: list[int] = []
    chunks: list[int] = []
    assert transcript.joined.is_empty
    transcript.add(b"", [], [])
    assert transcript.joined.is_empty
    for number in range(2000):
        event = b'data: {"id":"chatcmpl-1","choices":[{"delta":{"content":"%d"}}]}\n\n' % number
        sent += event
        if number % 100 == 50:
            transcript.add(event, [number, TOKEN_MAX, 7], [1, 2])
            tokens += [number, TOKEN_MAX, 7]
            chunks += [1, 2]
        else:
            transcript.pending += (event, number)
            tokens.append(number)
            chunks.append(1)
        if number % 300 == 0:
            assert transcript.tokens[-1] == tokens[-1]
        if number % 70 == 0:
            assert transcript.pack() - 4 * (len(tokens) + len(chunks)) < 4096
    with pytest.raises(OverflowError):
        transcript.add(b"data: x\n\n", [1, TOKEN_MAX + 1], [2])
    transcript.pack()
    transcript.add(b"data: [DONE]\n\n", [], [])
    assert not transcript.joined.is_empty
    assert transcript.joined.is_same(one_by_one([sent + b"data: [DONE]\n\n"]))
    assert not transcript.joined.is_same(Joined(sent))
    assert (transcript.tokens.tolist(), transcript.chunks.tolist()) == (tokens, chunks)


def one_by_one(events: list[bytes]) -> Joined:
    """As if no event had the form of the one before it."""
    joined = Joined()
    for raw in events:
        start = 0
        for _, end in events_in(raw):
            joined._form = None
            joined.add(raw[start:end])
            start = end
    return joined


PIECES = st.lists(
    st.one_of(
        st.text(max_size=4),
        st.sampled_from(['"', "\\", '\\"', '","', "漢", "\n\n", '"},"x":{"', 'data: {"', "\x1f"]),
        st.sampled_from(['"usage":{"a":1}', '"logprobs": null', "}", "{", "[DONE]"]),
    ),
    max_size=12,
)
USAGES = st.sampled_from(
    [
        *(None, 1, {}, {"total_tokens": 7}, [1, {"b": ["}"]}]),
        {"a": {"b": {"c": {"d": {"e": {"f": '{"'}}}}}},  # deeper than is left out
    ]
)


def event_of(api: str, piece: str, usage, number: int, separators, is_ascii: bool) -> bytes:
    """A delta with `usage` where it is not compared."""
    head = b""
    if api == "chat":
        choice = {"index": 0, "delta": {"content": piece}, "logprobs": usage}
        said = {"id": "m", "choices": [choice], "usage": usage}
    elif api == "tools":
        call = {"index": 0, "function": {"arguments": piece}}
        choice = {"index": 0, "delta": {"content": None, "tool_calls": [call]}}
        said = {"id": "m", "choices": [{**choice, "token_ids": [len(piece)] * (len(piece) % 3)}]}
    elif api == "responses":
        said = {"type": "response.output_text.delta", "item_id": "m", "delta": piece}
        said |= {"logprobs": usage, "sequence_number": number, "output_index": 0}
        head = b"event: response.output_text.delta\n"
    else:
        said = {"type": "content_block_delta", "index": 0}
        said |= {"delta": {"type": "text_delta", "text": piece}}
        head = b"event: content_block_delta\n"
    text = json.dumps(said, separators=separators, ensure_ascii=is_ascii)
    return head + b"data: %b\n\n" % text.encode("utf-8", "surrogatepass")


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["chat", "tools", "responses", "messages"]),
    PIECES,
    st.lists(USAGES, min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_many_events_at_once_amount_to_the_same(api, pieces, usages, is_spaced, is_ascii, data):
    """Goal: the short way has the result of parsing. Method: texts that look like what is around
    them, in events that are alike but for what is not compared; cut into blocks anywhere."""
    separators = (", ", ": ") if is_spaced else (",", ":")
    events = [
        event_of(api, piece, usages[place % len(usages)], place, separators, is_ascii)
        for place, piece in enumerate(pieces)
    ]
    parsed = one_by_one(events)
    joined, start = Joined(), 0
    while start < len(events):
        end = data.draw(st.integers(start + 1, len(events)))
        joined.add(b"".join(events[start:end]))
        start = end
    assert joined.is_same(parsed)
    assert (joined.ids, joined.sequence) == (parsed.ids, parsed.sequence)
    said = "".join(pieces)
    if api == "chat" and said and said.isprintable():
        whole = [event_of(api, said, None, 0, separators, is_ascii)]
        assert joined.is_same(one_by_one(whole))


@pytest.mark.parametrize("api", ["chat", "tools", "responses", "messages"])
def test_only_the_first_of_many_alike_events_are_parsed(api, monkeypatch):
    """Goal: a token costs no JSON, whatever is said beside it. Method: a long stream whose events
    differ in text, log probabilities, token ids and numbers; events that are parsed are counted."""
    parsed = []
    parts_of = replay_join.parts_of
    monkeypatch.setattr(replay_join, "parts_of", lambda data: parsed.append(data) or parts_of(data))
    texts = ["a", "\\", '"', "漢", "\n", "😀", 'b\\"']
    events = [
        event_of(api, texts[at % 7], {"a": [{"token": "{", "b": at}]}, at, (",", ":"), at % 2 == 0)
        for at in range(1000)
    ]
    joined = Joined()
    for start in range(0, len(events), 60):
        joined.add(b"".join(events[start : start + 60]))
    assert len(parsed) <= 2
    assert joined.is_same(one_by_one(events))
    assert joined.held_bytes < 8192


def test_event_of_another_form_is_not_taken_for_one_of_this_form():
    """Goal: every value counts, and text that is not JSON is no text. Method: blocks in which one
    event has a value, a key or a byte more."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n'
    plain = [event % b"a", event % b"bc"]
    for other in (
        event.replace(b"null", b'"stop"') % b"d",
        event.replace(b'"index":0', b'"index":1') % b"d",
        event % b'd","role":"x',
        event % b'd","e',
        event % b"\xff",
        event % b"\x01",
        event % b"",
        b"data: [DONE]\n\n",
        b": comment\n\n",
    ):
        for events in ([*plain, other, *plain], [*plain, *plain, other], [*plain, other]):
            joined = Joined(plain[0])
            joined.add(b"".join(events[1:]))
            assert joined.is_same(one_by_one(events)), other
            same = other in (event % b"", b": comment\n\n")
            assert (
                joined.is_same(Joined(b"".join(each for each in events if each != other))) == same
            )
