"""Kill engines at every point of a step, hundreds of times: each is a fork of a parked one.

    python -m tests.vllm.kv_kills [--backend reference|vllm] [--runner v1|v2] [--kills N] [--json]

Starting vLLM takes a minute of two cores, and a fork of it a moment. This process loads the model
and parks; every fork of it borrows the KV pool from a real memory service, adopts what it finds,
answers the same questions again and again and kills itself inside a step. An engine is one process
here and has no supervisor. Every answer must be that of a fork that never saw the pool. Exit code 1
if one is not, or if nothing was adopted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from hack import v2_on_cpu
from tests.figures import commit, machine
from tests.gms.bench import GmsProcess
from tests.vllm.kv_kills.seams import SEAMS, Points
from understudy.up.models import RandomModel, make_random_model

ENGINE = "engine-0"
DEVICE_BYTES = 1 << 30
ASKED_MAX, BEGINNINGS, BEGINNING_TOKENS, REST_TOKENS_MAX = 40, 4, 70, 70
VOCABULARY = range(32, 120)
AT_ONCE = 6
SEED = 1
ROUNDS_MAX = 30  # of questions, in a life; most lives end in the first
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "UNDERSTUDY_VLLM_KV": "1",
    "ENGINE_ID": ENGINE,
}

Known = tuple[list[int], list[int]]  # a question and its answer


@dataclass(slots=True)
class Life:
    """One fork: where it was to die, and what it said. `asked`: the last questions, by number;
    `status`: of its end."""

    point: str
    skip: int
    adopted: int = 0
    why_empty: str = ""
    asked: list[int] = field(default_factory=list)
    wrong: int = 0
    status: int = 0
    error: str = ""


def learn(parked: Any, rng: Random) -> list[Known]:
    """Questions whose answers rounding cannot change, and the answers."""
    beginnings = [_tokens(rng, BEGINNING_TOKENS) for _ in range(BEGINNINGS)]
    prompts = [
        rng.choice(beginnings) + _tokens(rng, rng.randrange(REST_TOKENS_MAX))
        for _ in range(ASKED_MAX)
    ]
    parked.wake(0)
    return [(each, parked.ask([each])[0]) for each in prompts if parked.is_clear(each)]


def live(parked: Any, token: int, known: Sequence[Known], life: Life, out: int) -> None:
    """One engine's life, up to its death or until it has asked enough. It begins with what its
    predecessor was asked last, as clients do: half-written blocks are of those questions."""
    answer, rng = parked.wake(token), Random(token)
    _tell(out, {name: answer[name] for name in ("adopted", "why_empty")})
    asked = life.asked
    for _ in range(ROUNDS_MAX):
        asked = asked or rng.sample(range(len(known)), min(AT_ONCE, len(known)))
        _tell(out, {"asked": asked})
        made = parked.ask([known[number][0] for number in asked])
        wrong = sum(one != known[number][1] for one, number in zip(made, asked, strict=True))
        if wrong:
            _tell(out, {"wrong": wrong})
            return
        asked = []


def in_a_fork(work: Any) -> tuple[list[dict[str, Any]], int]:
    """What `work(descriptor)` told in a fork of this process, and how that ended."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        try:
            work(writer)
        except BaseException:
            _tell(writer, {"error": traceback.format_exc()})
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        told = [json.loads(line) for line in lines]
    return told, os.waitpid(pid, 0)[1]


def load(backend: str, model: str, directory: str) -> Any:
    """The engine of `backend`, loaded and parked. `wake(token)` borrows the pool and adopts, and
    says how many blocks were `adopted`, or `why_empty`; with token 0 it takes private
    memory. `ask(prompts)` answers all at the same time, and `is_clear(prompt)` says whether
    rounding cannot change the answer."""
    if backend == "reference":
        from tests.vllm.kv_kills.reference import ParkedReference

        return ParkedReference(model, directory, ENGINE)
    from tests.vllm.kv_kills.parked_vllm import ParkedVllm

    return ParkedVllm(model, directory, ENGINE)


