"""One pass over the sites of each phase: record them, then fail each once and look.

A case is one call of one process that fails in one phase. Afterwards the pod must be whole by
itself, or its status must name a problem. Then the active engine is killed: a state that only looks
whole does not survive that.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from plumbing.errors import UnderstudyError
from tests.sweep_faults.phases import PHASES
from tests.sweep_faults.pod import WHOLE_S, Look, Standing, SweptPod
from tests.sweep_faults.shim import KINDS, Control, SweepError

REACH_S = 3.0  # for a site to be reached again at rest: ticks come every second or faster
SETTLE_S = 0.3  # for a death that a fault causes to be seen
DISTURBED_MAX = 3  # unplanned deaths of one pod: a fifth within ten minutes is a crash loop
CASES_MAX = 12  # of one pod

# An import at start fails the start, whichever line it is on: one of them is enough.
IMPORT_AT_START = re.compile(r"@import(<(<frozen \w+>:\w+|[^<]*:<module>):\d+)*$")

# An error of a command, and the last line of a traceback that Python printed.
NOT_JSON = re.compile(r"error: |[A-Za-z.]*(Error|Exception)\b")
LINE_SHOWN = 300


class Verdict(StrEnum):
    """How a case ended. The first three pass."""

    WHOLE = "whole"
    NAMED = "named"  # not whole in time, and status says why
    NOT_REACHED = "not_reached"
    SILENT = "silent"  # not whole in time, and status does not say why
    WRONG = "wrong"  # a request got a wrong answer
    TAKEOVER = "takeover"  # it looked whole, and the next death of the active engine was an outage

    @property
    def passes(self) -> bool:
        return self in (Verdict.WHOLE, Verdict.NAMED, Verdict.NOT_REACHED)


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """The call at `site` of the process `role` fails as if there were no more of `kind`."""

    phase: str
    role: str
    kind: str
    site: str

    @property
    def place(self) -> tuple[str, str, str]:
        """What a sweep fails once, in the first phase that gets there. A backend's processes start
        alike in both engines; supervisors differ by what they do for the active one."""
        program = self.role.partition("-")[2]
        return program if program == "model" else self.role, self.kind, self.site

    def nearer(self) -> Case:
        """The same call from wherever its two innermost functions of ours were called: the way to
        them may differ from one time to the next, by a timer or by an event."""
        frames = self.site.split("<")
        ours = [number for number, frame in enumerate(frames) if "/" in frame][1:2]
        return replace(self, site="<".join(frames[: ours[0] + 1])) if ours else self

    def flags(self) -> str:
        """The command that repeats it."""
        found = f"--phase {self.phase} --process {self.role} --kind {self.kind}"
        found += f" --site '{self.site}'" if self.site else ""
        return f"python -m tests.sweep_faults {found}"


@dataclass(slots=True)
class Outcome:
    """What followed. `whole_ms`: from the fault's phase to a whole pod; `cost`: what was started
    again though the phase does not do that; `errors`: from the logs."""

    case: Case
    verdict: Verdict
    failed_calls: int = 0
    whole_ms: float | None = None
    detail: str = ""
    named: list[str] = field(default_factory=list)
    cost: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Sweep:
    """Runs cases on one pod after the other; `say` gets a line per step."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        library: Path,
        deadline_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._directory, self._model = directory, model
        self._control = Control(directory, library)
        self._deadline_s, self._say = deadline_s, say
        self._pod: SweptPod | None = None
        self._standing: Standing | None = None
        self._pods = self._cases = self._disturbed = 0

    async def close(self) -> None:
        """End the pod."""
        self._control.rest()
        pod, self._pod = self._pod, None
        if pod is not None:
            await pod.stop()

    # ------------------------------------------------------------------ recording

    async def sites(self, phase: str) -> list[Case]:
        """The cases of `phase`: each site that it passes in any process."""
        pod, standing = await self._ready()
        self._control.record()
        await PHASES[phase].happens(pod, standing)
        if phase == "rest":
            await asyncio.sleep(REACH_S)
        look = await pod.until_whole(WHOLE_S, lambda new: PHASES[phase].is_over(standing, new))
        calls = self._control.calls()
        self._control.rest()
        if look.standing is None:
            raise SweepError(
                f"{phase} did not end in a whole pod without any fault: {look.missing}"
            )
        self._standing = look.standing
        found = dict.fromkeys(
            Case(phase, role, kind, IMPORT_AT_START.sub("@import", call.site))
            for call in calls
            for kind, about in KINDS.items()
            if (role := standing.role(call.process)) is not None and call.kinds & about.bit
        )
        self._say(f"{phase}: {len(found)} cases")
        return list(found)

    # ------------------------------------------------------------------ one case

    async def run(self, case: Case) -> Outcome:
        """Fail the call, and judge what follows."""
        pod, standing = await self._ready()
        log = Log(pod.directory / "log")
        phase = PHASES[case.phase]
        self._control.arm(standing.program(case.role), KINDS[case.kind], case.site)
        began_s = time.monotonic()
        await self._drive(case, pod, standing)
        look = await pod.until_whole(self._deadline_s, lambda new: phase.is_over(standing, new))
        whole_ms = (time.monotonic() - began_s) * 1000
        outcome = Outcome(case, Verdict.WHOLE, self._control.fired, round(whole_ms))
        self._control.rest()
        self._cases += 1
        if look.standing is None:
            outcome.detail, outcome.named, outcome.whole_ms = look.missing, look.named, None
            outcome.verdict = Verdict.NAMED if look.named else Verdict.SILENT
            await self.close()
        else:
            outcome.cost = phase.unexpected(standing, look.standing)
            await self._take_over(outcome, pod, look.standing)
        if outcome.verdict is Verdict.WHOLE and not outcome.failed_calls:
            outcome.verdict = Verdict.NOT_REACHED
        if pod.wrong:
            outcome.verdict, outcome.detail = Verdict.WRONG, "; ".join(pod.wrong)
            await self.close()
        self._disturbed += bool(outcome.cost) or case.phase in ("commit", "restart")
        outcome.errors = log.errors()
        return outcome

    async def _drive(self, case: Case, pod: SweptPod, standing: Standing) -> None:
        """Let the phase happen; at rest, until the call has failed."""
        end_s = time.monotonic() + REACH_S
        while True:
            try:
                await PHASES[case.phase].happens(pod, standing)
            except (UnderstudyError, OSError) as error:
                self._say(f"  {error}")  # the fault may have hit what we asked
            if case.phase != "rest" or self._control.fired or time.monotonic() > end_s:
                break
        await asyncio.sleep(SETTLE_S)

    async def _take_over(self, outcome: Outcome, pod: SweptPod, old: Standing) -> None:
        """Kill the active engine: the standby must take over, or the pod was not whole."""
        try:
            await pod.kill_model(old.active)
            look = await pod.until_whole(self._deadline_s, lambda new: new.token > old.token)
        except (UnderstudyError, OSError) as error:
            look = Look({}, missing=str(error))
        self._standing = look.standing
        if look.standing is None or look.standing.active != old.standby:
            outcome.verdict, outcome.named = Verdict.TAKEOVER, look.named
            outcome.detail = look.missing or "the standby did not take over"
            await self.close()

    # ------------------------------------------------------------------ the pod

    async def _ready(self) -> tuple[SweptPod, Standing]:
        """A whole pod; a new one if the last one has seen too much."""
        if self._cases >= CASES_MAX or self._disturbed >= DISTURBED_MAX:
            await self.close()
        if self._pod is None:
            self._pods += 1
            self._cases = self._disturbed = 0
            self._pod = SweptPod(self._directory / f"pod{self._pods}", self._model, self._control)
            self._standing = await self._pod.start()
        if self._standing is None:
            self._standing = await self._pod.whole(WHOLE_S)
        return self._pod, self._standing


class Log:
    """What the containers have logged since this object was made."""

    def __init__(self, directory: Path) -> None:
        self._began = {path: path.stat().st_size for path in directory.glob("*.log")}
        self._directory = directory

    def errors(self) -> list[str]:
        """The errors, each with the last line of its traceback."""
        paths = sorted(self._directory.glob("*.log"))
        return [f"{path.stem}: {line[:LINE_SHOWN]}" for path in paths for line in self._bad(path)]

    def _bad(self, path: Path) -> Iterator[str]:
        new = path.read_bytes()[self._began.get(path, 0) :]
        for line in new.decode(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                record = {}
                if NOT_JSON.match(line):
                    yield line
            if isinstance(record, dict) and record.get("level") == "error":
                message = str(record.get("msg")).partition("\n")[0]
                last = str(record.get("traceback") or "").rstrip().rpartition("\n")[2]
                yield f"{message} | {last}" if last else message
