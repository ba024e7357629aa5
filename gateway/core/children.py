"""Which process of a gateway accepts, which one is ready to, and what follows from their ends.

Pure. One child serves, and one is a spare: imported, configured and idle, so that the service is
back as soon as somebody tells it to accept. All of them share one listening socket, so a spare may
accept before the old child is reaped, and connections wait in the backlog meanwhile.

A restart needs a fresh child, since a spare has read certificates and keys when it was started. The
present one is then told to finish, and serves no newcomers. At the end of the gateway every child
is.

The gateway gives up only where nobody serves: a child that cannot start, while another one serves,
is a spare that is missing.

Its events, and the effects that the parent performs, are plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from plumbing.errors import InvariantError
from plumbing.pod.supervision import (
    BACKOFF_MS_MAX,
    SHORTAGE_EXIT_CODE,
    GiveUp,
    Restarts,
    StartAgain,
)
from plumbing.text import duration

# -------------------------------------------------------------------------------------- events


class ParentEvent(Struct, frozen=True):
    """What has happened, for `Children.handle`."""


class SocketLent(ParentEvent, frozen=True):
    """The listening socket has come, or another one in its place."""


class ChildStarted(ParentEvent, frozen=True):
    child: int
    pid: int


class CannotStart(ParentEvent, frozen=True):
    """There is no process for `StartChild`: the kernel's errno, and what it means."""

    child: int
    errno: int | None
    why: str


class ChildReady(ParentEvent, frozen=True):
    """Its first beat: it could accept now."""

    child: int


class ChildSilent(ParentEvent, frozen=True):
    """Nothing came from it for `ms`, in which it could run."""

    child: int
    ms: float
    why: str = ""  # such as "stopped"


class ChildEnded(ParentEvent, frozen=True):
    """It is reaped. `said`: its own words on why, if it had any."""

    child: int
    returncode: int
    said: str = ""


class RestartAsked(ParentEvent, frozen=True):
    pass


class StopAsked(ParentEvent, frozen=True):
    """Finish all streams within `budget_ms` and end. Asked again: end at once."""

    budget_ms: float


class ParentTick(ParentEvent, frozen=True):
    pass


# ------------------------------------------------------------------------------------- effects


class ParentEffect(Struct, frozen=True):
    """What the shell does, in the order given."""


class StartChild(ParentEffect, frozen=True):
    """Answered by `ChildStarted` or `CannotStart`."""

    child: int


class LetAccept(ParentEffect, frozen=True):
    child: int


class LetFinish(ParentEffect, frozen=True):
    child: int
    budget_ms: float


class KillChild(ParentEffect, frozen=True):
    child: int


class RestartDone(ParentEffect, frozen=True):
    old: int | None
    new: int


class RestartRefused(ParentEffect, frozen=True):
    code: str
    reason: str


class EndGateway(ParentEffect, frozen=True):
    exit_code: int


class Told(ParentEffect, frozen=True):
    """For the event log."""

    kind: str
    message: str
    severity: str = "info"
    data: Mapping[str, Any] = field(default_factory=dict)


SILENT_MS = 3_000.0  # of six beats not one came, in time in which the child could run
START_MS = 60_000.0  # to import, about 300 ms of a CPU, and to read the files of its settings
RETIRING_MAX = 2  # children that finish their streams after restarts; each has its own connections
RETIRE_MS = 3_600_000.0  # for that: a stream of an hour is rare, and one that never ends exists
STOP_MARGIN_MS = 2_000.0  # for a child to exit, when it has been told until when
REAP_MS = 5_000.0  # for a killed child, at the end of the gateway


class Place(StrEnum):
    STARTING = "starting"
    SPARE = "spare"
    SERVING = "serving"
    RETIRING = "retiring"
    KILLED = "killed"


