"""Asks an engine as the gateway does, and reads its answer in groups; starts one to ask."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Journal
from tests.figures import ROOT

ANSWER_S = 600.0  # V2's kernels are interpreted on the CPU, a step of 40 requests for 0.2 s
DONE = b"[DONE]"
ENGINE = "tests.vllm.resume_matrix.engine"


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
    ends = itertools.accumulate(answer.chunks)
    sizes = zip(answer.chunks, ends, strict=True)
    chunks = [min(size, tokens - end + size) for size, end in sizes if end - size < tokens]
    return Journal(answer.tokens[:tokens], chunks)


@contextlib.contextmanager
def begin(
    path: str, url: str, body: Any = None, journal: Journal | None = None, method: str = "POST"
) -> Iterator[HTTPResponse]:
    """The response of the engine at the Unix socket `path`, of which nothing was read."""
    headers = {hop.GATEWAY: "1", "Content-Type": "application/json", "X-Request-Id": "r"}
    content = b"" if body is None else json.dumps(body).encode()
    if journal is not None:
        content, headers[hop.JOURNAL] = hop.with_journal(content, journal)
    with contextlib.closing(UnixConnection(path)) as connection:
        connection.request(method, url, content, headers)
        with connection.getresponse() as response:
            yield response


def ask(path: str, url: str, body: Any, journal: Journal | None = None) -> Answer:
    """The whole answer."""
    with begin(path, url, body, journal) as response:
        text = response.read()
        continuation = response.getheader(hop.CONTINUATION, "")
    return Answer(response.status, continuation, read_groups(text), text.endswith(hop.END), text)


def read_groups(text: bytes) -> list[SeenGroup]:
    """The last one is what has no end yet."""
    groups: list[SeenGroup] = []
    events: list[Any] = []
    for part in text.removesuffix(hop.END).split(b"\n\n"):
        if part.startswith(hop.GROUP_MARK):
            groups.append(SeenGroup(events, *hop.read_group_end(part)))
            events = []
        elif (found := part.partition(b"data: ")[2]) and found != DONE:
            events.append(json.loads(found))
    return [*groups, SeenGroup(events)]


def made_by(text: bytes) -> tuple[Journal, str]:
    """Tokens and text of the whole groups of an answer, which may be cut anywhere."""
    whole = Answer(0, "", read_groups(text.rpartition(b"\n\n")[0])[:-1], is_whole=False)
    choices = (choice for event in whole.events for choice in event["choices"])
    return Journal(whole.tokens, whole.chunks), "".join(each["text"] for each in choices)


# ---------------------------------------------------------------------- an engine to ask


@dataclass
class Engine:
    """A running `tests.vllm.resume_matrix.engine`."""

    process: subprocess.Popen[str]
    path: str

    def say(self, word: str, answer: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        self.wait_for(answer)

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        if not any(line.strip() == word for line in self.process.stdout):
            raise RuntimeError(f"the engine ended and did not say {word}")

    def begin(self, body: Any, journal: Journal | None = None) -> Any:
        return begin(self.path, "/v1/completions", body, journal)

    def ask(self, body: Any, journal: Journal | None = None) -> Answer:
        return ask(self.path, "/v1/completions", body, journal)


@contextlib.contextmanager
def running_engine(
    flags: Sequence[str], env: Mapping[str, str], model: Path | None = None
) -> Iterator[Engine]:
    """An engine with a random model, which is made in this directory unless it is there."""
    with tempfile.TemporaryDirectory(prefix="us-rm-") as base:
        path = f"{base}/engine.sock"
        command = [sys.executable, "-m", ENGINE, str(model or f"{base}/model"), path, *flags]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, **pipes) as process:
            found = Engine(process, path)
            try:
                found.wait_for("ready")
                yield found
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # vLLM's processes would outlive it
