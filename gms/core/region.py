"""Regions of memory, the sessions that hold or want them, and what both kinds have in common.

A region is an epoch of weights or a pool of KV memory. Its phase says what it is to this server;
who holds it, the sessions and the kernel say. `Machine` leads both through the tables, which
enforce themselves: `move` and `turn` raise on a pair that is not in them and change nothing
(`docs/states.md` is generated from them). Who is granted what is the owner rule of a subclass:
`weights.py` (one writer, a commit, readers) and `kv.py` (one incarnation, by token).

Rules that are easy to break, of both:
- Memory that is given up ends by evidence: its file, on which every process that maps it has a
  flock, is free, as the kernel says. A session may end before its process.
- A survivor of an earlier server hands its region back in one message, with the memory. One is
  checked at a time; if it is not what it should be, the next one is. Only evidence ends the wait
  for it, too. If the survivor is gone by then, the memory is here all the same.
- A completion may arrive after its session has left. The shell performs calls in order, so the
  release that follows undoes the late call.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

from msgspec import Struct, field

from gms import messages as msg
from gms.core import events as ev
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError
from plumbing.transitions import Table
from plumbing.wire.messages import Message


class RegionPhase(StrEnum):
    """What a region's memory is to this server."""

    MAKING = "making"  # a writer fills it, or the driver makes it
    SERVED = "served"  # an epoch is committed, a pool is there to be lent
    RETIRED = "retired"  # never granted again; a process may still map it
    FREEING = "freeing"  # no process maps it; what we hold of it is being freed
    ORPHANED = "orphaned"  # of an earlier server: its holders have it, and we do not
    GONE = "gone"


TURNS = Table[RegionPhase, str](
    {
        (RegionPhase.MAKING, "serve"): RegionPhase.SERVED,
        (RegionPhase.MAKING, "retire"): RegionPhase.RETIRED,
        (RegionPhase.MAKING, "fail"): RegionPhase.GONE,
        (RegionPhase.SERVED, "retire"): RegionPhase.RETIRED,
        (RegionPhase.RETIRED, "free"): RegionPhase.FREEING,
        (RegionPhase.ORPHANED, "recover"): RegionPhase.SERVED,
        (RegionPhase.ORPHANED, "retire"): RegionPhase.RETIRED,
        (RegionPhase.ORPHANED, "free"): RegionPhase.FREEING,
        (RegionPhase.FREEING, "end"): RegionPhase.GONE,
    },
    start=(RegionPhase.MAKING, RegionPhase.ORPHANED),
)


class S(StrEnum):
    """The states of one process's session."""

    OPEN = "open"  # has asked for nothing yet
    WAITING = "waiting"  # for its grant
    # A writer of weights.
    WRITING = "writing"
    ALLOCATING = "allocating"
    SEALING = "sealing"  # committing: no process may write from here on
    JOURNALLING = "journalling"  # committing: sealed, being written to disk
    READING = "reading"
    # A borrower of KV memory.
    GRANTED = "granted"  # the pool is its; it has no memory before it holds the flock
    HOLDING = "holding"  # has the descriptors
    LEAVING = "leaving"  # maps nothing any more; waits until the memory is free
    RETURNING = "returning"  # came back after a server's death; not registered yet
    CLOSED = "closed"  # gone, or refused and about to go


WRITER_STATES = frozenset({S.WRITING, S.ALLOCATING, S.SEALING, S.JOURNALLING})
# A process in one of these maps its region, or is about to.
HOLDERS = WRITER_STATES | {S.READING, S.GRANTED, S.HOLDING, S.RETURNING}
REFUSABLE = (
    *(S.WAITING, S.WRITING, S.ALLOCATING, S.SEALING),
    *(S.LEAVING, S.RETURNING),
)

# By a message from the client, the end of the driver's call for it, or a verdict of the machine.
Input = type[Message] | type[ev.Effect] | str

