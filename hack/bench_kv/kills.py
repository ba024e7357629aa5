"""First tokens after a kill, and what the next engine adopts.

A request whose first token is timed waits at the service address while one engine dies and the
other takes over; its time is counted from the moment at which that engine serves, which its status
tells, on the same clock. It is the first request that the engine gets.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.messages import CONTROL
from hack.bench_kv.plan import MADE, TARGET, Plan, Prompts, full_blocks
from plumbing.errors import UnderstudyError
from plumbing.part.paths import engine_sockets
from plumbing.part.peers import ask
from understudy.drill.clients import Target, send
from understudy.drill.killer import Whole, wait_whole
from understudy.drill.records import End, Exchange, Prompt, asked_of_engine
from understudy.status.gather import engine_parts, status_of

FIRST_WHOLE_S = 600.0
WHOLE_POLL_S = 0.2  # a status of all parts takes CPU from the engine that starts
SERVED_S = 90.0  # a takeover, and a prefill of the longest prompt
STREAM_PROMPT = 100
# An engine that dies within 32 steps after it has read an adopted block is held against the blocks,
# and the third one begins empty. No block is completed.
PROOF_PROMPT, PROOF_MADE, PROOFS = 97, 28, 3
KINDS = ("warm", "adopted", "recomputed")

Say = Callable[[str], None]


@dataclass
class KillFigures:
    """`ttft_ms` by length and kind; blocks as the next engine's status counts them, and those that
    clients know to be complete."""

    ttft_ms: dict[int, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: {kind: [] for kind in KINDS})
    )
    adopted_blocks: int = 0
    published_blocks: int = 0
    torn_blocks: int = 0
    problems: list[str] = field(default_factory=list)

    def took_over(self, expected: int, kv: dict[str, Any]) -> None:
        """The blocks beyond `expected` are of tokens that no client has seen."""
        self.published_blocks += expected
        self.adopted_blocks += min(expected, kv["adopted_blocks"])
        self.torn_blocks += kv["torn_blocks"]
        if kv["adopted_blocks"] < expected:
            note = kv["note"] or ""
            self.problems.append(f"{kv['adopted_blocks']} of {expected} blocks adopted {note}")


class KilledPod:
    """A pod in `directory` whose active engine is killed again and again."""

    def __init__(self, directory: Path, plan: Plan, found: KillFigures, say: Say) -> None:
        self._directory, self._plan, self._found, self._say = directory, plan, found, say
        self._prompts = Prompts()
        self._proof = self._prompts.fresh(PROOF_PROMPT, PROOF_MADE)
        self._token = 0
        self._known_blocks = full_blocks(PROOF_PROMPT, PROOF_MADE)
        """Complete blocks of all that was asked so far."""

    async def first_tokens(self) -> None:
        """Every length and kind in turn, `kills` times."""
        for number in range(self._plan.kills):
            for length in self._plan.lengths:
                self._say(f"kills {number + 1} of {self._plan.kills}: {length} tokens")
                await self._adopted(length)
                await self._recomputed(length)

    async def _adopted(self, length: int) -> None:
        whole, target = await self._whole()
        prompt, times = self._prompts.fresh(length), self._found.ttft_ms[length]
        first = await self._answer(target, prompt)
        self._known_blocks += full_blocks(length, MADE)
        again = await self._answer(target, prompt)
        if again.token != whole.token:  # what follows would be counted from another takeover
            raise UnderstudyError("bench.disturbed", f"{whole.engine} died before it was killed")
        assert again.first_token_ms is not None
        times["warm"].append(again.first_token_ms - again.sent_ms)
        answer, served_ms = await self._kill(whole, target, prompt)
        assert answer.first_token_ms is not None
        times["adopted"].append(answer.first_token_ms - served_ms)
        for other in (again, answer):
            if other.text != first.text:
                self._found.problems.append(f"{length} tokens: the answers differ")

    async def _recomputed(self, length: int) -> None:
        whole, target = await self._whole()
        prompt = self._prompts.fresh(length)
        answer, served_ms = await self._kill(whole, target, prompt)
        assert answer.first_token_ms is not None
        self._found.ttft_ms[length]["recomputed"].append(answer.first_token_ms - served_ms)
        self._known_blocks += full_blocks(length, MADE)

    async def under_streams(self) -> None:
        """Kill while streams are under way: what they had is adopted, too."""
        for number in range(self._plan.audited):
            self._say(f"kill under streams {number + 1} of {self._plan.audited}")
            whole, target = await self._whole()
            prompts = [
                self._prompts.fresh(STREAM_PROMPT, self._plan.stream_tokens)
                for _ in range(self._plan.streams)
            ]
            tasks = [asyncio.create_task(send(target, prompt)) for prompt in prompts]
            # Anywhere in the middle: as long as a few other answers take.
            for _ in range(1 + number % 3):
                await self._answer(target, self._prompts.fresh(STREAM_PROMPT))
                self._known_blocks += full_blocks(STREAM_PROMPT, MADE)
            await self._kill(whole, target, self._prompts.fresh(STREAM_PROMPT), tasks)
            self._known_blocks += full_blocks(STREAM_PROMPT, MADE)

    # ------------------------------------------------------------------ one kill

    async def _whole(self) -> tuple[Whole, Target]:
        """Once the pod is whole under a newer token than at the last kill, and the engine has shown
        that what it adopted works."""
        async with asyncio.timeout(FIRST_WHOLE_S):
            while True:
                whole = await wait_whole(
                    self._directory, self._say, FIRST_WHOLE_S, poll_s=WHOLE_POLL_S
                )
                if whole.token > self._token:
                    break
                await asyncio.sleep(WHOLE_POLL_S)
        host, _, port = whole.service.rpartition(":")
        target = Target(host, int(port))
        for _ in range(PROOFS):
            await self._answer(target, self._proof)
        return whole, target

    async def _kill(
        self,
        whole: Whole,
        target: Target,
        prompt: Prompt,
        streams: list[asyncio.Task[Exchange]] | None = None,
    ) -> tuple[Exchange, float]:
        """The answer to `prompt`, which is asked right after the kill, and when the next engine
        began to serve. `streams` are under way."""
        self._token = whole.token
        path = engine_sockets(self._directory)[whole.engine]
        await ask(path, CONTROL, asked_of_engine(TARGET[self._plan.backend]))
        answer = await self._answer(target, prompt)
        expected = self._known_blocks
        for stream in streams or ():
            exchange = await stream
            expected += full_blocks(STREAM_PROMPT, len(exchange.text))
            self._known_blocks += full_blocks(STREAM_PROMPT, len(exchange.text))
        status = await self._status_of(answer.engine)
        self._found.took_over(expected, status["backend"]["kv"])
        if answer.token == whole.token:
            self._found.problems.append(f"{whole.engine} answered after it was killed")
        return answer, float(status["last_failover"]["active_mono_ms"])

    async def _status_of(self, engine: str | None) -> dict[str, Any]:
        (part,) = (each for each in engine_parts(self._directory) if each.name == engine)
        return await status_of(part)

    async def _answer(self, target: Target, prompt: Prompt) -> Exchange:
        """A whole answer. A request that a dying engine had taken is asked again.

        Raises:
            UnderstudyError: `bench.no_answer`.
        """
        last = "nothing was tried"
        async with asyncio.timeout(SERVED_S):
            while True:
                exchange = await send(target, prompt)
                if exchange.end is End.DONE and exchange.status == 200:
                    return exchange
                last = f"{exchange.status} {exchange.end} {exchange.detail}"
                if exchange.status >= 400:
                    raise UnderstudyError("bench.no_answer", f"a request failed: {last}")
