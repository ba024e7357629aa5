"""Answers that are cut and resumed in one process: the app behind a gateway, a real decoder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from engine.backends.reference.application import ServedModel, make_app
from engine.backends.reference.generation import Generator, NewToken, TokenRequest
from engine.backends.reference.ranks import Ready
from engine.backends.reference.text import Tokenizer
from engine.messages import Counts
from plumbing import gateway_protocol as hop
from tests.engine.reference.support import cache_for, decoder_of
from tests.helpers import on_loop_of

MAX_CONTEXT = 160
REQUEST_ID = "the-request"


class StubModel:
    """In place of `ModelLoop`: its steps are done when a token is asked for."""

    def __init__(self, directory: str) -> None:
        decoder = decoder_of(directory)
        self.generator = Generator(decoder, cache_for(decoder, 2, MAX_CONTEXT))
        self.started, self.slots = 0, 2
        self.counts = Counts()

    @contextmanager
    def generate(self, wanted: TokenRequest) -> Iterator[StubModel]:
        self.started += 1
        self.generator.submit(replace(wanted, number=self.started))
        try:
            yield self
        finally:
            self.generator.cancel(self.started)

    async def get(self) -> NewToken:
        while True:
            made = self.generator.step()
            if made is not None:
                return made


@dataclass(frozen=True)
class Seen:
    """One group of a stream: its tokens, and its events without the time they were made at."""

    tokens: tuple[int, ...]
    events: tuple[Any, ...]

    @property
    def text(self) -> str:
        return "".join(map(text_of, self.events))


@dataclass(frozen=True)
class Stream:
    groups: list[Seen]
    rest: tuple[Any, ...]  # behind the last group: usage, "[DONE]"
    is_whole: bool

    @property
    def tokens(self) -> list[int]:
        return [token for group in self.groups for token in group.tokens]


def text_of(event: Any) -> str:
    choices = [] if event == "[DONE]" else event["choices"]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
    )


def read_stream(body: bytes) -> Stream:
    """As a gateway reads it: a group counts when its comment has come whole."""
    groups: list[Seen] = []
    events: list[Any] = []
    is_whole = False
    for part in body.split(b"\n\n")[:-1]:  # what follows the last empty line is not whole
        if part.startswith(b"data: "):
            events.append(_event(part.removeprefix(b"data: ")))
        elif part + b"\n\n" == hop.END:
            is_whole = True
        else:
            tokens, _ = hop.read_group_end(part + b"\n\n")
            groups.append(Seen(tuple(tokens), tuple(events)))
            events = []
    return Stream(groups, tuple(events), is_whole)


def _event(data: bytes) -> Any:
    if data == b"[DONE]":
        return "[DONE]"
    document = json.loads(data)
    del document["created"]
    return document


class Pod:
    """An engine behind a gateway; every request is resumed at the same one, with nothing kept."""

    def __init__(self, served: ServedModel, link: StubModel, client: TestClient[Any, Any]) -> None:
        self.served = served
        self.link = link
        self.client = client

    async def ask(
        self, path: str, document: Any, journal: Sequence[int] | None = None
    ) -> tuple[int, aiohttp.typedefs.LooseHeaders, bytes]:
        """Status, headers and body, as the gateway gets them."""
        headers = {hop.GATEWAY: "1", "X-Request-Id": REQUEST_ID}
        body = json.dumps(document).encode()
        if journal is not None:
            chunks = [len(journal)] if journal else []
            body, headers[hop.JOURNAL] = hop.with_journal(body, hop.Journal(journal, chunks))
        async with self.client.post(path, data=body, headers=headers) as response:
            return response.status, response.headers, await response.read()

    async def stream(
        self, path: str, document: Any, journal: Sequence[int] | None = None
    ) -> tuple[Stream, bytes]:
        status, headers, body = await self.ask(path, {**document, "stream": True}, journal)
        assert status == 200, body
        assert headers[hop.CONTINUATION] == "exact"
        return read_stream(body), body


def _run(model: Path, test: Callable[[Pod], Awaitable[None]]) -> None:
    tokenizer, link = Tokenizer.load(str(model)), StubModel(str(model))
    ready = Ready(1, 1, MAX_CONTEXT, 262, (257, 261), "epoch", {})
    served = ServedModel(("tiny",), tokenizer, link, ready, "engine-0", 7)  # type: ignore[arg-type]  # a stand-in
    served.is_behind_gateway = True

    async def main() -> None:
        async with TestClient(TestServer(make_app(served))) as client:
            await test(Pod(served, link, client))

    asyncio.run(main())


with_pod = on_loop_of("model", "engine", _run)
