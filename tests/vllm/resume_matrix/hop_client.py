"""Asks an engine as the gateway does, and reads its answer in groups."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Journal

ANSWER_S = 600.0  # V2's kernels are interpreted on the CPU, a step of 40 requests for 0.2 s
DONE = b"[DONE]"


class UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass
class SeenGroup:
    """Events, and the tokens that they were made of."""

    events: list[Any]
    tokens: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)


@dataclass
class Answer:
    status: int
    continuation: str
    groups: list[SeenGroup]
    is_whole: bool
    body: bytes = b""

    @property
    def tokens(self) -> list[int]:
        return [token for group in self.groups for token in group.tokens]

    @property
    def chunks(self) -> list[int]:
        return [size for group in self.groups for size in group.chunks]

    @property
    def events(self) -> list[Any]:
        return [event for group in self.groups for event in group.events]

    def groups_of(self, tokens: int) -> int | None:
        """How many groups the first `tokens` are; None if they end within one."""
        seen = 0
        for index, group in enumerate(self.groups):
            if seen == tokens:
                return index
            seen += len(group.tokens)
        return len(self.groups) if seen == tokens else None


def journal_of(answer: Answer, tokens: int) -> Journal:
    """What a gateway has that has delivered the first `tokens`."""
    chunks: list[int] = []
    left = tokens
    for size in answer.chunks:
        if left > 0:
            chunks.append(min(size, left))
            left -= size
    return Journal(answer.tokens[:tokens], chunks)


def ask(
    path: str, url: str, body: Any = None, journal: Journal | None = None, method: str = "POST"
) -> Answer:
    """The whole answer of the engine at the Unix socket `path`."""
    headers = {hop.GATEWAY: "1", "Content-Type": "application/json", "X-Request-Id": "r"}
    content = b"" if body is None else json.dumps(body).encode()
    if journal is not None:
        content, headers[hop.JOURNAL] = hop.with_journal(content, journal)
    connection = UnixConnection(path)
    try:
        connection.request(method, url, content, headers)
        response = connection.getresponse()
        text = response.read()
        continuation = response.getheader(hop.CONTINUATION, "")
    finally:
        connection.close()
    is_whole = text.endswith(hop.END)
    groups = read_groups(text.removesuffix(hop.END).split(b"\n\n"))
    return Answer(response.status, continuation, groups, is_whole, text)


def read_groups(parts: Sequence[bytes]) -> list[SeenGroup]:
    groups: list[SeenGroup] = []
    events: list[Any] = []
    for part in parts:
        if part.startswith(hop.GROUP_MARK):
            groups.append(SeenGroup(events, *hop.read_group_end(part)))
            events = []
        elif (found := part.partition(b"data: ")[2]) and found != DONE:
            events.append(json.loads(found))
    return [*groups, SeenGroup(events)]
