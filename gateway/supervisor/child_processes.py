"""The child processes of a gateway: started, told what they need, and counted.

`ChildProcesses` performs what `gateway.core.children` decides, and feeds it. It owns the listening
socket's copy, the processes and their channels, and what a starting child receives: the socket only
at that child's turn. `ChildLink` is one child as its parent sees it: its process, its channel, its
last beat. A child's last messages may arrive after its end was seen, so its counts are read until
the channel ends. The totals include ended children, so that no counter falls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from gateway import messages as msg
from gateway.core import children as ev
from gateway.core.children import Children, Place
from gateway.core.events import DeathExpected, DoorSet, EngineGranted, NobodyGranted
from gateway.messages import Distribution, GatewayTotals, ModelTotal, PoolOutcome
from gateway.schema import GatewayRequest
from plumbing.errors import UnderstudyError, explain_shortage, is_shortage
from plumbing.pod.child_process import ChildProcess
from plumbing.pod.supervision import CpuTimes, Silence
from plumbing.service import procfs
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.service.process import parent_environment
from plumbing.wire.connection import Connection, Handler, UnixConnection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message

COMMAND = (sys.executable, "-m", "gateway.server")
FINAL_READ_S = 1.0  # to read what a dead child has sent: it has all arrived already


class ChildOwner(Protocol):
    """Whom a child's link tells what it hears."""

    def beaten(self, link: ChildLink) -> None: ...

    def demanded(self, link: ChildLink, demand: msg.ModelDemandMsg) -> None: ...

    def happened(self, link: ChildLink, event: msg.GatewayEventMsg) -> None: ...

    def ended(self, link: ChildLink) -> None:
        """The process is reaped; `link.said` has its last words where it could not start."""

    def read_out(self, link: ChildLink) -> None:
        """The channel ended too: nothing more will be counted."""