SESSIONS = Table[S, Input](
    {
        (S.OPEN, msg.AttachMsg): S.WAITING,
        (S.WAITING, "read"): S.READING,
        (S.WAITING, "write"): S.WRITING,
        (S.WRITING, msg.AllocateMsg): S.ALLOCATING,
        (S.ALLOCATING, ev.CreateSlab): S.WRITING,
        (S.WRITING, msg.CommitMsg): S.SEALING,
        (S.SEALING, ev.SealEpoch): S.JOURNALLING,
        (S.JOURNALLING, ev.WriteJournal): S.READING,
        (S.READING, msg.OffloadMsg): S.CLOSED,  # it has unmapped: it is no reader any more
        (S.OPEN, msg.BorrowPoolMsg): S.WAITING,
        (S.WAITING, "lend"): S.GRANTED,
        (S.GRANTED, msg.TakeMsg): S.HOLDING,
        (S.HOLDING, msg.GiveUpMsg): S.LEAVING,
        (S.LEAVING, "free"): S.CLOSED,
        (S.OPEN, msg.HandBackMsg): S.RETURNING,
        (S.RETURNING, "read again"): S.READING,
        (S.RETURNING, "hold again"): S.HOLDING,
        **{(state, "refuse"): S.CLOSED for state in REFUSABLE},
        **{(state, "close"): S.CLOSED for state in S if state is not S.CLOSED},
    },
    {
        S.WRITING: [msg.ProgressMsg],
        S.ALLOCATING: [msg.ProgressMsg],
        S.READING: [msg.CondemnMsg, msg.DigestMsg],
        S.HOLDING: [msg.MarkMsg, msg.DiscardMsg],
    },
    start=(S.OPEN,),
)


class Region(Struct):
    """Memory as far as this server knows it."""

    id: str
    phase: RegionPhase
    slab_sizes: list[int] = field(default_factory=list)
    pids: tuple[int, ...] = ()  # seen with its file open, while no session explains it
    watch: bool | None = None  # whether its file's end is watched for; None: it is not watched
    returning: int | None = None  # the session whose memory the driver checks

    @property
    def size_bytes(self) -> int:
        return sum(self.slab_sizes)

    @property
    def holders_shown(self) -> str:
        return ", ".join(f"pid {pid}" for pid in self.pids)

    def turn(self, verb: str) -> None:
        """Move to the next phase, by the table."""
        target = TURNS.target(self.phase, verb)
        if target is None:
            raise InvariantError(f"region {self.id} is {self.phase} and cannot {verb}")
        self.phase = target


class Session(Struct):
    """One connection of a process that holds memory, or wants some."""

    id: int
    state: S = S.OPEN
    request: Any = None  # what opened it: `attach`, `borrow_pool` or `hand_back`
    pid: int = 0  # of the process; 0 where its PID namespace is not visible
    request_id: int = 0  # of the request that awaits its answer; 0: none
    since_ms: float = 0.0
    deadline_ms: float | None = None  # of the wait, or of the writer's next progress
    reason: str = ""  # of the wait: a code, for programs
    reason_message: str = ""  # the same as a sentence
    region: str | None = None
    # Of a writer of weights.
    asked_bytes: int = 0  # of the slab that is being allocated; it waits while there is a deadline
    full: UnderstudyError | None = None  # the driver's error: it has no memory for that slab
    full_since_ms: float | None = None
    retry_ms: float | None = None  # when the full device is tried again
    done_bytes: int = 0
    total_bytes: int = 0

    def accept(self, message: Message) -> S:
        """The state that `message` leads to."""
        target = SESSIONS.target(self.state, type(message))
        if target is None:
            raise ProtocolError(
                "gms.unexpected_message",
                f"{message.TYPE} is not allowed now: this session is {self.state}",
                state=str(self.state),
            )
        return target

    def move(self, what: Input | Message, now_ms: float) -> None:
        """Change state, by the table."""
        if isinstance(what, Message):
            target: S | None = self.accept(what)
        else:
            target = SESSIONS.target(self.state, what)
        if target is None:
            raise InvariantError(f"{what} in state {self.state}")
        if target is not self.state:
            self.state, self.since_ms = target, now_ms

    def take_request_id(self) -> int:
        """The id of the request that is answered now."""
        request_id, self.request_id = self.request_id, 0
        return request_id

    @property
    def claimant(self) -> ev.Claimant:
        """Of a borrower of KV memory."""
        return claimant(self.request)

    @property
    def label(self) -> str:
        """Its name in messages: `engine-0 rank 1 (pid 123)`, `engine-0 (token 5, pid 123)`."""
        request, known = self.request, [f"pid {self.pid}"] if self.pid else []
        if isinstance(request, msg.BorrowPoolMsg) or getattr(request, "pool", None) is not None:
            known.insert(0, f"token {self.claimant.token}")
        rank = getattr(request, "rank", 0)
        return str(
            request.engine
            + (f" rank {rank}" if rank else "")
            + (f" ({', '.join(known)})" if known else "")
        )


