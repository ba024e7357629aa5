"""A model and its API layer for tests: deterministic tokens, events cut at random, four APIs.

The next token depends on all earlier ones, as penalties make it do, so a resume that has lost or
doubled a single token says something else from there on. `Client` reads an answer as the official
clients do, and knows nothing of the code under test.
"""

from __future__ import annotations

import codecs
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

KINDS = ("chat", "tools", "completions", "responses", "messages")
CHUNKED = ("chat", "tools", "completions")
PATHS = {
    "chat": "/v1/chat/completions",
    "tools": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
HALF, OTHER_HALF = 50, 51
TEXTS = {
    HALF: b"\xc3",
    OTHER_HALF: b"\xa9",
    52: b'", "id":"m-0","created":1,',
    53: b"\ndata: [DONE]\n\nevent: error\n",
    54: b"\\",
    55: b'{"error": {',
}
VOCABULARY = 56


def by_state(core) -> Counter[str]:
    """How many requests of a lane, or of a front, are in each state."""
    return Counter(str(each.state) for each in core.requests.values())


def text_of(token: int) -> bytes:
    return TEXTS.get(token, b" w%d" % token)


def next_token(prompt: str, out: Sequence[int]) -> int:
    """The model: repetition is penalised, so that the whole history counts."""
    if out and out[-1] == HALF:
        return OTHER_HALF
    found = zlib.crc32(repr((prompt, len(out), list(out[-3:]))).encode()) % VOCABULARY
    found = (found + 7 * list(out).count(found)) % VOCABULARY
    return 0 if found == OTHER_HALF else found


def whole_output(prompt: str, max_tokens: int) -> list[int]:
    out: list[int] = []
    while len(out) < max_tokens:
        out.append(next_token(prompt, out))
    return out


@dataclass
class Play:
    """One run of one request on one engine: groups, each (events, tokens, chunks), then the tail.

    A resume is given the journal's tokens, trusts them, and plays everything from the first event,
    with a boundary at the journal's end. `rng` decides how outputs are merged, and the ids.
    """

    kind: str
    prompt: str
    max_tokens: int
    rng: random.Random
    journal: Sequence[int] | None = None
    misspells: bool = False  # an engine that says something else for the same tokens
    ids: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = {"id": f"m-{self.rng.getrandbits(40)}", "created": self.rng.randrange(1 << 31)}
        self.ids["tool"] = f"call-{self.rng.getrandbits(40)}"
        self.sequence = self.rng.choice((0, 7))
        # Whether the finish has an event of its own is the engine's way, not a matter of timing.
        self.separate_finish = zlib.crc32(self.prompt.encode()) % 3 == 0
        self.separate_usage = self.rng.random() < 0.3 and self.kind in CHUNKED

    def outputs(self) -> Iterator[list[int]]:
        """The tokens of each output of the engine."""
        out = list(self.journal or ())
        yield from self._merge(out)
        while len(out) < self.max_tokens:
            new = []
            for _ in range(min(self.rng.choice((1, 1, 1, 2, 5)), self.max_tokens - len(out))):
                new.append(next_token(self.prompt, out))
                out.append(new[-1])
            yield new

    def _merge(self, out: list[int]) -> Iterator[list[int]]:
        if self.rng.random() < 0.5 and out:
            yield out[:]
            return
        start = 0
        while start < len(out):
            end = min(len(out), start + self.rng.choice((1, 2, 3)))
            yield out[start:end]
            start = end

    def groups(self) -> Iterator[tuple[bytes, list[int], list[int]]]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        made = 0
        events = self._opening()
        if self.rng.random() < 0.3:
            yield events, [], []  # events that no token caused
            events = b""
        for tokens in self.outputs():
            made += len(tokens)
            text = decoder.decode(b"".join(map(text_of, tokens)))
            if self.misspells:
                text = text.replace("w", "v")
            is_last = made == self.max_tokens
            if text or (is_last and not self.separate_finish):
                events += self._delta(text, made, is_last and not self.separate_finish)
            yield events, tokens, [len(tokens)] if len(tokens) < 3 else [1, len(tokens) - 1]
            events = b""
        if self.separate_finish:
            yield events + self._delta("", made, True), [], []
        if self.separate_usage:
            yield self._chunk([], usage=self._usage()), [], []

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": 3, "completion_tokens": self.max_tokens}

    def tail(self) -> bytes:
        usage = self._usage()
        match self.kind:
            case "responses":
                response = {**self._response("completed"), "usage": usage}
                return self._typed("response.completed", response=response)
            case "messages":
                stop = {"stop_reason": "max_tokens", "stop_sequence": None}
                return (
                    self._typed("content_block_stop", index=0)
                    + self._typed("message_delta", delta=stop, usage=usage)
                    + self._typed("message_stop")
                )
            case _:
                last = b"" if self.separate_usage else self._chunk([], usage=usage)
                return last + b"data: [DONE]\n\n"

    # ---- events

    def _opening(self) -> bytes:
        match self.kind:
            case "chat":
                return self._chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
            case "tools":
                call = {"id": self.ids["tool"], "type": "function", "index": 0}
                call["function"] = {"name": "find", "arguments": ""}
                return self._chunk([{"index": 0, "delta": {"role": "assistant"}}]) + self._chunk(
                    [{"index": 0, "delta": {"tool_calls": [call]}}]
                )
            case "responses":
                item = {"id": self.ids["tool"], "type": "message", "content": []}
                return self._typed(
                    "response.created", response=self._response("in_progress")
                ) + self._typed("response.output_item.added", output_index=0, item=item)
            case "messages":
                message = {"id": self.ids["id"], "role": "assistant", "content": []}
                block = {"type": "text", "text": ""}
                return self._typed("message_start", message=message) + self._typed(
                    "content_block_start", index=0, content_block=block
                )
        return b""

    def _delta(self, text: str, made: int, is_finish: bool) -> bytes:
        finish = "length" if is_finish else None
        usage = {"completion_tokens": made}
        match self.kind:
            case "chat":
                choice = {"index": 0, "delta": {"content": text}, "logprobs": None}
                return self._chunk([{**choice, "finish_reason": finish}], usage=usage)
            case "tools":
                call = {"index": 0, "function": {"arguments": text}}
                delta = {"tool_calls": [call]}
                return self._chunk([{"index": 0, "delta": delta, "finish_reason": finish}])
            case "completions":
                choice = {"index": 0, "text": text, "token_ids": list(text.encode())}
                return self._chunk([{**choice, "finish_reason": finish}])
            case "responses":
                return self._typed(
                    "response.output_text.delta",
                    item_id=self.ids["tool"],
                    output_index=0,
                    content_index=0,
                    delta=text,
                )
            case _:
                delta = {"type": "text_delta", "text": text}
                return self._typed("content_block_delta", index=0, delta=delta)

    def _chunk(self, choices: list[dict[str, object]], **more: object) -> bytes:
        first = {"id": self.ids["id"], "object": "chunk", "created": self.ids["created"]}
        said = {**first, "model": "m", "choices": choices, **more}
        return b"data: %b\n\n" % json.dumps(said, ensure_ascii=False).encode()

    def _typed(self, kind: str, **more: object) -> bytes:
        said: dict[str, object] = {"type": kind, **more}
        if self.kind == "responses":
            said["sequence_number"] = self.sequence
            self.sequence += 1
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(),
            json.dumps(said, separators=(",", ":")).encode(),
        )

    def _response(self, status: str) -> dict[str, object]:
        created = self.ids["created"]
        return {"id": self.ids["id"], "created_at": created, "status": status, "error": None}