TURNS: Mapping[tuple[Place, str], Place] = {
    (Place.STARTING, "ready"): Place.SPARE,
    (Place.SPARE, "accept"): Place.SERVING,
    (Place.SERVING, "finish"): Place.RETIRING,
    (Place.STARTING, "kill"): Place.KILLED,
    (Place.SPARE, "kill"): Place.KILLED,
    (Place.SERVING, "kill"): Place.KILLED,
    (Place.RETIRING, "kill"): Place.KILLED,
}
AVAILABLE = (Place.STARTING, Place.SPARE, Place.SERVING)
CHILDREN_WANTED = 2  # one that serves and a spare


class GatewayChild(Struct):
    """One child."""

    id: int
    place: Place
    since_ms: float  # in this place
    pid: int = 0
    is_restart: bool = False  # it takes over from the one that serves as soon as it is ready
    deadline_ms: float = 0.0  # to have finished, while it retires
    is_ready: bool = False
    lost_why: str = ""  # why it was killed; "" if that is no fault of it


class Children:
    """All children of one gateway."""

    def __init__(self) -> None:
        self.all: dict[int, GatewayChild] = {}
        self.restarts = Restarts()
        self.has_socket = False
        self.is_stopping = False
        self.problem: str | None = None  # why there is no spare, or nobody at all
        self._next_id = 1
        self._start_at_ms = 0.0
        self._stop_by_ms = 0.0
        self._exit_code = 0
        self._out: list[ParentEffect] = []

    # ------------------------------------------------------------------ looking

    def at(self, place: Place) -> list[GatewayChild]:
        return [each for each in self.all.values() if each.place is place]

    @property
    def serving(self) -> GatewayChild | None:
        return next(iter(self.at(Place.SERVING)), None)

    @property
    def spare(self) -> GatewayChild | None:
        return next(iter(self.at(Place.SPARE)), None)

    # ------------------------------------------------------------------ what happens

    def handle(self, event: ParentEvent, now_ms: float) -> list[ParentEffect]:
        """What follows from `event`. One about a child that has ended is ignored."""
        child = getattr(event, "child", None)
        if child is None or child in self.all:
            self._take(event, now_ms)
        if self.is_stopping:
            self._stop(now_ms)
        else:
            self._promote(now_ms)
            self._fill(now_ms)
        out, self._out = self._out, []
        return out

    def _take(self, event: ParentEvent, now_ms: float) -> None:
        match event:
            case SocketLent():
                self.has_socket = True
                if self.serving is not None:
                    self._out.append(LetAccept(self.serving.id))
            case ChildStarted():
                self.all[event.child].pid = event.pid
            case CannotStart():
                self._cannot_start(event, now_ms)
            case ChildReady():
                self._ready(self.all[event.child], now_ms)
            case ChildSilent():
                self._silent(self.all[event.child], event, now_ms)
            case ChildEnded():
                self._ended(self.all.pop(event.child), event, now_ms)
            case RestartAsked():
                self._restart(now_ms)
            case StopAsked():
                self._begin_stop(event, now_ms)
            case ParentTick():
                for each in self.at(Place.RETIRING):
                    if now_ms > each.deadline_ms:
                        self._kill(each, "it did not finish in time", now_ms)
            case _:
                raise InvariantError(f"{event} is not known here")

    def _ready(self, child: GatewayChild, now_ms: float) -> None:
        if child.place is not Place.STARTING:
            return  # killed, or it beats again
        child.is_ready = True
        self._turn(child, "ready", now_ms)
        self.problem = None
        if not child.is_restart:
            return
        child.is_restart = False
        for each in self.at(Place.SPARE):
            if each is not child:
                self._kill(each, "", now_ms)
        old = self.serving
        if old is not None:
            self._turn(old, "finish", now_ms)
        self._promote(now_ms)
        if old is not None:
            self._retire(old, RETIRE_MS, now_ms)
        self._out.append(RestartDone(old.id if old else None, child.id))

    def _silent(self, child: GatewayChild, event: ChildSilent, now_ms: float) -> None:
        limit_ms = SILENT_MS if child.is_ready else START_MS
        if child.place is Place.KILLED or event.ms <= limit_ms:
            return
        why = f" ({event.why})" if event.why else ""
        silence = f"pid {child.pid}, {_role(child)}, has not answered for {duration(event.ms)}{why}"
        self._tell("child_silent", f"{silence}; it is killed", "warning", child)
        self._kill(child, f"it had not answered for {duration(event.ms)}{why}", now_ms)

    def _cannot_start(self, event: CannotStart, now_ms: float) -> None:
        child = self.all.pop(event.child)
        what = f"no process of the gateway can be started: {event.why}"
        self._refuse_restart(child, what)
        verdict = self.restarts.not_started(event.errno)
        self._follow(verdict, "cannot_start", what, {"errno": event.errno}, now_ms)

    def _ended(self, child: GatewayChild, event: ChildEnded, now_ms: float) -> None:
        how = f"pid {child.pid}, {_role(child)}, ended {_how(event.returncode)}"
        if child.lost_why:
            how += f", killed because {child.lost_why}"
        if event.said:
            how += f": {event.said}"
        data = {"child_pid": child.pid, "returncode": event.returncode}
        if child.place is Place.KILLED and not child.lost_why:
            return  # it was not needed any more
        if self.is_stopping or child.deadline_ms:  # a retired one has its successor
            severity = "warning" if event.returncode else "info"
            self._out.append(Told("gateway.child_exit", how, severity, data))
            return
        self._refuse_restart(child, how)
        lived_ms = now_ms - child.since_ms if child.is_ready else 0.0  # a slow start is no life
        verdict = self.restarts.died(lived_ms, event.returncode, had_answered=child.is_ready)
        self._follow(verdict, "child_exit", how, data, now_ms)

    def _follow(
        self,
        verdict: StartAgain | GiveUp,
        kind: str,
        what: str,
        data: Mapping[str, Any],
        now_ms: float,
    ) -> None:
        """Do what is to be done about a child that is lost, and tell why."""
        is_known = self.restarts.shortages > 1 and self.problem == what
        self.problem = what
        if isinstance(verdict, GiveUp) and not self.at(Place.SERVING) and self.spare is None:
            count = self.restarts.deaths
            then = f"giving up after {count} attempts in a row" if count > 1 else "giving up"
            self._out.append(Told(f"gateway.{kind}", f"{what}; {then}", "error", data))
            self.is_stopping, self._stop_by_ms, self._exit_code = True, now_ms, verdict.exit_code
            return
        delay_ms = BACKOFF_MS_MAX if isinstance(verdict, GiveUp) else verdict.delay_ms
        self._start_at_ms = now_ms + delay_ms
        then = f"starting another in {duration(delay_ms)}" if delay_ms else "starting another"
        if not is_known:
            self._out.append(Told(f"gateway.{kind}", f"{what}; {then}", "warning", data))

    # ------------------------------------------------------------------ what is wanted

    def _promote(self, now_ms: float) -> None:
        """Let a spare accept if nobody does."""
        spare = self.spare
        if spare is None or self.serving is not None or not self.has_socket:
            return
        self._turn(spare, "accept", now_ms)
        self._out.append(LetAccept(spare.id))

    def _fill(self, now_ms: float) -> None:
        """Start what is missing: one at a time, so that they do not slow each other."""
        available = [each for each in self.all.values() if each.place in AVAILABLE]
        if len(available) >= CHILDREN_WANTED or self.at(Place.STARTING):
            return
        if now_ms >= self._start_at_ms:
            self._start(now_ms)

    def _start(self, now_ms: float, *, is_restart: bool = False) -> None:
        child = GatewayChild(self._next_id, Place.STARTING, now_ms, is_restart=is_restart)
        self._next_id += 1
        self.all[child.id] = child
        self._out.append(StartChild(child.id))

    # ------------------------------------------------------------------ restart, stop

    def _restart(self, now_ms: float) -> None:
        if self.is_stopping:
            self._out.append(RestartRefused("gateway.stopping", "the gateway is stopping"))
            return
        if any(each.is_restart for each in self.all.values()):
            return  # whoever asked later hears the same answer
        retiring = self.at(Place.RETIRING)
        if len(retiring) >= RETIRING_MAX and self.serving is not None:
            pids = ", ".join(f"pid {each.pid}" for each in retiring)
            why = f"{pids} still finish streams of earlier restarts; wait for them, or kill one"
            self._out.append(RestartRefused("gateway.restart_busy", why))
            return
        self._tell("restarting", "a fresh process is started to take over, as requested")
        for each in self.at(Place.STARTING):
            self._kill(each, "", now_ms)
        self._start(now_ms, is_restart=True)  # the spare stays until this one is ready

    def _refuse_restart(self, child: GatewayChild, why: str) -> None:
        if child.is_restart:
            serving = self.serving
            goes_on = f"; pid {serving.pid} keeps serving" if serving else ""
            self._out.append(RestartRefused("gateway.restart_failed", f"{why}{goes_on}"))

    def _begin_stop(self, event: StopAsked, now_ms: float) -> None:
        if self.is_stopping:
            self._stop_by_ms = now_ms
            return
        self.is_stopping = True
        self._stop_by_ms = now_ms + event.budget_ms + STOP_MARGIN_MS
        for each in list(self.all.values()):
            if each.is_restart:
                self._out.append(RestartRefused("gateway.stopping", "the gateway is stopping"))
            if each.place in (Place.STARTING, Place.SPARE):
                self._kill(each, "", now_ms)
            elif each.place in (Place.SERVING, Place.RETIRING):
                self._retire(each, event.budget_ms, now_ms)

    def _stop(self, now_ms: float) -> None:
        """End when all children have, and in any case."""
        if not self.all or now_ms > self._stop_by_ms + REAP_MS:
            self._out.append(EndGateway(self._exit_code))
        elif now_ms >= self._stop_by_ms:
            for each in list(self.all.values()):
                if each.place is not Place.KILLED:
                    self._kill(each, "the gateway ends", now_ms)

    # ------------------------------------------------------------------ one child

    def _retire(self, child: GatewayChild, budget_ms: float, now_ms: float) -> None:
        if child.place is not Place.RETIRING:
            self._turn(child, "finish", now_ms)
        child.deadline_ms = now_ms + budget_ms + STOP_MARGIN_MS
        self._out.append(LetFinish(child.id, budget_ms))

    def _kill(self, child: GatewayChild, why: str, now_ms: float) -> None:
        child.lost_why = why
        since_ms = child.since_ms
        self._turn(child, "kill", now_ms)
        child.since_ms = since_ms  # how long it lived in its last place
        self._out.append(KillChild(child.id))

    def _turn(self, child: GatewayChild, turn: str, now_ms: float) -> None:
        target = TURNS.get((child.place, turn))
        if target is None:
            raise InvariantError(f"child {child.id} is {child.place}: {turn} is impossible")
        child.place, child.since_ms = target, now_ms

    def _tell(
        self, kind: str, message: str, severity: str = "info", child: GatewayChild | None = None
    ) -> None:
        data = {"child_pid": child.pid} if child else {}
        self._out.append(Told(f"gateway.{kind}", message, severity, data))


def _role(child: GatewayChild) -> str:
    match child.place:
        case Place.STARTING:
            return "which was starting"
        case Place.SPARE:
            return "the spare"
        case Place.SERVING:
            return "which served"
        case Place.RETIRING:
            return "which finished its streams"
        case _:
            return "which was killed"


def _how(returncode: int) -> str:
    if returncode == SHORTAGE_EXIT_CODE:
        return "for lack of descriptors, threads or memory; its log says which"
    return f"by signal {-returncode}" if returncode < 0 else f"with code {returncode}"