def claimant(request: Any) -> ev.Claimant:
    """Who borrows KV memory by `request`, or has borrowed it."""
    of: Any = request.pool if isinstance(request, msg.HandBackMsg) else request
    return ev.Claimant(request.engine, request.incarnation, of.token, of.era)


# How long a survivor waits while others are checked before it, one after the other. It keeps
# serving meanwhile, and tries again.
RETURN_MS = 60_000.0
# Newcomers that may wait: eight engines of eight processes; more is a client in a loop.
WAITERS_MAX = 64

P = ParamSpec("P")
R = TypeVar("R", bound=Region)


class Machine(abc.ABC, Generic[R]):
    """Events in, effects out; see the head of this file. A method emits effects by `do`."""

    what: ClassVar[str]  # `weights` or `KV memory`, for sentences
    again: ClassVar[str]  # the verdict that registers a survivor

    def __init__(self, regions: Iterable[R]) -> None:
        self.regions: dict[str, R] = {region.id: region for region in regions}
        self.sessions: dict[int, Session] = {}  # in order of arrival
        self.now_ms = 0.0
        self._effects: list[ev.Effect] = []

    # ------------------------------------------------------------------ in and out

    def handle(
        self, now_ms: float, event: Callable[P, None], *said: P.args, **named: P.kwargs
    ) -> list[ev.Effect]:
        """`event`, a method of the next part, has happened: return what to do."""
        self.now_ms, self._effects = now_ms, []
        event(*said, **named)
        # Survivors first: newcomers wait for what they hand back.
        for session in self._in(S.RETURNING):
            self._judge_survivor(session, session.request)
        self._judge_waiting()
        self._watch()
        return self._effects

    def next_deadline_ms(self) -> float | None:
        """When `deadline_passed` is due next."""
        times = [session.deadline_ms for session in self.sessions.values()]
        return min((t for t in (*times, *self._deadlines()) if t is not None), default=None)

    def is_awaited(self, region_id: str) -> bool:
        """Whether a survivor's memory is wanted: without it, its word is enough."""
        region = self.regions.get(region_id)
        return region is not None and region.phase is RegionPhase.ORPHANED

    def do(self, effect: ev.Effect) -> None:
        self._effects.append(effect)

    def _send(self, session: Session, message: Message) -> None:
        """The answer to the session's request."""
        self.do(ev.SendMessage(session.id, session.take_request_id(), message))

    def record(self, kind: str, message: str, severity: str = "info", **data: Any) -> None:
        self.do(ev.RecordEvent(kind, message, data, severity))

    # ------------------------------------------------------------------ what may happen

    def received(self, event: ev.Received) -> None:
        """A message: for `attach` there is `on_attach`, which takes event and message."""
        what = event.message.TYPE
        on_message = getattr(self, f"on_{what}", None)
        if on_message is None:
            raise ProtocolError("gms.unexpected_message", f"clients do not send {what!r}")
        on_message(event, event.message)

    def closed(self, session_id: int, reason: str = "") -> None:
        """The connection has ended: the process died, or left."""
        session = self.sessions.get(session_id)
        if session is not None:
            session.move("close", self.now_ms)
            self._forget(session, reason or "the session ended")

    def deadline_passed(self) -> None:
        """`next_deadline_ms` has come."""
        self._due()
        for session in list(self.sessions.values()):
            if session.deadline_ms is not None and session.deadline_ms <= self.now_ms:
                self._refuse(session, self._too_late(session))

    def region_free(self, id_: str, copy: ev.JournalRecord | None = None) -> None:
        """No process holds its file; where the watch `ends`, the file is removed. A session may
        still be about to hold it. `copy`: of the host, as for `offload`."""
        region = self.regions.get(id_)
        if region is None:
            return
        region.watch, region.pids = None, ()
        is_coming = region.returning is not None or self.is_held(region)
        if region.phase is RegionPhase.ORPHANED:
            is_coming = region.returning is not None
        if is_coming or region.phase not in (RegionPhase.RETIRED, RegionPhase.ORPHANED):
            return
        was = region.phase
        region.turn("free")
        self.do(ev.Release(region.id))
        self._freed(region, was, copy)

    def holders_seen(self, id_: str, pids: tuple[int, ...]) -> None:
        """The processes that have the file of a watched region open, where visible."""
        if id_ in self.regions:
            self.regions[id_].pids = pids

    def done(
        self, effect: ev.Effect, result: Any = None, error: UnderstudyError | None = None
    ) -> None:
        """The call of `effect` has ended; perhaps after its session."""
        match effect:
            case ev.Release(id_):
                region = self.regions.pop(id_)
                region.turn("end")
                self._ended(region)
            case ev.TakeBack(id_, session_id, message):
                region = self.regions[id_]
                region.returning = None
                if error is None:
                    region.turn("recover")
                    region.slab_sizes = list(message.slab_sizes)
                    self._recovered(region, message, result)
                elif session_id in self.sessions:
                    self._refuse(self.sessions[session_id], error)
            case _:
                self._called(effect, result, error)

    # ------------------------------------------------------------------ what an owner rule says

    @abc.abstractmethod
    def _called(self, effect: ev.Effect, result: Any, error: UnderstudyError | None) -> None:
        """A call has ended that only this kind makes."""

    @abc.abstractmethod
    def _judge_waiting(self) -> None:
        """Judge everybody who waits, in order of arrival."""

    @abc.abstractmethod
    def _deadlines(self) -> Iterable[float | None]:
        """When something besides the sessions is due."""

    def _due(self) -> None:
        """What is due besides the sessions."""

    @abc.abstractmethod
    def _too_late(self, session: Session) -> UnderstudyError:
        """The error of a session whose deadline has passed."""

    @abc.abstractmethod
    def _left(self, session: Session, why: str) -> None:
        """The session is forgotten: give up what it alone kept."""

    @abc.abstractmethod
    def _check_survivor(self, message: msg.HandBackMsg) -> None:
        """Raises: it cannot be what it says."""

    @abc.abstractmethod
    def _judge_survivor(self, session: Session, message: msg.HandBackMsg) -> None:
        """Take its region back, register it, refuse it, or let it wait."""

    @abc.abstractmethod
    def _recovered(self, region: R, offer: msg.HandBackMsg, tensors: int) -> None:
        """What a survivor handed back is served again."""

    def _is_served_watched(self, region: R) -> bool:
        """Whether it must be known when no process holds a region that is served and idle."""
        return False

    def _freed(self, region: R, was: RegionPhase, copy: ev.JournalRecord | None) -> None:
        """No process holds it any more."""

    @abc.abstractmethod
    def _ended(self, region: R) -> None:
        """Its memory is free."""

    # ------------------------------------------------------------------ sessions

    def _in(self, *states: S) -> list[Session]:
        return [session for session in self.sessions.values() if session.state in states]

    @property
    def waiting(self) -> list[Session]:
        return self._in(S.WAITING)

    def holders(self, region: Region) -> list[Session]:
        """The sessions whose process maps `region`, or is about to."""
        return [s for s in self._in(*HOLDERS) if s.region == region.id]

    def is_held(self, region: Region) -> bool:
        return bool(self.holders(region))

    def session(self, event: ev.Received) -> Session:
        """The session of `event`."""
        session = self.sessions.get(event.session)
        if session is None:
            what = event.message.TYPE
            raise ProtocolError("gms.not_attached", f"{what} needs a session: attach first")
        return session

    def _newcomer(self, event: ev.Received) -> Session:
        """The session that this request would open, which must be able to."""
        session = self.sessions.get(event.session) or Session(event.session)
        session.accept(event.message)
        # Survivors are not counted: the others wait for what they bring.
        if not isinstance(event.message, msg.HandBackMsg) and len(self.waiting) >= WAITERS_MAX:
            raise UnderstudyError(
                "gms.too_many_waiters",
                f"{WAITERS_MAX} sessions wait for the {self.what} of this device already, which is "
                "the limit; stop some of them and try again",
            )
        return session

    def _admit(self, session: Session, event: ev.Received, wait_ms: float) -> None:
        """Open it."""
        session.request, session.pid = event.message, event.pid
        session.request_id = event.request_id
        session.move(event.message, self.now_ms)
        session.deadline_ms = self.now_ms + wait_ms
        self.sessions[session.id] = session

    def _wait(self, session: Session, reason: str, message: str) -> None:
        """Tell it why it waits, if that is news."""
        if (session.reason, session.reason_message) != (reason, message):
            session.reason, session.reason_message = reason, message
            waiting = msg.WaitingMsg(reason, message)
            self.do(ev.SendMessage(session.id, session.request_id, waiting))

    def _refuse(self, session: Session, error: UnderstudyError) -> None:
        session.move("refuse", self.now_ms)
        self.do(ev.RefuseRequest(session.id, session.request_id, error))
        self._forget(session, error.message)

    def _forget(self, session: Session, why: str) -> None:
        del self.sessions[session.id]
        self._left(session, why)

    # ------------------------------------------------------------------ regions

    def _in_phase(self, *phases: RegionPhase) -> list[R]:
        return [region for region in self.regions.values() if region.phase in phases]

    def region_of(self, session: Session) -> R:
        region = self.regions.get(session.region or "")
        assert region is not None, f"session {session.id} is {session.state} without a region"
        return region

    def retire(self, region: R) -> None:
        """Take it out of service: its holders keep it until the last leaves, and a process without
        a session may map it, one that has been stopped since a restart."""
        region.turn("retire")
        self.do(ev.MarkRetired(region.id))

    def _may_end(self, region: R) -> bool:
        """Whether the file of a region that is out of service may be removed once it is free."""
        return not self.is_held(region)

    def _watch(self) -> None:
        """Ask the kernel about the files of regions whose end, or next holder, hangs on it."""
        for region in self.regions.values():
            match region.phase:
                case RegionPhase.ORPHANED:
                    wanted = True if region.returning is None else None
                case RegionPhase.RETIRED:
                    wanted = True if self._may_end(region) else None
                case RegionPhase.SERVED:
                    wanted = False if self._is_served_watched(region) else None
                case _:
                    wanted = None
            if wanted is not region.watch:
                region.watch = wanted
                self.do(ev.Watch(region.id, wanted))

    # ------------------------------------------------------------------ survivors

    def on_hand_back(self, event: ev.Received, message: msg.HandBackMsg) -> None:
        """A survivor of an earlier server has reconnected: it maps that region, which is a fact and
        no claim."""
        session = self._newcomer(event)
        self._check_survivor(message)
        self._admit(session, event, RETURN_MS)
        session.region = message.region
        session.reason = "rejoining"
        session.reason_message = f"region {message.region} is being checked"

    def _take_back(self, session: Session, region: R, message: msg.HandBackMsg) -> None:
        """Have its memory checked, if none is; one at a time: if it fails, the next one's is."""
        if all(each.returning is None for each in self.regions.values()):
            region.returning = session.id
            self.do(ev.TakeBack(region.id, session.id, message))

    def _register(self, session: Session) -> None:
        """It holds its region again."""
        session.move(self.again, self.now_ms)
        session.deadline_ms, session.reason, session.reason_message = None, "", ""
        self._send(session, msg.KeptMsg(str(session.region)))
