"""Stock clients of a pod whose processes are killed: do they ever see an error?

    python -m hack.stock_clients [--kills 100] [--backend vllm] [--fleet] [--json]

The clients of the `openai` package, told never to retry, send chats and completions, streamed and
not, with all that must survive a failover; each answer is compared with the one given before the
first kill. Every process of the engines is killed in turn, and then every other part of the pod;
with `--fleet` whole pods behind a front.
Exits 1 if a client saw an error, a cut stream or another answer. For vLLM as the backend, run it
with the Python of .venv-vllm.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hack import rig
from hack.vllm.pod import MODEL_SHAPE, make_pod
from plumbing.errors import UnderstudyError
from understudy.drill.clients import Target, clock
from understudy.drill.fleet import FleetDrill
from understudy.drill.outcomes import classify, outcome_of
from understudy.drill.records import End, Exchange, Outcome
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.targets import PARTS, POD, base_targets
from understudy.drill.verdict import judge
from understudy.pod.ports import Ports, free_offset
from understudy.pod.runner import PodRunner
from understudy.up.models import TOKEN_INTERVAL_MS, RandomModel, make_random_model
from understudy.up.pods import prepare_fleet

if TYPE_CHECKING:
    import openai  # loading it takes two seconds

# From kill to kill, on average. The gateway ends a request that was in three engines as they died,
# with fewer than 32 tokens between two deaths: these clients must not look like the cause, even
# where a busy machine takes 100 ms for a token.
APART_S = 5.0
ANSWER_S = 120.0  # longer than a takeover on a busy machine; then it counts as lost
# A killed pod closes its connections; where others use the machine, silence is not its death.
PATIENT_FRONT = {"UNDERSTUDY_SILENT_MS": "10000"}
CLIENTS = 4
PODS, FLEET_CLIENTS = 3, 4  # of a fleet; the drill's own, whose pauses it reports
ALIKE_ROUNDS = 2  # of all kinds at once, before the first kill
AFTER_ERROR_S = 0.02  # else a port that refuses would get thousands of requests a second
SHOWN_MAX = 20  # of errors and of wrong answers

# ---------------------------------------------------------------------- what the package asks for

CHAT, TEXT = "chat", "completion"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
PROMPT = "The understudy steps onto the stage and"
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 7}


@dataclass(frozen=True, slots=True)
class RequestKind:
    """One kind of request, as keyword arguments of the package: greedy or with a seed, so there is
    one right answer."""

    name: str
    api: str
    arguments: Mapping[str, Any]


def both(name: str, api: str, **more: Any) -> tuple[RequestKind, RequestKind]:
    """Streamed and not."""
    common: dict[str, Any] = {"temperature": 0, **more}
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    common |= {"messages": MESSAGES} if api == CHAT else {"prompt": PROMPT}
    return (
        RequestKind(f"{name}, streamed", api, {**common, **usage}),
        RequestKind(name, api, common),
    )


def body(**more: Any) -> dict[str, Any]:
    """Parameters that the package does not know."""
    return {"extra_body": more}


# tests/vllm/resume_matrix has what vLLM does beyond: log probabilities, grammars, tools.
KINDS = (
    *both("chat", CHAT, max_tokens=48),
    *both("completion", TEXT, max_tokens=64),
    *both("long", TEXT, max_tokens=96, **body(ignore_eos=True)),
    *both("seed", TEXT, max_tokens=48, **SAMPLED),
    *both(
        *("penalties", TEXT),
        max_tokens=48,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        **body(repetition_penalty=1.3, min_tokens=24),
    ),
    *both("stop strings", TEXT, stop=["e", "qu"], max_tokens=48),
)

# ---------------------------------------------------------------------- the clients


class OpenaiClients:
    """Clients of the package, each of which sends all kinds in turn."""

    def __init__(self, kinds: Sequence[RequestKind]) -> None:
        self._kinds = kinds
        self.exchanges: list[Exchange] = []

    async def run(self, target: Target, drill: Drill) -> None:
        """All kills of `drill` while the clients send requests.

        Raises:
            UnderstudyError: `clients.unsteady`, a kind has several answers by itself.
        """
        import openai

        url = f"http://{target.host}:{target.port}/v1"
        model, stopping = drill.prompts[0].body["model"], asyncio.Event()
        expected = drill.records.expected
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S
        ) as client:
            send = partial(_answer, client, model)
            expected |= {kind.name: await send(kind) for kind in self._kinds}
            for _ in range(ALIKE_ROUNDS):
                for answer in await asyncio.gather(*map(send, self._kinds)):
                    if classify(answer, expected) is not Outcome.OK:
                        text = f"{answer.prompt}: two answers before any kill; {answer.detail}"
                        raise UnderstudyError("clients.unsteady", text)
            apart = max(1, len(self._kinds) // CLIENTS)
            async with asyncio.TaskGroup() as tasks:
                for each in range(CLIENTS):
                    kinds = itertools.islice(itertools.cycle(self._kinds), apart * each, None)
                    tasks.create_task(self._go_on(send, kinds, stopping))
                try:
                    await drill.run(target)
                finally:
                    stopping.set()

    async def _go_on(
        self,
        send: Callable[[RequestKind], Awaitable[Exchange]],
        kinds: Iterable[RequestKind],
        stopping: asyncio.Event,
    ) -> None:
        for kind in kinds:
            if stopping.is_set():
                return
            self.exchanges.append(await send(kind))
            if self.exchanges[-1].end is not End.DONE:
                await asyncio.sleep(AFTER_ERROR_S)


async def _answer(client: openai.AsyncOpenAI, model: str, kind: RequestKind) -> Exchange:
    """What came, as a drill's client records it. Events are never compared, because an engine cuts
    its answers by timing. One answer must have one id from its first event to its last, also where
    engines have taken turns."""
    import openai

    api: Any = {CHAT: client.chat.completions, TEXT: client.completions}[kind.api]
    found = Exchange(kind.name, clock.now_ms(), End.CUT, status=200, token=0)
    ids = set[str]()

    def add(event: Mapping[str, Any]) -> None:
        ids.add(event["id"])
        found.tokens = (event.get("usage") or {}).get("completion_tokens", found.tokens)
        for choice in event["choices"]:
            said = choice.get("delta") or choice.get("message") or choice
            found.text += said.get("content") or said.get("text") or ""
            found.finish_reason = choice.get("finish_reason") or found.finish_reason

    try:
        answer = await api.create(model=model, **kind.arguments)
        if kind.arguments.get("stream"):
            async for event in answer:
                add(event.model_dump())
        else:
            add(answer.model_dump())
        found.end = End.DONE if len(ids) == 1 else End.GARBLED
        found.detail = f"{len(ids)} ids, {found.text!r}"
    except (openai.OpenAIError, ValueError) as raised:
        found.detail = f"{type(raised).__name__}: {raised} ({raised.__cause__!r})"
        if type(raised.__cause__).__name__ == "ConnectError":
            found.end = End.REFUSED
    found.ended_ms = clock.now_ms()
    return found


# ---------------------------------------------------------------------- the run


def document(client: OpenaiClients, drill: Drill, kills: int, backend: str) -> rig.Figures:
    """The outcomes of all requests, and the drill's own report."""
    records = drill.records
    outcomes = [(each, outcome_of(each, records)) for each in client.exchanges]
    kinds: dict[str, Counter[str]] = {}
    for exchange, outcome in outcomes:
        kinds.setdefault(exchange.prompt, Counter()).update(("requests", outcome))
    first = [
        f"{exchange.prompt}: {outcome}, {exchange.detail}"
        for exchange, outcome in outcomes
        if outcome not in (Outcome.OK, Outcome.LOST_IN_GATEWAY)
    ][:SHOWN_MAX]
    met = [
        sum(each.sent_ms <= kill.killed_ms <= each.ended_ms for each in client.exchanges)
        for kill in records.kills
    ]
    report = judge(records, kills, backend)
    problems = [*first, *report.problems]
    if not outcomes:
        problems.append("no request was made")
    figures = {
        "backend": backend,
        "requests": len(outcomes),
        "outcomes": Counter(outcome for _, outcome in outcomes),
        "kills_under_load": sum(1 for each in met if each),
        "requests_over_a_kill": sum(met),
        "kinds": kinds,
        "drill": report.to_dict(),
    }
    return rig.document(figures, problems)