def run(flags: argparse.Namespace, base: Path) -> dict[str, Any]:
    """Lives until enough have been killed, or one was misled."""
    parked, rng = load(flags.backend, str(base / "model"), str(base / "pod")), Random(SEED)
    told, _ = in_a_fork(lambda out: _tell(out, {"known": learn(parked, rng)}))
    if "known" not in told[0]:
        raise RuntimeError(told[0]["error"])
    known = [(prompt, answer) for prompt, answer in told[0]["known"]]
    say(f"{len(known)} questions")
    points, names = Points(flags.backend), [*SEAMS[flags.backend]]
    lives: list[Life] = []
    killed: list[str] = []
    while len(killed) < flags.kills:
        point = names[len(lives) % len(names)]
        life = Life(point, points.arm(point, rng), asked=lives[-1].asked if lives else [])
        told, life.status = in_a_fork(partial(live, parked, len(lives) + 1, known, life))
        for name, value in (each for one in told for each in one.items()):
            setattr(life, name, value)
        lives.append(life)
        if os.WIFSIGNALED(life.status) and os.WTERMSIG(life.status) == signal.SIGKILL:
            killed.append(point)
        about = f"{point} (+{life.skip}): {life.adopted} adopted {life.error}"
        say(f"{len(killed)}/{flags.kills} {about}")
        if life.wrong or life.error:
            break
    adopted = sum(each.adopted for each in lives)
    wrong, errors = sum(each.wrong for each in lives), [each.error for each in lives if each.error]
    return {
        "passed": bool(adopted) and not wrong and not errors,
        "kills": len(killed),
        "kills_by_point": dict(Counter(killed)),
        "adopted_blocks": adopted,
        "wrong_answers": wrong,
        "errors": errors,
        "why_empty": dict(Counter(each.why_empty for each in lives if not each.adopted)),
        "each": [asdict(each) for each in lives],
    }


def _tokens(rng: Random, count: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(count)]


def _tell(out: int, said: dict[str, Any]) -> None:
    os.write(out, json.dumps(said).encode() + b"\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.kv_kills", description="kill forks of a parked engine"
    )
    parser.add_argument("--backend", choices=SEAMS, default="reference")
    parser.add_argument(
        "--runner",
        choices=v2_on_cpu.RUNNERS,
        help="vLLM's model runner [default: what vLLM chooses on a GPU]",
    )
    parser.add_argument("--kills", type=int, default=200, help="how many [default: %(default)s]")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    if os.environ.get("ENGINE_ID") != ENGINE:  # libraries read the environment as they are loaded
        environment = {**os.environ, **RandomModel.of(flags.backend).env, **VARIABLES}
        if flags.backend == "vllm":
            environment |= v2_on_cpu.environment(flags.runner)
        words = [sys.executable, "-m", "tests.vllm.kv_kills", *sys.argv[1:]]
        os.execve(sys.executable, words, environment)
    out, began_s = os.dup(sys.stdout.fileno()), time.monotonic()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what vLLM prints is no report
    with tempfile.TemporaryDirectory(prefix="kv-kills-") as directory:
        base = Path(directory)
        (base / "pod").mkdir(mode=0o700)
        asyncio.run(make_random_model(base / "model", RandomModel.of(flags.backend).shape))
        server = GmsProcess(str(base / "pod"), device_bytes=DEVICE_BYTES).start()
        try:
            found = run(flags, base)
        finally:
            server.stop()
    head = {"machine": machine(), "commit": commit(), "took_s": round(time.monotonic() - began_s)}
    if flags.json:
        os.write(out, json.dumps({**head, **vars(flags), **found}, indent=1).encode() + b"\n")
    say(str({name: value for name, value in found.items() if name != "each"}))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
