"""A program that serves several models at one address: what the scenarios need of it.

Ours is the pod of a pool file. Every answer is compared with the one that the same program gave
when it was asked alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hack.bench_pool.polling import until
from plumbing.errors import UnderstudyError
from understudy.drill.clients import Target, send, stream_without_pause
from understudy.drill.prompts import COMPLETIONS
from understudy.drill.records import End, Exchange, Outcome, Prompt
from understudy.drill.verdict import classify

SHORT_TOKENS, LONG_TOKENS = 16, 300
# Of answers that keep a model busy. Answers of one length that are computed in one batch end
# together, and then the model is idle for a moment, which no real load leaves it. None is longer
# than LONG_TOKENS: more tokens of the small model depend, in llama.cpp, on what is in its batch.
MIXED_TOKENS = (140, 280, 200, 300, 240, 160, 260)
CLIENTS_PRIORITY = 1  # of real-time ones, the lowest
LOST = (Outcome.LOST, Outcome.HUNG, Outcome.LOST_IN_GATEWAY)
FIRST_ANSWER_S = 300.0  # vLLM starts meanwhile
FIRST_ANSWERS = 3  # a program that has just started may refuse
ANSWERS_S = 180.0


def prompts_of(models: Sequence[str], tokens: int, kind: str) -> dict[str, Prompt]:
    """One for each model; all ask for a stream of exactly so many tokens."""
    return {
        model: Prompt(
            f"{kind}-{model}",
            "/v1/completions",
            {
                "model": model,
                "prompt": COMPLETIONS[number % len(COMPLETIONS)],
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            },
        )
        for number, model in enumerate(models)
    }


@dataclass
class Program:
    """`short` and `long`: a prompt for each model; `mixed`: several for each, whose answers differ
    in length. `expected`: the answers to them, by key."""

    name: str
    target: Target
    models: Sequence[str]
    expected: dict[str, Exchange] = field(default_factory=dict)
    short: Mapping[str, Prompt] = field(init=False)
    long: Mapping[str, Prompt] = field(init=False)
    mixed: Mapping[str, Sequence[Prompt]] = field(init=False)

    def __post_init__(self) -> None:
        self.short = prompts_of(self.models, SHORT_TOKENS, "short")
        self.long = prompts_of(self.models, LONG_TOKENS, "long")
        mixed = [prompts_of(self.models, tokens, f"mixed{tokens}") for tokens in MIXED_TOKENS]
        self.mixed = {model: [each[model] for each in mixed] for model in self.models}

    async def learn(self, prompts: Sequence[Prompt]) -> None:
        """Ask each once, alone.

        Raises:
            UnderstudyError: `bench.no_answer`.
        """
        for prompt in prompts:
            answer, tries = await send(self.target, prompt, FIRST_ANSWER_S), 1
            while not _is_whole(answer) and tries < FIRST_ANSWERS:
                answer, tries = await send(self.target, prompt, FIRST_ANSWER_S), tries + 1
            if not _is_whole(answer):
                why = f"{answer.status}, {answer.end}, {answer.detail}"
                text = f"{self.name} does not answer {prompt.key}: {why}"
                raise UnderstudyError("bench.no_answer", text[:500])
            self.expected[prompt.key] = answer

    async def ask(self, prompt: Prompt, silence_max_s: float = FIRST_ANSWER_S) -> Exchange:
        return await send(self.target, prompt, silence_max_s)

    def outcome(self, exchange: Exchange) -> Outcome:
        if exchange.token is None and exchange.end is End.DONE:
            exchange.token = 0  # other programs have none
        return classify(exchange, self.expected)

    def counts(self, exchanges: Sequence[Exchange]) -> dict[str, int]:
        """How they ended: `lost` without an answer, `cut` in the middle."""
        found = Counter(map(self.outcome, exchanges))
        return {
            "requests": len(exchanges),
            "lost": sum(found[each] for each in LOST),
            "refused": found[Outcome.REFUSED],
            "cut": found[Outcome.BROKEN],
            "wrong_tokens": found[Outcome.WRONG],
        }

    def faults(self, exchanges: Sequence[Exchange], most: int = 5) -> list[str]:
        """The first that did not end well, as sentences."""
        found: list[str] = []
        for each in exchanges:
            outcome = self.outcome(each)
            if outcome is not Outcome.OK and len(found) < most:
                what = f"{outcome} {each.prompt}: {each.status}, {each.end}, {each.detail}"
                found.append(what[:300])
        return found


def _is_whole(answer: Exchange) -> bool:
    return answer.end is End.DONE and answer.status == 200


@contextlib.asynccontextmanager
async def saturated(program: Program, model: str, clients: int) -> AsyncIterator[list[Exchange]]:
    """Clients that ask `model` without pause meanwhile; yields what they got, as it comes, once one
    has had an answer. They begin apart and with different prompts, since the model is to have
    requests at every moment, which some programs need not to give it up."""
    prompts = program.mixed[model]
    alone = program.expected[prompts[0].key]
    apart_s = (alone.ended_ms - alone.sent_ms) / 1000 / clients
    starts = [number % len(prompts) for number in range(clients)]
    asked = [[*prompts[start:], *prompts[:start]] for start in starts]
    with undelayed():
        async with without_pause(program, asked, apart_s) as exchanges:
            await answered(exchanges, 1)
            yield exchanges


@contextlib.contextmanager
def undelayed() -> Iterator[None]:
    """This thread gets a processor before all others meanwhile, as far as it may.

    Clients stand for other machines. Linux gives each session its share of the processors
    (sched(7), autogroup), and beside a program with busy threads this process waited for a second
    now and then: all answers had ended by then, and the model was idle.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(
            0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(CLIENTS_PRIORITY)
        )
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


@contextlib.asynccontextmanager
async def without_pause(
    program: Program, prompts: Sequence[Sequence[Prompt]], apart_s: float = 0.0
) -> AsyncIterator[list[Exchange]]:
    """A client for each list of prompts, which it asks in turn; each ends with an answer, and
    begins `apart_s` after the one before."""
    stopping, exchanges = asyncio.Event(), list[Exchange]()

    async def client(number: int, asked: Sequence[Prompt]) -> None:
        await asyncio.sleep(number * apart_s)
        await stream_without_pause(program.target, asked, 0, exchanges.append, stopping)

    clients = [asyncio.ensure_future(client(*each)) for each in enumerate(prompts)]
    try:
        yield exchanges
    finally:
        stopping.set()
        await asyncio.gather(*clients)


async def answered(exchanges: Sequence[Exchange], more: int) -> None:
    """Until so many more answers have come.

    Raises:
        WaitTimeoutError: `bench.late`.
    """
    goal = len(exchanges) + more

    async def missing() -> str:
        return "" if len(exchanges) >= goal else f"{goal - len(exchanges)} are missing"

    await until(missing, f"{more} answers", ANSWERS_S)


def first_ms(exchange: Exchange) -> float | None:
    """From the request to its first token."""
    first = exchange.first_token_ms
    return None if first is None else first - exchange.sent_ms


def longest_pause_s(exchanges: Sequence[Exchange]) -> float:
    """Between two pieces of text of one answer."""
    gaps = [
        later - earlier
        for each in exchanges
        for earlier, later in zip(each.text_ms, each.text_ms[1:], strict=False)
    ]
    return round(max(gaps, default=0.0) / 1000, 3)


Figures = dict[str, Any]
