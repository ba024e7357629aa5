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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hack import rig
from hack.vllm.pod import MODEL_SHAPE, make_pod, model_of
from plumbing.errors import UnderstudyError
from understudy.drill.clients import Target, clock
from understudy.drill.fleet import FleetDrill
from understudy.drill.records import Records
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.targets import FRONT, GATEWAY, PARTS, POD
from understudy.drill.verdict import judge
from understudy.pod.runner import PodRunner
from understudy.up.models import RandomModel
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

# ---------------------------------------------------------------------- what came


@dataclass(slots=True)
class WholeAnswer:
    """One answer, put together from its events. Events are never compared, because an engine cuts
    its answers by timing. One answer must have one id from its first event to its last, also where
    engines have taken turns."""

    text: str = ""
    reason: str | None = None
    usage: int | None = None  # tokens of the answer
    ids: set[str] = field(default_factory=set)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take up an event of a chat or completion, or a whole answer."""
        self.ids.add(event["id"])
        self.usage = (event.get("usage") or {}).get("completion_tokens", self.usage)
        for choice in event["choices"]:
            said = choice.get("delta") or choice.get("message") or choice
            self.text += said.get("content") or said.get("text") or ""
            self.reason = choice.get("finish_reason") or self.reason

    def is_like(self, other: WholeAnswer) -> bool:
        """Whether both say the same, each under one id."""
        return self.exact() == other.exact() and len(self.ids) == 1

    def exact(self) -> tuple[Any, ...]:
        return self.text, self.reason, self.usage


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request of a stock client. `error`: as it was raised; `detail`: both answers, where they
    differ."""

    kind: str
    began_ms: float
    ended_ms: float
    error: str = ""
    is_refused: bool = False
    detail: str = ""

    def overlaps(self, from_ms: float, to_ms: float | None) -> bool:
        return self.began_ms <= (from_ms if to_ms is None else to_ms) and self.ended_ms >= from_ms


def fate_of(attempt: Attempt, records: Records) -> str:
    """What became of one request, given what the drill has killed. A wrong answer is always a
    fault, and so is a refused connection. A request that was in the gateway when the gateway's own
    process was killed is lost with it."""
    if not attempt.error:
        return "wrong" if attempt.detail else "ok"
    part = FRONT if records.pods else GATEWAY
    gateways = [kill for kill in records.kills if kill.target == part]
    is_lost = any(attempt.overlaps(kill.killed_ms, kill.gone_ms) for kill in gateways)
    return "lost_in_gateway" if is_lost and not attempt.is_refused else "error"


