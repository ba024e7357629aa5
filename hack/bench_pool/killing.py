"""S7, and the pool's own death: every process of the pod is killed in every phase of a switch.

`a` streams and yields to a request for `b`. When the pool says that the phase has begun, the kill
follows; it can be late where a phase takes milliseconds, so those that met it are counted apart.
Whatever dies, both answers must come and be right; only a stream that was in the gateway is lost
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hack.bench_pool.plan import Plan
from hack.bench_pool.pods import BenchedPool
from hack.bench_pool.polling import until
from hack.bench_pool.programs import Figures, answered, without_pause
from hack.bench_pool.watching import MODEL, since
from hack.report import spread
from plumbing.errors import UnderstudyError
from plumbing.service.procfs import children
from understudy.drill.clients import clock
from understudy.drill.records import Outcome
from understudy.status.gather import engine_parts, status_of

OF_VICTIM = ("draining", "releasing")  # the other phases are those of the model that is raised
GATEWAYS = ("gateway", "gateway-child")
WHOLE_S = 120.0
BACK_POLL_S = 0.005
ANSWER_S = 120.0

Say = Callable[[str], None]


@dataclass
class Killed:
    """What followed from the kills of one process."""

    kills: int = 0
    in_phase: int = 0
    late: int = 0  # ended without a verdict
    answered_ms: list[float] = field(default_factory=list)  # from the kill to the later answer
    outcomes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def to_dict(self) -> Figures:
        bad = [each for each in self.outcomes if each != Outcome.OK]
        return {
            "kills": self.kills,
            "in_phase": self.in_phase,
            "late": self.late,
            "answered_ms": spread(self.answered_ms) if self.answered_ms else None,
            "requests": len(self.outcomes),
            "not_answered": len(bad),
            "faults": self.faults,
        }


async def in_each_phase(pool: BenchedPool, plan: Plan, say: Say) -> Figures:
    """S7."""
    a, b = pool.models[:2]
    await pool.learn([pool.long[a]])
    found: dict[str, Killed] = {}
    names = plan.s7_only or tuple(await processes(pool))
    for phase in plan.s7_phases:
        for name in names:
            say(f"S7: {name} while {a if phase in OF_VICTIM else b} is {phase}")
            into = found.setdefault(name, Killed())
            try:
                await _one(pool, phase, name, into)
            except UnderstudyError as error:
                into.late += 1
                into.faults.append(f"{phase}: {error}"[:300])
            await _whole(pool)
    killed = {name: each.to_dict() for name, each in found.items()}
    apart = {True: 0, False: 0}
    for name, each in found.items():
        apart[name in GATEWAYS] += each.to_dict()["not_answered"]
    return {
        "kills": sum(each.kills for each in found.values()),
        "in_phase": sum(each.in_phase for each in found.values()),
        "late": sum(each.late for each in found.values()),
        "not_answered": apart[False],
        "lost_in_gateway": apart[True],
        "processes": killed,
    }


async def _one(pool: BenchedPool, phase: str, name: str, into: Killed) -> None:
    a, b = pool.models[:2]
    for model in (a, b):  # or the third death in ten minutes would be a fault of the model
        await pool.order(model, "reset")
    if phase == "loading":
        began_ms = clock.now_ms()
        await pool.order(b, "unload")
        if (await pool.of(b))["state"] != "cold":
            await pool.watch.until_state(b, "cold", began_ms)
    await pool.ask(pool.short[a])
    pid = (await processes(pool)).get(name)
    began_ms = clock.now_ms()
    asked = [asyncio.create_task(pool.ask(pool.long[a], ANSWER_S))]

    async def streams() -> str:
        return "" if (await pool.of(a))["in_flight"] or asked[0].done() else "it is not in flight"

    await until(streams, f"stream of {a}", ANSWER_S)
    asked.append(asyncio.create_task(pool.ask(pool.short[b], ANSWER_S)))
    who = a if phase in OF_VICTIM else b
    await pool.watch.until_state(who, phase, began_ms)
    if pid is None:  # of an engine that was cold
        pid = await _appears(pool, name)
    killed_ms = clock.now_ms()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    into.kills += 1
    answers = await asyncio.gather(*asked)
    into.answered_ms.append(max(each.ended_ms for each in answers) - killed_ms)
    into.outcomes += [pool.outcome(each).value for each in answers]
    into.faults += [f"{phase}: {each}" for each in pool.faults(answers)]
    into.in_phase += _was_in(pool, who, phase, began_ms, killed_ms)


async def _appears(pool: BenchedPool, name: str) -> int:
    """Its pid, once it runs.

    Raises:
        WaitTimeoutError: `bench.late`.
    """
    found = dict[str, int]()

    async def missing() -> str:
        found.update(await processes(pool))
        return "" if name in found else f"only {', '.join(found)}"

    await until(missing, name, ANSWER_S, BACK_POLL_S)
    return found[name]


def _was_in(pool: BenchedPool, who: str, phase: str, began_ms: float, killed_ms: float) -> bool:
    states = [
        (each["mono_ms"], each["data"]["to"])
        for each in since(pool.watch.events, began_ms)
        if each["type"] == MODEL and each["data"]["model"] == who
    ]
    last = [state for at_ms, state in states if at_ms <= killed_ms]
    return bool(last) and last[-1] == phase


async def processes(pool: BenchedPool) -> Mapping[str, int]:
    """The pod's, by what they are; those of an engine that is cold are left out."""
    pids = pool.runner.pids()
    found = {name: pids[name] for name in ("pool", "lockserver", "gms", "gateway") if name in pids}
    for name, of in (("gms-server", "gms"), ("gateway-child", "gateway")):
        below = children(pids[of]) if of in pids else []
        found.update(zip((name,), below, strict=False))
    for part in engine_parts(pool.directory):
        document = await status_of(part)
        backend: dict[str, Any] = document.get("backend") or {}
        found[part.name] = pids.get(part.name, 0)
        for name, pid in (backend.get("pids") or {}).items():
            found[f"{part.name} {name}"] = pid
    return {name: pid for name, pid in found.items() if pid}


