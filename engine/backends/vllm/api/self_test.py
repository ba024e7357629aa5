"""Whether this engine, on this device, resumes requests, reuses KV blocks and wakes correctly.

Each row is a request whose answer depends on the state that a resume must restore. It is answered
once without interruption, then resumed behind several of its tokens, and answered again after a
sleep and a wake. All answers must be equal. The gateway's check of a replay cannot see a wrong
state, because it compares the journal with itself.

Most rows do not depend on the model. A bias of thousands selects a few tokens; a repetition penalty
of `SHRINK` shrinks what the model says of tokens that are in the prompt, so that seeds and
penalties decide by a large margin. Rounding cannot change such an answer, so its tokens must be
equal. The rows of kind `NUMBERS` are the model's own greedy answers; they depend on every KV block
and position. Their log probabilities are compared within a tolerance.

On GPUs every launch runs it, and continues streams, publishes KV blocks and sleeps only if it
passes. On the CPU `tests/vllm` prove the same, so an engine there is tested only with
`--self-test`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from engine.backends.vllm import NO_SELF_TEST
from engine.backends.vllm.resume.answer import CURRENT, Answer
from engine.backends.vllm.worker.kv_arena import BLOCKS
from plumbing.errors import UnderstudyError
from plumbing.gateway_protocol import Continuation, Journal

MADE = 24  # tokens of an answer
# Behind so many tokens a prompt of `prompt_tokens` ends one token into a block: the blocks before
# it are reused, and one token is left. Runner V2 computes such a row in its graph for decoding.
ONE_LEFT = 7
CUTS = (1, ONE_LEFT, 12, MADE - 1, MADE)
PROMPT_MIN = 26  # room for every token that a row chooses from
CHOICES = 16
SHRINK = 1e4  # repetition penalty: how much less the model's own preferences count
FIRST, SECOND, CHOICE = 8000.0, 4000.0, 1000.0  # biases; no model's logits differ by so much
STEP = 700.0  # between biases, so that no two sums of bias and penalties are nearly equal
SEED = 20251
# Of log probabilities, at most: float32, and what is rounded to 16 bits or fewer.
TOLERANCE, TOLERANCE_16_BIT = 2e-3, 0.5
WAIT_S = 180.0  # for each of the steps of a test
ANSWERS_AT_ONCE = 40
ROWS = 8  # of `rows`, at most

TOKENS, NUMBERS = "tokens", "numbers"


class Trial(Struct, frozen=True, eq=False):
    """`by`: what of two answers must be equal."""

    name: str
    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    by: str = TOKENS


class TrialAnswer(NamedTuple):
    """One answer. `numbers` are the log probabilities of its tokens; those of replayed tokens are
    not known. `lead` says by how much each token's log probability exceeds the next best one's."""

    tokens: list[int]
    numbers: list[float]
    lead: list[float]
    finish: str = ""


# ---------------------------------------------------------------------- what is asked


def prompt_tokens(block_tokens: int, max_model_len: int) -> int:
    """The length of each prompt: with `ONE_LEFT` tokens more it ends one token into a block.

    Raises:
        ValueError: the model's length has no room for that.
    """
    least = -(-(PROMPT_MIN + ONE_LEFT - 1) // block_tokens)
    lengths = [blocks * block_tokens + 1 - ONE_LEFT for blocks in (max(2, least), least)]
    length = next((each for each in lengths if each + MADE <= max_model_len), None)
    if length is None:
        raise ValueError(f"it needs a --max-model-len of at least {lengths[-1] + MADE}")
    if most_blocks(block_tokens, length) >= BLOCKS:
        raise ValueError(f"KV blocks of {block_tokens} tokens are too small for it")
    return length


def most_blocks(block_tokens: int, length: int) -> int:
    """How many blocks it uses at most. vLLM hands out the blocks in their order, and one that is
    cached comes to the end of the queue. Without a cache they are handed out again, so that only
    those count that are in use at once."""
    each = -(-(length + MADE) // block_tokens)
    resumed = sum(each - (length + cut - 1) // block_tokens for cut in CUTS)
    in_order = ROWS * (3 * each + resumed)  # whole, whole after a sleep, resumed without a cache
    return max(in_order, ANSWERS_AT_ONCE * each)


def rows(length: int, vocabulary: int, digits: tuple[int, int] | None) -> list[Trial]:
    """With prompts of `length` tokens. `digits`: the tokens of `7` and `3`, for a grammar; None:
    the model has no tokenizer."""
    source = random.Random(SEED)
    known = range(9, vocabulary // 2)  # the other half may be special tokens, or padding
    picked = source.sample(known, CHOICES + 6)
    choices, others = picked[:CHOICES], picked[CHOICES:]
    rest = [token for token in known if token not in picked]

    def prompt(*first: int) -> list[int]:
        return [*first, *source.choices(rest, k=length - len(first))]

    same = prompt(*choices)
    one, two, stop, *new = others
    shrunk = {"repetition_penalty": SHRINK}
    first = {token: FIRST - STEP * index for index, token in enumerate(new)}
    then = {token: CHOICE + STEP * index for index, token in enumerate(choices[:8])}
    penalties = {**shrunk, "frequency_penalty": 0.8, "presence_penalty": 0.1}
    of_choices = {"allowed_token_ids": choices, "logit_bias": dict.fromkeys(choices, CHOICE)}
    late = {"min_tokens": MADE // 2, "stop_token_ids": [stop]}
    found = [
        Trial("plain bias", same, {"logit_bias": {one: SECOND}}),
        # Each of `new` once, because it counts in full until it was made.
        Trial(
            "penalties",
            same,
            {**penalties, "allowed_token_ids": [*first, *then], "logit_bias": {**first, **then}},
        ),
        Trial("seed", same, {**shrunk, **of_choices, "temperature": 1.0, "seed": SEED}),
        Trial("min tokens", same, {**late, "logit_bias": {stop: FIRST, one: SECOND}}),
        Trial(  # behind each `one` comes `two`
            "bad words",
            same,
            {"_bad_words_token_ids": [[one, one]], "logit_bias": {one: FIRST, two: SECOND}},
        ),
    ]
    if digits is not None:
        seven, three = digits
        grammar = StructuredOutputsParams(regex="7{5}3{5}7{5}3{4}")
        bias = {seven: FIRST, three: SECOND}
        asked = {"structured_outputs": grammar, "logit_bias": bias, "ignore_eos": False}
        found.append(Trial("grammar", same, asked))
    more = {"logprobs": 2}  # the second one tells how far the first is ahead
    greedy = [("greedy", prompt()), ("greedy, another prompt", prompt())]
    return [*found, *(Trial(name, tokens, more, NUMBERS) for name, tokens in greedy)]


# ---------------------------------------------------------------------- what must be equal


def difference(
    row: Trial, whole: TrialAnswer, other: TrialAnswer, tolerance: float, cut: int = 0
) -> str:
    """What is wrong with `other`, which was resumed behind `cut` tokens of `whole`; or nothing."""
    for index, (wanted, got) in enumerate(zip(whole.tokens, other.tokens, strict=False)):
        if row.by == NUMBERS and index >= cut:
            number, found = whole.numbers[index], other.numbers[index]
            if wanted != got and whole.lead[index] <= 2 * tolerance:
                return ""  # either may be chosen, and what follows depends on it
            if wanted == got and not abs(number - found) <= tolerance:  # also NaN
                return f"token {index} has a log probability of {found:.4g}, not {number:.4g}"
        if wanted != got:
            return f"token {index} is {got}, not {wanted}"
    if len(whole.tokens) != len(other.tokens):
        return f"it ends after {len(other.tokens)} tokens, not {len(whole.tokens)}"
    return "" if whole.finish == other.finish else f"it ends with {other.finish}"


# ---------------------------------------------------------------------- asking


class SelfTest:
    """One test of `engine`, which is parked before and after it.

    Args:
        park: puts the engine to sleep.
        take: takes memory for as many blocks as are used here (`worker/kv_arena.py`).
    """

    def __init__(
        self, engine: Any, park: Callable[[], Awaitable[Any]], take: Callable[[], Awaitable[Any]]
    ) -> None:
        self._engine, self._park, self._take = engine, park, take
        is_whole = str(engine.model_config.dtype) == "torch.float32"
        self._tolerance = TOLERANCE if is_whole else TOLERANCE_16_BIT
        most = engine.vllm_config.scheduler_config.max_num_seqs
        self._turn = asyncio.Semaphore(min(ANSWERS_AT_ONCE, most))
        self._names = (f"self-test-{number}" for number in itertools.count(1))
        self._resumable: set[str] = set()
        self._wholes: dict[Trial, TrialAnswer] = {}

    async def run(self) -> str:
        """What is wrong, or nothing."""
        model, cache = self._engine.model_config, self._engine.vllm_config.cache_config
        try:
            length = prompt_tokens(cache.block_size, model.max_model_len)
        except ValueError as error:
            return str(error)
        asked = rows(length, model.get_vocab_size(), _digits(self._engine.get_tokenizer()))
        try:
            return await self._compare(asked)
        except TimeoutError:
            return f"vLLM did not answer within {WAIT_S:g} s"
        except UnderstudyError as error:
            if error.code != NO_SELF_TEST:
                raise
            return error.message
        finally:
            await self._park()

    async def _compare(self, asked: Sequence[Trial]) -> str:
        await self._wake()
        answers = await self._all([(row, 0) for row in asked])
        wholes = self._wholes = {row: seen for (row, _), seen in answers if seen is not None}
        if not any(row.by == NUMBERS for row in wholes):
            return "vLLM refuses to give log probabilities"
        cuts = [
            (row, cut)
            for row, seen in wholes.items()
            if row.name in self._resumable
            for cut in CUTS
            if cut <= len(seen.tokens)
        ]
        random.Random(SEED).shuffle(cuts)  # so that each slot of a batch gets another owner
        if problem := await self._repeat(cuts):
            return problem
        await self._park()
        await self._wake()
        if problem := await self._repeat([(row, 0) for row in reversed(wholes)]):
            return problem
        await self._park()
        await self._wake()  # without one block in the cache
        return await self._repeat([each for each in cuts if each[1] == ONE_LEFT])

    async def _wake(self) -> None:
        await self._take()
        await self._engine.wake_up()

    async def _repeat(self, cuts: Sequence[tuple[Trial, int]]) -> str:
        """Ask again, resumed behind that many tokens; what differs from the whole answers."""
        for (row, cut), seen in await self._all(cuts):
            how = f"{row.name}, " + (f"resumed behind {cut} tokens" if cut else "after a sleep")
            if seen is None:
                return f"{how}: vLLM refuses it"
            if wrong := difference(row, self._wholes[row], seen, self._tolerance, cut):
                return f"{how}: {wrong}"
        return ""

    async def _all(
        self, asked: Sequence[tuple[Trial, int]]
    ) -> list[tuple[tuple[Trial, int], TrialAnswer | None]]:
        """Each with its answer; None: vLLM refuses such a request, so no client's is affected."""
        async with asyncio.timeout(WAIT_S):
            answers = await asyncio.gather(*(self._ask(row, cut) for row, cut in asked))
        return list(zip(asked, answers, strict=True))

    async def _ask(self, row: Trial, cut: int) -> TrialAnswer | None:
        made = self._wholes[row].tokens[:cut] if cut else []
        sampling = {"temperature": 0.0, "ignore_eos": True, **row.sampling}
        kind = RequestOutputKind.DELTA
        params = SamplingParams(max_tokens=MADE, detokenize=False, output_kind=kind, **sampling)
        answer = Answer(Journal(made, [len(made)]) if made else None, has_boundaries=False)
        CURRENT.set(answer)  # of this task alone
        prompt = {"prompt_token_ids": list(row.prompt)}
        seen = TrialAnswer([], [], [])
        try:
            async with self._turn:
                async for output in self._engine.generate(prompt, params, next(self._names)):
                    (part,) = output.outputs
                    seen.tokens.extend(part.token_ids)
                    for token, each in zip(part.token_ids, part.logprobs or (), strict=False):
                        others = [one.logprob for other, one in each.items() if other != token]
                        seen.numbers.append(each[token].logprob)
                        seen.lead.append(each[token].logprob - max(others, default=-1e9))
                    if output.finished:
                        seen = seen._replace(finish=str(part.finish_reason))
        except VLLMValidationError:
            return None
        if answer.is_refused:
            return None
        if answer.continuation is not Continuation.NONE:
            self._resumable.add(row.name)
        return seen


def _digits(tokenizer: Any) -> tuple[int, int] | None:
    if tokenizer is None:
        return None
    seven, three = (tokenizer.encode(each, add_special_tokens=False) for each in "73")
    return seven[-1], three[-1]