class OpenaiClients:
    """Clients of the package, each of which sends all kinds in turn."""

    def __init__(self, kinds: Sequence[RequestKind], number: int) -> None:
        self._kinds, self._number = kinds, number
        self.attempts: list[Attempt] = []

    async def run(self, target: Target, drill: Drill) -> None:
        """All kills of `drill` while the clients send requests.

        Raises:
            UnderstudyError: `clients.unsteady`, a kind has several answers by itself.
        """
        import openai

        url = f"http://{target.host}:{target.port}/v1"
        model, stopping = drill.prompts[0].body["model"], asyncio.Event()
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S
        ) as client:
            send = partial(_answer, client, model)
            expected = {kind.name: await send(kind) for kind in self._kinds}
            for _ in range(ALIKE_ROUNDS):
                again = await asyncio.gather(*map(send, self._kinds))
                for kind, answer in zip(self._kinds, again, strict=True):
                    if not answer.is_like(expected[kind.name]):
                        text = f"{kind.name} was answered twice, and differently, before any kill"
                        raise UnderstudyError("clients.unsteady", text)
            apart = max(1, len(self._kinds) // self._number)
            async with asyncio.TaskGroup() as tasks:
                for each in range(self._number):
                    kinds = itertools.islice(itertools.cycle(self._kinds), apart * each, None)
                    tasks.create_task(self._go_on(client, model, kinds, expected, stopping))
                try:
                    await drill.run(target)
                finally:
                    stopping.set()

    async def _go_on(
        self,
        client: openai.AsyncOpenAI,
        model: str,
        kinds: Iterable[RequestKind],
        expected: Mapping[str, WholeAnswer],
        stopping: asyncio.Event,
    ) -> None:
        import openai

        for kind in kinds:
            if stopping.is_set():
                return
            began_ms, error, detail, is_refused = clock.now_ms(), "", "", False
            try:
                answer = await _answer(client, model, kind)
                if not answer.is_like(expected[kind.name]):
                    detail = f"{answer.exact()} instead of {expected[kind.name].exact()}"
            except (openai.OpenAIError, ValueError) as raised:
                error = f"{type(raised).__name__}: {raised} ({raised.__cause__!r})"
                is_refused = type(raised.__cause__).__name__ == "ConnectError"
                await asyncio.sleep(AFTER_ERROR_S)
            ended_ms = clock.now_ms()
            self.attempts.append(Attempt(kind.name, began_ms, ended_ms, error, is_refused, detail))


async def _answer(client: openai.AsyncOpenAI, model: str, kind: RequestKind) -> WholeAnswer:
    """Raises openai.OpenAIError, ValueError: there is none, or not a whole one."""
    api: Any = {CHAT: client.chat.completions, TEXT: client.completions}[kind.api]
    said = WholeAnswer()
    answer = await api.create(model=model, **kind.arguments)
    if not kind.arguments.get("stream"):
        said.add(answer.model_dump())
        return said
    async for event in answer:
        said.add(event.model_dump())
    return said


# ---------------------------------------------------------------------- the run


def document(client: OpenaiClients, drill: Drill, kills: int, backend: str) -> rig.Figures:
    """The fates of all requests, and the drill's own report."""
    records = drill.records
    fates = [(each, fate_of(each, records)) for each in client.attempts]
    kinds: dict[str, Counter[str]] = {}
    for attempt, fate in fates:
        kinds.setdefault(attempt.kind, Counter()).update(("requests", fate))
    first = {
        f"first_{fate}": [
            f"{attempt.kind}: {attempt.error or attempt.detail}"
            for attempt, each in fates
            if each == fate
        ][:SHOWN_MAX]
        for fate in ("error", "wrong")
    }
    killed_ms = [kill.killed_ms for kill in records.kills]
    met = [sum(each.overlaps(at_ms, None) for each in client.attempts) for at_ms in killed_ms]
    report = judge(records, kills)
    drilled = report.to_dict(backend)
    problems = [*first["first_error"], *first["first_wrong"], *report.problems]
    if not fates:
        problems.append("no request was made")
    figures = {
        "backend": backend,
        "requests": len(fates),
        "fates": Counter(fate for _, fate in fates),
        "kills_under_load": sum(1 for each in met if each),
        "requests_over_a_kill": sum(met),
        "kinds": kinds,
        **first,
        "drill": drilled,
    }
    return rig.document(figures, problems)


async def run(flags: Any, base: Path) -> rig.Figures:
    # Three pods on two cores: a small model, and more streams than a kill can miss.
    shape, clients = ((), FLEET_CLIENTS) if flags.fleet else (MODEL_SHAPE, 1)
    model = await model_of(base, str(flags.model) if flags.model else None, shape)
    arguments = RandomModel.of(flags.backend).arguments
    pod = make_pod(base, model, 1, arguments, backend=flags.backend)
    plan = DrillPlan(
        flags.kills,
        tuple(flags.target) or ((POD,) if flags.fleet else ()),
        clients=clients,
        also=PARTS,
        duration_s=flags.kills * flags.apart_s,
    )
    containers = pod.containers()
    if flags.fleet:
        words = (f"--model={model}", f"--backend={flags.backend}")
        pod = replace(pod, env={**PATIENT_FRONT, **pod.env})
        fleet = prepare_fleet(pod, PODS, words, 0, pod.directory, rig.say, is_drilled=True)
        containers = list((await fleet).containers)

    async def measure(runner: PodRunner) -> rig.Figures:
        make = partial(FleetDrill, replicas=PODS) if flags.fleet else Drill
        drill: Drill = make(pod.directory, plan, rig.say, runner)
        client = OpenaiClients(KINDS, flags.clients)
        await client.run(await drill.prepare(), drill)
        return document(client, drill, plan.kills_wanted, flags.backend)

    return await rig.with_pod(containers, pod.directory / "log", measure)


def main() -> None:
    parser = rig.arguments("stock_clients", "stock clients of a pod whose processes are killed")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--fleet", action="store_true", help=f"{PODS} pods behind a front")
    parser.add_argument("--apart-s", type=float, default=APART_S, help="from kill to kill")
    parser.add_argument("--backend", choices=("reference", "vllm"), default="reference")
    parser.add_argument("--model", type=Path, help="a checkpoint [default: a random one]")
    parser.add_argument(
        "--target", action="append", default=[], help="as the drill's [default: all]"
    )
    flags = parser.parse_args()
    if flags.quick:
        flags.kills, flags.apart_s = 3, 2.0
    rig.finish(rig.run("clients-", partial(run, flags)), is_json=flags.json)


if __name__ == "__main__":
    main()