async def _whole(pool: BenchedPool) -> None:
    """Until everybody is back.

    Raises:
        WaitTimeoutError: `bench.late`.
    """

    async def missing() -> str:
        status = await pool.status()
        waits = [each["model"] for each in status["models"] if each["recovering"]]
        engines = [engine for each in status["models"] for engine in each["engines"]]
        unheard = [each["engine"] for each in engines if not each["connected"]]
        gateways = [] if status["gateways"] else ["no gateway"]
        return "; ".join([*pool.runner.not_up(), *waits, *unheard, *gateways, *status["problems"]])

    await until(missing, "whole pod", WHOLE_S)


async def of_the_pool(pool: BenchedPool, plan: Plan, say: Say) -> Figures:
    """The pool is killed again and again while two models take turns."""
    await pool.learn([*pool.long.values()])
    before, back = await pool.incarnations(), list[float]()
    asked = [[each] for each in pool.long.values() for _ in range(2)]
    problems: list[str] = []
    async with without_pause(pool, asked) as exchanges:
        try:
            for number in range(plan.pool_kills):
                say(f"pool killed, {number + 1} of {plan.pool_kills}")
                back.append(await _kill_pool(pool))
                await answered(exchanges, len(asked))
        except UnderstudyError as error:
            problems.append(str(error)[:300])
    after = await pool.incarnations()
    return {
        "kills": len(back),
        "engines_restarted": sum(after.get(name) != each for name, each in before.items()),
        "back_ms": spread(back) if back else None,
        **pool.counts(exchanges),
        "faults": [*problems, *pool.faults(exchanges)],
    }


async def _kill_pool(pool: BenchedPool) -> float:
    """How long until another one answers and knows all models."""

    async def missing() -> str:
        status = await pool.status()
        if status["recovering"] or not status["gateways"]:
            return "it recovers"
        return "; ".join(status["problems"])

    os.kill(pool.runner.pids()["pool"], signal.SIGKILL)
    return await until(missing, "pool", WHOLE_S, BACK_POLL_S)