class ChildLink(Handler):
    """A child and the channel to it."""

    def __init__(self, number: int, owner: ChildOwner, clock: Clock) -> None:
        self.number = number
        self.beat: msg.GatewayBeatMsg | None = None
        self.beaten_ms = 0.0
        self.accepting_since_ms: float | None = None
        self.said = ""  # why it could not go on, in its own words
        self.process: ChildProcess | None = None
        self.started_ms = clock.now_ms()
        self._owner, self._clock = owner, clock
        self._conn: Connection | None = None
        self._silence = Silence()
        self._looked_ms = self.started_ms
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def start(self, command: Sequence[str], settings: msg.ConfigureGatewayMsg) -> None:
        """Start the process and configure it.

        Raises:
            OSError: there is no room for a process or its descriptors; nothing is left of it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            conn = UnixConnection(ours, msg.CHANNEL, self)
            undo.pop_all()
            undo.callback(conn.close, "no process was started")
            more = {msg.CHANNEL_ENV: str(theirs.fileno()), **parent_environment()}
            environ = {**os.environ, **more}
            self.process = ChildProcess(command, environ, pass_fds=(theirs.fileno(),))
            undo.pop_all()
        self._conn = conn
        conn.send(settings)
        task = asyncio.get_running_loop().create_task(self._watch(self.process))
        self._tasks.add(task)

    def send(self, message: Message, fds: Sequence[OwnedFd] = ()) -> None:
        """Takes `fds`. What a child that is gone does not read is dropped."""
        if self._conn is None:
            close_all(fds)
            return
        self._conn.send(message, fds=fds)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def silent_ms(self) -> float:
        """For how long nothing was heard of it, not counting what is no fault of its own."""
        now_ms = self._clock.now_ms()
        elapsed_ms, self._looked_ms = now_ms - self._looked_ms, now_ms
        found = procfs.cpu_times(self.pid)
        self._silence.look(elapsed_ms, None if found is None else CpuTimes(*found))
        return self._silence.ms

    async def _watch(self, process: ChildProcess) -> None:
        await process.wait()
        if self.beat is None:  # what it says about its start decides; a successor waits for nothing
            await self._read_out()
        self._owner.ended(self)
        await self._read_out()
        if self._conn is not None:
            self._conn.close("the process is gone")
        self._owner.read_out(self)

    async def _read_out(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_READ_S):
                await self._closed.wait()

    # ------------------------------------------------------------------ as the wire's handler

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        self._silence.answered()
        match message:
            case msg.GatewayBeatMsg():
                was_accepting = self.beat is not None and self.beat.is_accepting
                self.beat, self.beaten_ms = message, self._clock.now_ms()
                if message.is_accepting != was_accepting:
                    self.accepting_since_ms = self.beaten_ms if message.is_accepting else None
                self._owner.beaten(self)
            case msg.ModelDemandMsg():
                self._owner.demanded(self, message)
            case msg.GatewayEventMsg():
                self._owner.happened(self, message)
            case FaultMsg():
                self.said = message.message

    def closed(self, conn: Connection, reason: str) -> None:
        """A child closes the channel as it exits; one that does not exit can no longer be led."""
        self._closed.set()
        if self.process is not None and self.process.returncode is None:
            asyncio.get_running_loop().call_later(FINAL_READ_S, self._end_it)

    def _end_it(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()


News: TypeAlias = EngineGranted | NobodyGranted | DeathExpected | DoorSet
Restarted = Callable[[msg.ChildRestartedMsg | UnderstudyError], None]


class ChildProcesses:
    """All children; `on_change` is called when who accepts may have changed, `on_beat` and
    `on_gone` for each of them."""

    def __init__(
        self,
        settings: msg.ConfigureGatewayMsg,
        clock: Clock,
        log: EventLog,
        *,
        on_change: Callable[[], None],
        on_end: Callable[[int], None],
        on_beat: Callable[[ChildLink], None] = lambda link: None,
        on_gone: Callable[[ChildLink], None] = lambda link: None,
        on_demand: Callable[[ChildLink, msg.ModelDemandMsg], None] = lambda link, demand: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.core = Children()
        self.links: dict[int, ChildLink] = {}  # those that live
        self.totals = msg.GatewayTotals()  # of those that do not
        self.lost_requests = 0  # in flight in children that died
        self.has_started = False  # one child was ready
        self.service: OwnedFd | None = None
        self.address = ""
        self.socket_problem: str | None = None
        self._settings, self._clock, self._log = settings, clock, log
        self._on_change, self._on_end = on_change, on_end
        self._on_beat, self._on_gone, self._on_demand = on_beat, on_gone, on_demand
        self._command = command
        self._dying: set[ChildLink] = set()  # reaped, with words that are not read yet
        self._grants: dict[str, EngineGranted] = {}  # by model; "" without a pool
        self._nobody: dict[str, NobodyGranted] = {}
        self._door: msg.NewsMsg | msg.ModelDoorsMsg | None = None
        self._copy: OwnedFd | None = None  # of the socket, for the next child that accepts
        self._owed: int | None = None  # a child that waits for the copy: there was no descriptor
        self._asked: list[Restarted] = []

    # ------------------------------------------------------------------ looking

    @property
    def serving(self) -> ChildLink | None:
        """The child that was told to accept."""
        process = self.core.serving
        return None if process is None else self.links[process.id]

    @property
    def is_accepting(self) -> bool:
        """Whether any child accepts: at a restart two of them may, for a moment."""
        beats = (link.beat for link in self.links.values())
        return any(beat.is_accepting for beat in beats if beat is not None)

    def at(self, place: Place) -> list[ChildLink]:
        return [self.links[each.id] for each in self.core.at(place)]

    def counted(self) -> msg.GatewayTotals:
        """The counts of all children so far."""
        beats = (link.beat for link in [*self.links.values(), *self._dying])
        return add([self.totals, *(beat.totals for beat in beats if beat is not None)])

    # ------------------------------------------------------------------ what happens outside

    def feed(self, event: ev.ParentEvent) -> None:
        """Tell the core, and do what it says."""
        for effect in self.core.handle(event, self._clock.now_ms()):
            self._perform(effect)
        self._on_change()

    def lent(self, fd: OwnedFd, address: str) -> None:
        """Take the listening socket, in place of an earlier one."""
        self._drop_socket()
        self.service, self.address = fd, address
        self.feed(ev.SocketLent())

    def tell(self, event: News) -> None:
        """Tell all children, and each that starts later what still counts."""
        news = msg.NewsMsg(event)
        match event:
            case EngineGranted():
                self._grants[event.model] = event
                self._nobody.pop(event.model, None)
            case NobodyGranted():
                self._nobody[event.model] = event
            case DoorSet():
                self._door = news
            case DeathExpected():
                what = f"{event.engine} (token {event.token}) is about to be killed on purpose"
                data = {"engine_id": event.engine, "token": event.token}
                self._log.record("gateway.death_expected", what, data=data)
        self._tell_all(news)

    def set_model_doors(self, doors: msg.ModelDoorsMsg) -> None:
        self._door = doors
        self._tell_all(doors)

    def restart(self, on_done: Restarted) -> None:
        """Replace the child that serves by a fresh one."""
        self._asked.append(on_done)
        self.feed(ev.RestartAsked())

    def look(self) -> None:
        """Call this every 100 ms or so."""
        for link in list(self.links.values()):
            silent_ms = link.silent_ms()
            if silent_ms > msg.BEAT_MS:
                why = procfs.halted(link.pid) or ""
                self.feed(ev.ChildSilent(link.number, silent_ms, why))
        if self._owed is not None:
            self._lend(self._owed)
        self._have_copy()
        self.feed(ev.ParentTick())

    def close(self) -> None:
        """End all that is left, without waiting."""
        for link in self.links.values():
            link.kill()
        self._drop_socket()

    def _drop_socket(self) -> None:
        for fd in (self.service, self._copy):
            if fd is not None:
                fd.close()
        self.service = self._copy = None

    # ------------------------------------------------------------------ what the core wants

    def _perform(self, effect: ev.ParentEffect) -> None:
        match effect:
            case ev.StartChild():
                self._start(effect.child)
            case ev.LetAccept():
                self._lend(effect.child)
            case ev.LetFinish():
                self._send(effect.child, msg.StopMsg(round(effect.budget_ms)))
            case ev.KillChild():
                if effect.child in self.links:
                    self.links[effect.child].kill()
            case ev.RestartDone():
                self._restarted(effect)
            case ev.RestartRefused():
                self._answer(UnderstudyError(effect.code, effect.reason))
                self._log.record("gateway.restart_refused", effect.reason, "warning")
            case ev.EndGateway():
                self._on_end(effect.exit_code)
            case ev.Told():
                self._log.record(effect.kind, effect.message, effect.severity, effect.data)

    def _start(self, number: int) -> None:
        link = ChildLink(number, self, self._clock)
        try:
            link.start(self._command, self._settings)
        except OSError as error:
            self.feed(ev.CannotStart(number, error.errno, explain_shortage(error.errno)))
            return
        self.links[number] = link
        news: list[News] = [*self._grants.values(), *self._nobody.values()]
        for event in news:
            link.send(msg.NewsMsg(event))
        if self._door is not None:
            link.send(self._door)
        self.feed(ev.ChildStarted(number, link.pid))

    def _lend(self, number: int) -> None:
        """Send the socket to a child. There is a copy in reserve: a spare must be able to accept
        though descriptors have run out."""
        self._owed = number if number in self.links else None
        if self.service is None or self._owed is None:
            return
        self._have_copy()
        if self._copy is not None:
            copy, self._copy, self._owed = self._copy, None, None
            self.links[number].send(msg.AcceptMsg(self.address), [copy])

    def _have_copy(self) -> None:
        if self.service is None or self._copy is not None:
            return
        try:
            self._copy = self.service.duplicate()
            self.socket_problem = None
        except OSError as error:
            if not is_shortage(error):
                raise
            why = "the socket cannot be copied for the next process that accepts"
            self.socket_problem = f"{why}: {explain_shortage(error.errno)}"

    def _restarted(self, done: ev.RestartDone) -> None:
        old = None if done.old is None else self.links.get(done.old)
        new = self.links[done.new]
        in_flight = old.beat.load.in_flight if old is not None and old.beat is not None else 0
        old_pid = 0 if old is None else old.pid
        finishing = f"; pid {old_pid} finishes {in_flight} requests" if old else ""
        data = {"child_pid": new.pid, "old_pid": old_pid or None, "in_flight": in_flight}
        self._log.record("gateway.restarted", f"pid {new.pid} takes over{finishing}", data=data)
        self._answer(msg.ChildRestartedMsg(old_pid, new.pid, in_flight))

    def _answer(self, answer: msg.ChildRestartedMsg | UnderstudyError) -> None:
        asked, self._asked = self._asked, []
        for each in asked:
            each(answer)

    def _send(self, number: int, message: msg.StopMsg) -> None:
        if number in self.links:
            self.links[number].send(message)

    def _tell_all(self, message: Message) -> None:
        for link in self.links.values():
            link.send(message)

    # ------------------------------------------------------------------ as its children's owner

    def beaten(self, link: ChildLink) -> None:
        if link.number in self.links:
            if self.core.all[link.number].place is Place.STARTING:
                self.has_started = True
                self.feed(ev.ChildReady(link.number))
            self._on_change()
            self._on_beat(link)

    def demanded(self, link: ChildLink, demand: msg.ModelDemandMsg) -> None:
        if link.number in self.links:
            self._on_demand(link, demand)

    def happened(self, link: ChildLink, event: msg.GatewayEventMsg) -> None:
        data = {"child_pid": link.pid, **event.data}
        self._log.record(event.kind, event.message, event.severity, data)

    def ended(self, link: ChildLink) -> None:
        assert link.process is not None
        returncode = link.process.returncode
        assert returncode is not None
        said = link.said
        if link.beat is not None and returncode != 0:
            lost = link.beat.load.in_flight
            self.lost_requests += lost
            said = f"{lost} requests in flight are lost" if lost else said
        del self.links[link.number]
        self._dying.add(link)
        self._on_gone(link)
        self.feed(ev.ChildEnded(link.number, returncode, said))

    def read_out(self, link: ChildLink) -> None:
        self._dying.discard(link)
        if link.beat is not None:
            self.totals = add([self.totals, link.beat.totals])


def add(parts: Iterable[GatewayTotals]) -> GatewayTotals:
    """The sum of `parts`."""
    found = list(parts)
    requests: Counter[tuple[str, str]] = Counter()
    limits: Counter[str] = Counter()
    models: Counter[tuple[str, PoolOutcome]] = Counter()
    for each in found:
        limits.update(each.limits)
        for total in each.requests:
            requests[total.ending, total.continuation] += total.count
        for ended in each.models:
            models[ended.model, ended.outcome] += ended.count
    return GatewayTotals(
        requests=tuple(GatewayRequest(*key, count) for key, count in sorted(requests.items())),
        tokens=sum(each.tokens for each in found),
        replayed_tokens=sum(each.replayed_tokens for each in found),
        pauses=sum(each.pauses for each in found),
        resumes=sum(each.resumes for each in found),
        continuations_lost=sum(each.continuations_lost for each in found),
        pause_s=_add_up(each.pause_s for each in found),
        added_s=_add_up(each.added_s for each in found),
        limits=dict(limits),
        models=tuple(ModelTotal(*key, count) for key, count in sorted(models.items())),
    )


def _add_up(parts: Iterable[Distribution]) -> Distribution:
    found = list(parts)
    columns = zip(*(each.counts for each in found), strict=True)
    return Distribution(tuple(map(sum, columns)), sum(each.sum_s for each in found))
