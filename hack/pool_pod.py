"""The pod of a pool file with random models: its clients, its events, and what the pool says.

Each model has its own weights, so an answer of the wrong one shows. The device has room for every
model asleep and for the KV memory of one, so a switch is one from `warm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hack import rig
from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.pod.observers import PeerWatch, ask
from plumbing.pod.paths import pool_socket
from plumbing.wire.messages import Message
from pool import messages as msg
from pool.core.events import Order
from understudy.drill.clients import Target, clock, send, stream_without_pause
from understudy.drill.outcomes import classify
from understudy.drill.prompts import COMPLETIONS
from understudy.drill.records import End, Exchange, Outcome, Prompt
from understudy.pod.ports import free_pod_ports
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.up.models import VLLM_RANDOM_MODEL, RandomModel, make_random_model
from understudy.up.pods import prepare_pool

T = TypeVar("T")
Event = dict[str, Any]

MODEL, SWITCH = "pool.model", "pool.switch"
MODELS = tuple(f"m{number}" for number in range(10))
DEVICE = "HOST-0"
DEVICE_BYTES = "64GiB"  # a limit on what is booked, not on what the machine has
HOST_MEMORY = "2GiB"  # for copies of the weights; a limit, not a size
FIRST_ANSWER_S, FIRST_ANSWERS = 300.0, 3  # vLLM starts meanwhile, and may refuse at first
PHASE_S = 180.0  # vLLM starts within that
LOST = (Outcome.LOST, Outcome.HUNG, Outcome.LOST_IN_GATEWAY)


# So much KV memory that what else an engine takes, which differs by some MiB from start to start,
# is small beside it.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "reference": ("--cache-tokens", "600000"),
    "vllm": (*VLLM_RANDOM_MODEL.arguments, f"--kv-cache-memory-bytes={256 << 20}"),
}


def prompts_of(tokens: int, models: int = 2) -> dict[str, Prompt]:
    """One prompt for each of the first `models` models, for a stream of exactly `tokens` tokens."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return {
        model: Prompt(
            f"{tokens}-{model}",
            "/v1/completions",
            {**body, "model": model, "prompt": COMPLETIONS[number % len(COMPLETIONS)]},
        )
        for number, model in enumerate(MODELS[:models])
    }