@dataclass
class Answer:
    """What a client has of one answer."""

    text: str = ""
    finish: list[str] = field(default_factory=list)
    usage: list[int] = field(default_factory=list)  # of events about the whole answer
    openings: int = 0
    ends: int = 0
    ids: set[object] = field(default_factory=set)
    sequence: list[int] = field(default_factory=list)
    errors: list[object] = field(default_factory=list)


def read_answer(raw: bytes) -> Answer:
    """What the clients of all four APIs make of these bytes."""
    answer = Answer()
    for event in raw.split(b"\n\n")[:-1]:
        data = event.split(b"data: ", 1)[1]
        if data == b"[DONE]":
            answer.ends += 1
            continue
        said = json.loads(data)
        if said.get("type") == "error" or "error" in said:
            answer.errors.append(said)
        elif "choices" in said:
            _read_chunk(said, answer)
        else:
            _read_typed(said, answer)
    return answer


def _read_chunk(said: dict, answer: Answer) -> None:
    answer.ids |= {said["id"], said["created"]}
    if not said["choices"]:
        answer.usage.append(said["usage"]["completion_tokens"])
    for choice in said["choices"]:
        delta = choice.get("delta", {})
        answer.openings += "role" in delta
        answer.text += delta.get("content") or choice.get("text") or ""
        for call in delta.get("tool_calls", ()):
            answer.text += call["function"]["arguments"]
            answer.ids |= {call["id"]} if "id" in call else set()
            answer.openings += "id" in call
        if choice.get("finish_reason"):
            answer.finish.append(choice["finish_reason"])


def _read_typed(said: dict, answer: Answer) -> None:
    if "sequence_number" in said:
        answer.sequence.append(said["sequence_number"])
    whole = said.get("response") or said.get("message") or said.get("item") or {}
    answer.ids |= {whole[key] for key in ("id", "created_at") if key in whole}
    answer.ids |= {said["item_id"]} if "item_id" in said else set()
    match said["type"]:
        case "response.output_text.delta":
            answer.text += said["delta"]
        case "content_block_delta":
            answer.text += said["delta"]["text"]
        case "response.completed":
            answer.finish.append(whole["status"])
            answer.usage.append(whole["usage"]["completion_tokens"])
            answer.ends += 1
        case "message_delta":
            answer.finish.append(said["delta"]["stop_reason"])
            answer.usage.append(said["usage"]["completion_tokens"])
        case "message_stop":
            answer.ends += 1
        case _:
            answer.openings += 1
