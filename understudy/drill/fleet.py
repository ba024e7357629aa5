"""The drill of a fleet: what is killed is a pod, or a part of one, and the front reports.

Each kill hits the pod with the most streams, and the next one waits until the front says that all
pods are ready again. What a front counts as lost, and a client as paused, is the same as with one
pod; a pod that the front calls silent or gone although nothing was done to it is a false death.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError
from plumbing.service.procfs import descendants
from plumbing.text import counted, duration
from pool.core.states import ModelState
from understudy.drill.clients import Target, inside_target
from understudy.drill.killer import (
    HeldPart,
    find_part,
    hold,
    kill_part,
    service_of,
    signal_all,
    strike,
    wait_back,
    wait_for,
    wait_whole,
)
from understudy.drill.outcomes import pauses_at_pod
from understudy.drill.prompts import bank_of, learn_answers, model_name
from understudy.drill.records import Kill, Moment
from understudy.drill.run import FIRST_WHOLE_DEADLINE_S, Drill, DrillPlan, clock
from understudy.drill.targets import FRONT, GATEWAY, LEAVE, PARTS, POD, STOPPED_POD, fleet_targets
from understudy.host import output_of
from understudy.pod.runner import PodRunner
from understudy.pod.table import pod_name, program
from understudy.status.gather import engine_parts, part_of, status_of

LOOK_S = 0.05  # between two looks at what the front says of its pods
SEEN_DEADLINE_S = 10.0  # silence is one second
STOPPED_S = 3.0  # of a stopped pod: long enough for all its streams to move
BACK_DEADLINE_S = 300.0  # a pod starts within seconds; with vLLM on 2 cores, minutes
LEAVE_WITHIN_S = 30.0
READY, SILENT, GONE = "ready", "silent", "gone"


class FleetDrill(Drill):
    """A drill on the pods below `directory` and the front in it, all run by `runner`."""

    def __init__(
        self,
        directory: Path,
        plan: DrillPlan,
        say: Callable[[str], None],
        runner: PodRunner,
        replicas: int,
    ) -> None:
        super().__init__(directory, plan, say, runner)
        self.records.pods = tuple(map(pod_name, range(replicas)))
        self._pods: dict[str, dict[str, Any]] = {}  # by name, as the front said last
        self._states: dict[str, str] = {}  # the last of each pod and of the front

    # ------------------------------------------------------------------ before the first kill

    async def prepare(self) -> Target:
        for name in self.records.pods:
            await wait_whole(self.directory / name, self.say, FIRST_WHOLE_DEADLINE_S)
        engines = engine_parts(self.directory / self.records.pods[0])
        backend = (await status_of(engines[0])).get("backend") or {}
        self.backend = backend.get("name")
        self._targets = self._targets or fleet_targets(self.backend)
        address = service_of(await status_of(part_of(self.directory, "gateway")))
        target = inside_target(address)
        model = await model_name(target)
        bank = bank_of(self.backend, model)
        self.prompts, self.records.expected = await learn_answers(target, bank)
        self.say(
            f"{len(self.records.pods)} pods serve {model} behind {address}; "
            f"{len(self.prompts)} prompts, {self.plan.clients} clients"
        )
        return target

    # ------------------------------------------------------------------ what the front says

    def _observe(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """Note what the front says of its pods in `records` as it changes."""
        document = await status_of(part_of(self.directory, "gateway"))
        self._pods = {str(each["name"]): each for each in document.get("pods") or ()}
        states = {name: self._state(name) for name in self.records.pods}
        states[FRONT] = GONE if "error" in document else READY
        for part, state in states.items():
            # A front that has just started may not have named all of its pods yet.
            is_known = part in (FRONT, *self._pods)
            if is_known and self._states.get(part) != state:
                self._states[part] = state
                self.records.moments.append(Moment(clock.now_ms(), part, state))

    def _state(self, pod: str) -> str:
        return str(self._pods.get(pod, {}).get("state", GONE))

    def _unwatched(self) -> list[str]:
        if self._watching.done():
            self._watching.result()  # it watches for ever, unless it failed
        states = {name: self._state(name) for name in self.records.pods}
        return [f"{name} ({state})" for name, state in states.items() if state != READY]

    async def _close_watches(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    # ------------------------------------------------------------------ one kill

    async def _kill(self, what: str, state: ModelState | None, target: Target) -> Kill:
        what_for = "no pod had a request"
        streams, pod = await wait_for(self._busiest, SEEN_DEADLINE_S, "drill.idle", what_for)
        if what == LEAVE:  # one after another, as in a rollout
            left = Counter(each.pod for each in self.records.kills if each.target == LEAVE)
            pod = min(self.records.pods, key=lambda name: left[name])
            streams = int(self._pods[pod]["streams"])
        kill = Kill(what, pod="" if what == FRONT else pod, result="did not come back")
        kill.streams = streams
        directory = self.directory / kill.pod
        if what in (POD, STOPPED_POD):
            await self._hit_pod(kill)
        elif what == LEAVE:
            await self._replace_pod(kill)
        elif what in (*PARTS, FRONT):
            with ExitStack() as stack:
                part = GATEWAY if what == FRONT else what
                found = await find_part(directory, part, stack)
                self.records.kills.append(kill)
                await kill_part(found, kill)
                if what != FRONT:
                    await wait_back(directory, found, kill, self.say)
        else:
            await self._hit_engine(kill, directory)
        await self._look()  # what it knows may be older than the kill
        await self._all_up()
        kill.back_ms = clock.now_ms()
        await self._answers()
        pauses = pauses_at_pod(kill, self.records)
        most = f", at most {duration(max(pauses))}" if pauses else ""
        kill.result = f"{counted(len(pauses), 'stream')} paused{most}"
        return kill

    async def _busiest(self) -> tuple[int, str] | str:
        """The pod with the most streams."""
        await self._look()
        found = max((int(each["streams"]), name) for name, each in self._pods.items())
        return found if found[0] else "all are idle"

    async def _hit_pod(self, kill: Kill) -> None:
        """SIGKILL all of it, and wait for its next life; or stop it until its streams are gone."""
        restarts, pid = self.runner.restarts()[kill.pod], self.runner.pids()[kill.pod]
        with ExitStack() as stack:
            pids = [pid, *descendants(pid)]
            held = HeldPart(kill.target, tuple(stack.enter_context(hold(p, POD)) for p in pids))
            self.records.kills.append(kill)
            if kill.target == POD:
                await kill_part(held, kill)
                what = f"{kill.pod} was not started again"
                runner, pod = self.runner, kill.pod
                await self._until(lambda: runner.restarts()[pod] > restarts, what, BACK_DEADLINE_S)
                return
            kill.killed_ms = clock.now_ms()
            try:
                signal_all(held.pidfds, signal.SIGSTOP)
                what = f"the front did not notice that {kill.pod} is stopped"
                await self._until(lambda: self._state(kill.pod) == SILENT, what, SEEN_DEADLINE_S)
                await asyncio.sleep(STOPPED_S)
            finally:
                signal_all(held.pidfds, signal.SIGCONT)

    async def _until(self, is_so: Callable[[], bool], what: str, deadline_s: float) -> None:
        async def look() -> str | None:
            return None if is_so() else "the drill waits on"

        await wait_for(look, deadline_s, "drill.not_noticed", what)

    async def _replace_pod(self, kill: Kill) -> None:
        """As a rollout does: the pod is told to leave, then to stop, and started anew."""
        self.records.kills.append(kill)
        kill.killed_ms = clock.now_ms()
        command = (*program("gateway"), "leave", f"--within={LEAVE_WITHIN_S:g}s")
        code, _, said = await output_of(*command, f"--dir={self.directory / kill.pod}")
        if code:
            raise UnderstudyError(
                "drill.no_leave", f"`gateway leave` of {kill.pod} failed: {said[-200:]}"
            )
        await self.runner.restart(kill.pod)

    async def _hit_engine(self, kill: Kill, directory: Path) -> None:
        """A process of the active engine: its standby takes over in the same pod."""
        whole = await wait_whole(directory, self.say)
        kill.engine, kill.old_token = whole.engine, whole.token
        part = next(each for each in engine_parts(directory) if each.name == whole.engine)
        self.records.kills.append(kill)
        await strike(part.path, int((await status_of(part)).get("pid") or 0), kill)

        async def look() -> str | None:
            now = await wait_whole(directory, self.say)
            return None if now.token > whole.token else "no engine took over"

        failed = f"no engine took over from {whole.engine} of {kill.pod}"
        await wait_for(look, BACK_DEADLINE_S, "drill.no_takeover", failed)