async def run(flags: Any, base: Path) -> rig.Figures:
    # Three pods on two cores: a small model, and more streams than a kill can miss.
    shape, clients = ((), FLEET_CLIENTS) if flags.fleet else (MODEL_SHAPE, 1)
    model = await make_random_model(base / "model", shape)
    arguments = RandomModel.of(flags.backend).arguments
    pod = make_pod(base, model, 1, arguments, backend=flags.backend)
    plan = DrillPlan(
        flags.kills,
        tuple(flags.target) or ((POD,) if flags.fleet else (*base_targets(flags.backend), *PARTS)),
        clients=clients,
        duration_s=flags.kills * flags.apart_s,
    )
    containers = pod.containers()
    if flags.fleet:
        words = (f"--model={model}", f"--backend={flags.backend}")
        offset, env = free_offset(PODS + 1), {**PATIENT_FRONT, **pod.env}
        pod = replace(pod, env=env, ports=Ports().moved(offset))
        if flags.backend == "reference":  # so that a kill meets streams
            slow = f"--token-interval-ms={TOKEN_INTERVAL_MS}"
            pod = replace(pod, backend_args=(slow, *pod.backend_args))
        fleet = await prepare_fleet(pod, PODS, words, offset, pod.directory, rig.say)
        containers = list(fleet.containers)

    async def measure(runner: PodRunner) -> rig.Figures:
        make = partial(FleetDrill, replicas=PODS) if flags.fleet else Drill
        drill: Drill = make(pod.directory, plan, rig.say, runner)
        client = OpenaiClients(KINDS)
        await client.run(await drill.prepare(), drill)
        return document(client, drill, plan.kills, flags.backend)

    return await rig.with_pod(containers, pod.directory / "log", measure)


def main() -> None:
    parser = rig.arguments("stock_clients", "stock clients of a pod whose processes are killed")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--fleet", action="store_true", help=f"{PODS} pods behind a front")
    parser.add_argument("--apart-s", type=float, default=APART_S, help="from kill to kill")
    parser.add_argument("--backend", choices=("reference", "vllm"), default="reference")
    parser.add_argument(
        "--target", action="append", default=[], help="as the drill's [default: all]"
    )
    flags = parser.parse_args()
    if flags.quick:
        flags.kills, flags.apart_s = 3, 2.0
    rig.finish(rig.run("clients-", partial(run, flags)), is_json=flags.json)


if __name__ == "__main__":
    main()
