"""Streams of vLLM through a front, each of which loses its pod behind another group.

    python -m tests.vllm.fleet_cuts [--runner v1|v2]

Two engines, one for each of two pods. Between a pod and its engine stands a socket that passes on a
number of groups, and perhaps a part of the next one; once the front has them, every socket of the
pod is closed at once, as when it is killed. What the client reads must say the same as the
uninterrupted answer. Each stream has a front and pods of its own, so that many run beside each
other. Exit code 1: one is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hack import v2_on_cpu
from plumbing import gateway_protocol as hop
from tests.figures import Figures, document, report, say
from tests.gateway.server.fleet_bench import fleet
from tests.gateway.server.harness import Answer
from tests.helpers import auntil
from tests.vllm.resume_matrix.client import DONE, ask, read_groups, running_engine
from tests.vllm.resume_matrix.compare import content
from tests.vllm.resume_matrix.model import THOUGHT_TOKEN
from tests.vllm.resume_matrix.rows import Row, chat, completion

TOKENS, AT_ONCE = 12, 8
CUT_S = 100.0  # until a stream has come so far
READ_BYTES = 1 << 16
PARTS = (0, 40)  # bytes of the next group
SEEDED = {"temperature": 1.0, "seed": 7}
# The end of a thought has another text where vLLM merges it with other tokens.
THINKING = {"max_tokens": TOKENS, "logit_bias": {str(THOUGHT_TOKEN): -50.0}}
ROWS = {
    "completion": completion(1, max_tokens=TOKENS),
    "completion, seed": completion(1, max_tokens=TOKENS, **SEEDED),
    "chat": chat(temperature=0, **THINKING),
    "chat, seed": chat(**SEEDED, **THINKING),
}
# Behind each group, and with the whole answer but for its end.
CUTS = [(groups, part) for groups in range(TOKENS + 2) for part in PARTS]
Cut = tuple[int, int]
_GROUP_END = re.compile(rb"^" + re.escape(hop.GROUP_MARK) + rb"[^\n]*\n\n", re.MULTILINE)


class CuttingSocket:
    """The engine at `real`, as a pod finds it at `path`. Of its next answers nothing comes behind
    a number of groups and a part of the next one; nor does the end of one that is shorter."""

    def __init__(self, path: str, name: str, token: int, real: str, cut: Cut) -> None:
        self.name, self.token = name, token
        self.cut: Cut | None = cut
        self.has_cut, self.tokens = False, 0  # that were passed on until then
        self._path, self._real = path, real
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    def die(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        there, to = await asyncio.open_unix_connection(self._real)
        to.write(head.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))  # one answer each
        is_cut = self.cut is not None and head.startswith(b"POST")
        tasks = {
            asyncio.create_task(self._pass_on(reader, to)),
            asyncio.create_task((self._cut_off if is_cut else self._pass_on)(there, writer)),
        }
        self._tasks |= tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        self._tasks -= tasks
        for each in (to, writer):
            each.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                writer.write(data)

    async def _cut_off(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.cut is not None
        groups, part = self.cut
        rest = b""
        while groups or len(rest) < part:
            data = await reader.read(READ_BYTES)
            assert data, "the engine has left"
            rest += data
            while groups and (found := _GROUP_END.search(rest)) is not None:
                writer.write(rest[: found.end()])
                self.tokens += len(hop.read_group_end(found[0])[0])
                rest, groups = rest[found.end() :], groups - 1
            if groups and hop.END in rest:
                rest, groups, part = rest.partition(hop.END)[0], 0, len(rest)
                break
        writer.write(rest[:part])
        self.has_cut = True
        await asyncio.Event().wait()


async def lose_a_pod(base: Path, engines: Sequence[str], row: Row, cut: Cut) -> Answer:
    """What a client reads whose pod is killed there."""
    async with fleet(base) as bench:
        for real in engines:
            await bench.pod(make=partial(CuttingSocket, real=real, cut=cut))
        await bench.front()
        client = await bench.ask(row.body, row.url, Content_Type="application/json")
        await auntil(lambda: any(each.engine.has_cut for each in bench.pods), "the cut", CUT_S)
        dead = next(each for each in bench.pods if each.engine.has_cut)
        (request,) = bench.fleet.requests.values()
        await auntil(lambda: request.delivered_tokens == dead.engine.tokens, "all that came")
        for each in bench.pods:
            each.engine.cut = None
        dead.kill()
        answer = await client.answer()
        assert bench.fleet.losses["gone"] == 1
        return answer


async def try_row(
    base: Path, engines: Sequence[str], row: Row, cuts: Sequence[Cut] = CUTS
) -> dict[str, str]:
    """What is wrong, by cut."""
    whole, same = [await asyncio.to_thread(ask, each, row.url, row.body) for each in engines]
    assert len(whole.tokens) == TOKENS, whole.body
    assert content(whole.events) == content(same.events)
    wrong: dict[str, str] = {}
    at_once = asyncio.Semaphore(AT_ONCE)

    async def one(place: Path, cut: Cut) -> None:
        async with at_once:
            place.mkdir()
            answer = await lose_a_pod(place, engines, row, cut)
        events = [each for group in read_groups(answer.body) for each in group.events]
        is_ended = answer.is_whole and answer.body.count(DONE) == 1
        is_one = len({each["id"] for each in events}) == 1
        if not (is_ended and is_one and content(events) == content(whole.events)):
            wrong[str(cut)] = answer.body.decode()

    async with asyncio.TaskGroup() as group:
        for number, cut in enumerate(cuts):
            group.create_task(one(base / str(number), cut))
    return wrong


@contextlib.contextmanager
def two_engines(base: Path, runner: str | None) -> Iterator[tuple[str, str]]:
    """Their sockets. They have one model, made in `base`."""
    how = (), v2_on_cpu.environment(runner), base / "model"
    with running_engine(*how) as one, running_engine(*how) as other:
        yield one.path, other.path


async def measure(runner: str | None, base: Path) -> Figures:
    wrong = {}
    with two_engines(base, runner) as engines:
        for number, (name, row) in enumerate(ROWS.items()):
            say(name)
            (base / f"{number}").mkdir()
            wrong[name] = await try_row(base / f"{number}", engines, row)
    figures = {"runner": v2_on_cpu.name_of(runner), "streams": len(ROWS) * len(CUTS)}
    figures |= {"tokens": TOKENS, "cuts": str(CUTS), "wrong": wrong}
    return document(figures, [name for name, found in wrong.items() if found])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.fleet_cuts")
    parser.add_argument("--runner", choices=v2_on_cpu.RUNNERS, help="vLLM's model runner")
    report(partial(measure, parser.parse_args().runner))