class BenchedPool:
    """The running pod. `expected`: the answers that were given when nothing else ran, by prompt."""

    def __init__(self, directory: Path, target: Target) -> None:
        self.target = target
        self.expected: dict[str, Exchange] = {}
        self.events: list[Event] = []
        self._changed = asyncio.Event()
        self._socket = pool_socket(str(directory))
        self._watch = PeerWatch(self._socket, msg.CATALOGUE, msg.WatchMsg(0), self._heard)

    async def close(self) -> None:
        await self._watch.close()

    # ------------------------------------------------------------------ requests

    async def learn(self, prompts: Iterable[Prompt]) -> None:
        """Send each once, alone.

        Raises:
            UnderstudyError: `bench.no_answer`.
        """
        for prompt in prompts:
            answer, tries = await self.send(prompt), 1
            while not _is_whole(answer) and tries < FIRST_ANSWERS:
                answer, tries = await self.send(prompt), tries + 1
            if not _is_whole(answer):
                why = f"{answer.status}, {answer.end}, {answer.detail}"
                text = f"no answer to {prompt.key}: {why}"[:500]
                raise UnderstudyError("bench.no_answer", text)
            self.expected[prompt.key] = answer

    async def send(self, prompt: Prompt) -> Exchange:
        return await send(self.target, prompt, FIRST_ANSWER_S)

    @contextlib.asynccontextmanager
    async def without_pause(
        self, prompts: Sequence[Sequence[Prompt]]
    ) -> AsyncIterator[list[Exchange]]:
        """A client for each list of prompts, which it sends in turn. Yields what they got, as it
        comes."""
        stopping, exchanges = asyncio.Event(), list[Exchange]()
        clients = [
            asyncio.ensure_future(
                stream_without_pause(self.target, asked, 0, exchanges.append, stopping)
            )
            for asked in prompts
        ]
        try:
            yield exchanges
        finally:
            stopping.set()
            await asyncio.gather(*clients)

    def counts(self, exchanges: Sequence[Exchange]) -> dict[str, int]:
        """How they ended: `lost` without an answer, `cut` in the middle."""
        found = Counter(classify(each, self.expected) for each in exchanges)
        return {
            "requests": len(exchanges),
            "lost": sum(found[each] for each in LOST),
            "refused": found[Outcome.REFUSED],
            "cut": found[Outcome.BROKEN],
            "wrong_tokens": found[Outcome.WRONG],
        }

    # ------------------------------------------------------------------ the pool

    async def status(self) -> dict[str, Any]:
        """Raises UnderstudyError: no pool answers."""
        answer: Any = (await ask(self._socket, msg.CATALOGUE, msg.StatusMsg())).message
        document: dict[str, Any] = answer.document
        return document

    async def of(self, model: str) -> dict[str, Any]:
        """What the pool says of one model."""
        found = (await self.status())["models"]
        return next(dict(each) for each in found if each["model"] == model)

    async def change(self, setting: str, value: str | None, model: str | None = None) -> None:
        """As `understudy pool set`."""
        await ask(self._socket, msg.CATALOGUE, msg.SetMsg(setting, value, model))

    async def tighten(self, prompt: Prompt) -> None:
        """From now on the KV memory of one model fits, and half of another one's. `prompt`: of the
        first model, which is awake then."""
        for model in (await self.status())["models"]:
            name, began_ms = model["model"], clock.now_ms()
            if name != MODELS[0] and model["state"] != "warm":
                await ask(self._socket, msg.CATALOGUE, msg.OrderMsg(name, Order("sleep")))
                await self.until_state(name, "warm", began_ms)
        await self.send(prompt)
        status = await self.status()
        (device,) = (each for each in status["devices"] if each["device"] == DEVICE)
        (awake,) = (each for each in status["models"] if each["state"] == "awake")
        kv_bytes = awake["bytes"][DEVICE]["kv"]
        await self.change("margin", str(device["free_bytes"] - kv_bytes // 2))

    # ------------------------------------------------------------------ its events

    def _heard(self, message: Message) -> None:
        if isinstance(message, msg.EventMsg):
            self.events.append(message.record)
            self._changed.set()

    def switches(self, since_ms: float) -> list[Event]:
        """What was recorded of each switch since then."""
        found = (each for each in self.events if each["mono_ms"] >= since_ms)
        return [each["data"] for each in found if each["type"] == SWITCH]

    async def until_state(self, model: str, state: str, since_ms: float) -> None:
        """Until `model` was in `state` after `since_ms`.

        Raises:
            WaitTimeoutError: `bench.late`.
        """

        def was() -> bool:
            return any(
                each["mono_ms"] >= since_ms
                and each["type"] == MODEL
                and (each["data"]["model"], each["data"]["to"]) == (model, state)
                for each in self.events
            )

        await self.until(was, f"{model} in state {state}", PHASE_S)

    async def until(self, is_so: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Raises WaitTimeoutError: `bench.late`."""
        try:
            async with asyncio.timeout(deadline_s):
                while not is_so():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise WaitTimeoutError("bench.late", f"no {what} within {deadline_s:g} s") from None


def _is_whole(answer: Exchange) -> bool:
    return answer.end is End.DONE and answer.status == 200


def longest_pause_s(exchanges: Sequence[Exchange]) -> float:
    """Between two pieces of text of one answer."""
    gaps = [
        later - earlier
        for each in exchanges
        for earlier, later in zip(each.text_ms, each.text_ms[1:], strict=False)
    ]
    return round(max(gaps, default=0.0) / 1000, 3)


async def with_pool(
    base: Path,
    backend: str,
    body: Callable[[BenchedPool], Awaitable[T]],
    defaults: Mapping[str, Any],
    arguments: Sequence[str] = (),
    count: int = 2,
) -> T:
    """`body` while a pod of `count` models of `backend` runs in `base`. `defaults`: of the pool
    file; `arguments`: of the engines.

    Raises:
        Interrupted: by a signal.
    """
    base.mkdir(mode=0o700, parents=True)
    random = RandomModel.of(backend)
    args = [*ARGUMENTS[backend], *arguments]
    models = {name: {"model": str(base / name), "args": args} for name in MODELS[:count]}
    for number, name in enumerate(models):
        await make_random_model(base / name, (*random.shape, f"--seed={number}"))
    document = {
        "devices": [DEVICE],
        "host_memory": HOST_MEMORY,
        "margin": 0,
        "queue": {"max": 512, "per_model": 256, "wait": "600s"},
        "defaults": {"backend": backend, **defaults},
        "models": models,
    }
    file, directory = base / "pool.yaml", base / "pod"
    file.write_text(json.dumps(document, indent=1))
    directory.mkdir(mode=0o700)
    env = {**random.env, **rig.PATIENT, "UNDERSTUDY_DEATHS_MAX": rig.DEATHS_MAX}
    local = LocalPod(
        Path(), None, free_pod_ports(has_pool=True), device_bytes=DEVICE_BYTES, env=env
    )
    pod = await prepare_pool(local, file, directory, rig.say)
    service = next(word for each in pod.containers for word in each.command if "active=" in word)
    target = Target("127.0.0.1", int(service.rpartition(":")[2]))

    async def run(_: PodRunner) -> T:
        pool = BenchedPool(directory, target)
        try:
            return await body(pool)
        finally:
            await pool.close()

    return await rig.with_pod(pod.containers, base / "log", run)
