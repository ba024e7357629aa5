"""What a supervisor asks of one incarnation's backend, and what must be true of the answers: the
wake, the canaries, the rest, and where the weights are.

Owns the serving file and what must be true of it (docs/lock.md, H15 and H18): between waking and
serving every process of the backend holds it, and after a sleep none does. Does not know the
engine's state. A sleep is complete when the *file* is free, not when the backend says so. A helper
that is being forked shares the descriptor for a moment, so a look that finds it held is repeated
until the budget ends the engine.

A waking backend gets its canary over the channel. One that serves behind a gateway gets it through
its private socket, as an HTTP request, which also finds a backend whose HTTP side is stuck. Without
a gateway requests arrive on a socket that other engines have too, and only the channel reaches this
one. Only a verdict in the answer's body ends an HTTP canary: it is repeated until the owner's
patience ends, because a busy machine fails in the same way. If the backend has no such path, or
this process no descriptor, the canary takes the channel.

Requests to release the weights are repeated while something prevents it: a copy that is not made
yet, or another engine that still maps them. Only the tier that is shown waits for it, so what is in
the way is a note.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import msgspec

from engine import messages
from engine.backends import process
from engine.core import events as ev
from engine.core.events import Failed, State, WakingStep
from engine.messages import CanaryMsg, RunCanaryMsg
from engine.schema import EngineLastCanary
from engine.supervisor.channel import BackendChannel
from engine.supervisor.hub import EngineHub
from engine.supervisor.tree import Tree
from lockserver.client import serving
from plumbing import gateway_protocol as hop
from plumbing.errors import is_shortage
from plumbing.service import procfs
from plumbing.service.clock import rfc3339
from plumbing.service.events import EventLog
from plumbing.text import size
from plumbing.wire.fds import OwnedFd
from plumbing.wire.sockets import no_descriptors

# How soon to look at the serving file again: a fork until its exec takes a few milliseconds.
LOOK_AGAIN_MS = 10.0
NOTHING_OVER = 0  # look at the serving file without sealing it: only the lock server does that
# A copy of the weights is made within seconds of the first load. Later, what is in the way may stay
# for hours, and vLLM's workers spin for a second after every question.
AGAIN_MS_MIN = 1_000.0
AGAIN_MS_MAX = 16_000.0


class ServingSession:
    """Of the incarnation `id`, from its launch until it is reaped; posts what its backend did and
    what failed."""

    def __init__(
        self, hub: EngineHub, incarnation: str, channel: BackendChannel, tree: Tree
    ) -> None:
        self.woken: messages.WokenMsg | None = None
        self.is_wake_asked = False
        self.problem: str | None = None  # why what the backend reported does not count yet
        self.note = ""  # why the weights are not away, or their memory is not free
        self.canaries = Canaries(channel, hub.log)
        self._hub, self._incarnation = hub, incarnation
        self._channel, self._tree = channel, tree
        self._path: str | None = None
        self._file: serving.ServingFile | None = None
        self._asked_ms = 0.0
        self._wants_away = False
        self._again_ms = AGAIN_MS_MIN
        self._placings = 0  # requests so far; only the last one's answer counts

    def create(self, directory: str) -> dict[str, str]:
        """Make the serving file; the environment that tells the backend of it.

        Raises:
            OSError: the directory cannot be written, or there is no descriptor.
        """
        self._path, self._file = serving.create(directory, self._incarnation)
        return {
            process.SERVING_ENV: self._path,
            process.SERVING_ID_ENV: f"{self._file.dev}:{self._file.ino}",
        }

    @property
    def is_provable(self) -> bool:
        """Whether the end of serving can be proven while the processes live."""
        return self._file is not None

    def stop(self) -> None:
        """The backend is gone."""
        self._hub.cancel("serving file")
        self._stop_placing()

    def _budget_ms(self, state: State) -> int:
        return self._hub.settings.budgets_ms[state]

    # ------------------------------------------------------------------ waking and serving

    def wake(
        self, token: int, era: str, listener: OwnedFd, private_path: str | None, *, proven: bool
    ) -> None:
        """Takes `listener`, the socket that the backend will accept from; behind a gateway it is
        the private one, at `private_path`. `era` is that of `token`. `proven`: all its processes
        must join the file."""
        self._stop_placing()
        self.is_wake_asked, self.canaries.private_path = True, private_path
        wake = messages.WakeMsg(token, self._hub.settings.engine, era)
        self._channel.ask(
            wake, messages.WokenMsg, lambda woken: self._woke(woken, proven=proven), [listener]
        )

    def _woke(self, woken: messages.WokenMsg, *, proven: bool) -> None:
        self.woken = woken
        data = {"memory": woken.kv_memory, "adopted_blocks": woken.adopted_blocks}
        text = _begun(woken)
        self._hub.log.record("engine.kv_begun", text, data={**data, "note": woken.kv_note or None})
        if woken.torn_blocks:
            self._hub.log.record(
                "engine.kv_torn",
                f"{woken.torn_blocks} KV blocks were not adopted: their bytes are not what was"
                " published",
                "error",
                {"incarnation": self._incarnation, "blocks": woken.torn_blocks},
            )
        if proven:
            self._judge_woken()
        else:
            self._hub.post(ev.Woken())

    def _judge_woken(self) -> None:
        """H15: a process without the file could serve on after a hand-over, unseen."""
        try:
            missing = self._without_file()
        except OSError as error:
            self.problem = no_descriptors("check who holds the serving file", error).message
            self._hub.after("serving file", LOOK_AGAIN_MS, self._judge_woken)
            return
        self.problem = None
        self._hub.post(ev.Woken() if missing is None else Failed("serving_file_missing", missing))

    def _without_file(self) -> str | None:
        assert self._file is not None
        for name, pid in self._tree.pids().items():
            if procfs.is_alive(pid) and not procfs.holds_flock(pid, self._file.dev, self._file.ino):
                return (
                    f"{name} (pid {pid}) of the backend does not hold the serving file, so its end"
                    " of serving could not be proven"
                )
        return None

    def ask(self, step: WakingStep) -> None:
        """The step after the wake."""
        if step is WakingStep.CANARY:
            self.canaries.gate(self._gate)
        elif step is WakingStep.SERVE:
            serve, post = messages.ServeMsg(), self._hub.post
            self._channel.ask(serve, messages.ServingMsg, lambda _: post(ev.Serving()))

    def _gate(self, ok: bool, detail: str) -> None:
        failed = Failed("canary_failed", f"the canary failed: {detail or 'wrong tokens'}")
        self._hub.post(ev.CanaryPassed() if ok else failed)

    def ask_health(self, on_reply: Callable[[messages.HealthyMsg], None]) -> None:
        self._channel.ask(messages.HealthMsg(), messages.HealthyMsg, on_reply)

    # ------------------------------------------------------------------ resting

    def drain(self, *, resume: bool) -> None:
        drain, post = messages.DrainMsg(self._budget_ms(State.DRAINING), resume), self._hub.post
        self._channel.ask(drain, messages.DrainedMsg, lambda _: post(ev.Drained()))

    def rest(self, *, keep_kv: bool) -> None:
        """Ask for all KV memory back; `Rested` comes once no process holds the file."""
        self._asked_ms = self._hub.clock.now_ms()
        rest = messages.RestMsg(keep_kv, self._budget_ms(State.RELEASING))
        self._channel.ask(rest, messages.RestedMsg, lambda reply: self._did(reply, keep_kv))

    def _did(self, rested: messages.RestedMsg, keep_kv: bool) -> None:
        if rested.kv_bytes_resident:
            left = size(rested.kv_bytes_resident)
            self._hub.post(
                Failed("kv_resident", f"the backend sleeps, but still maps {left} of KV")
            )
        else:
            self._judge_rested(keep_kv)

    def _judge_rested(self, keep_kv: bool) -> None:
        self.problem = self._holders()
        if self.problem is not None:
            self._hub.after("serving file", LOOK_AGAIN_MS, lambda: self._judge_rested(keep_kv))
            return
        self.is_wake_asked, self.woken, self.canaries.private_path = False, None, None
        took_ms = round(self._hub.clock.now_ms() - self._asked_ms, 3)
        self._hub.log.record(
            "engine.rested",
            f"all KV memory was freed after {took_ms:.1f} ms",
            data={"incarnation": self._incarnation, "ms": took_ms, "keep_kv": keep_kv},
        )
        self._hub.post(ev.Rested())

    def _holders(self) -> str | None:
        """Why it is not certain that no process holds the file; None if none does."""
        assert self._path is not None
        assert self._file is not None
        name = os.path.basename(self._path)
        match serving.probe(self._path, self._file, NOTHING_OVER):
            case serving.WitnessState.FREE:
                return None
            case serving.WitnessState.HELD:
                pids = procfs.holders_of(self._file.dev, self._file.ino)
                who = f"pid {', '.join(map(str, pids))}" if pids else "a process"
                return f"the backend says that it stopped serving, but {who} still holds {name}"
            case serving.WitnessState.UNSEEN:
                return f"this supervisor has no descriptor left to check {name}"
            case _:
                return f"{name} is missing or was replaced: nothing proves the end of serving"

    # ------------------------------------------------------------------ where the weights are

    def place(self, *, is_away: bool) -> None:
        """Ask for it, and ask again until the memory is free or something else is wanted. It maps
        what a wake would map, so it has the same budget."""
        self._wants_away, self._again_ms = is_away, AGAIN_MS_MIN
        self._ask_to_place()

    def _stop_placing(self) -> None:
        """Stop asking the backend, which is woken or gone."""
        self._wants_away, self.note = False, ""
        self._placings += 1
        self._hub.cancel("placing")

    def _ask_to_place(self) -> None:
        self._placings += 1
        number, budget_ms = self._placings, self._budget_ms(State.WAKING)
        message = messages.PlaceWeightsMsg(self._wants_away, budget_ms)
        reply = messages.WeightsPlacedMsg
        self._channel.ask(message, reply, lambda placed: self._placed(number, placed))
        verb = "released" if self._wants_away else "mapped again"
        spent = Failed(
            "weights_not_placed", f"the weights were not {verb} within {budget_ms / 1000:g} s"
        )
        self._hub.after("placing", budget_ms, lambda: self._hub.post(spent))

    def _placed(self, number: int, placed: messages.WeightsPlacedMsg) -> None:
        if number == self._placings:
            self._hub.cancel("placing")
            self.note = placed.note if self._wants_away else ""
        self._hub.post(ev.WeightsPlaced(placed.is_away))  # which shows the note, too
        if number != self._placings:
            return
        if placed.freed_bytes:
            self._hub.log.record(
                "engine.offloaded",
                f"{size(placed.freed_bytes)} of weights are offloaded to host memory",
                data={"freed_bytes": placed.freed_bytes},
            )
        if self.note:
            self._hub.after("placing", self._again_ms, self._ask_to_place)
            self._again_ms = min(2 * self._again_ms, AGAIN_MS_MAX)


def _begun(woken: messages.WokenMsg) -> str:
    """With what an engine's cache begins."""
    what = f"with {woken.adopted_blocks} blocks of an earlier engine"
    text = f"the KV cache begins {what if woken.adopted_blocks else 'empty'}"
    if woken.kv_memory == "private":
        text += " in private memory, which ends with this engine"
    return f"{text}: {woken.kv_note}" if woken.kv_note else text


Done = Callable[[bool, str], object]
RETRY_S = 0.1


class Canaries:
    """One at a time."""

    def __init__(self, channel: BackendChannel, log: EventLog) -> None:
        self.private_path: str | None = None  # where the backend serves, since it was woken
        self.last: EngineLastCanary | None = None
        self.problem: str | None = None  # why the one that is on its way has no answer yet
        self._channel, self._log = channel, log
        self._by_http: asyncio.Task[None] | None = None  # while it is on its way

    def gate(self, on_done: Done) -> None:
        """The one before the backend serves: call `on_done` with its verdict."""
        self._ask_channel(on_done, is_idle=False)

    def check(self, on_done: Done) -> None:
        """One while the backend serves, and is idle."""
        if self.private_path is None:
            self._ask_channel(on_done, is_idle=True)
            return
        asking = self._ask_by_http(self.private_path, on_done)
        self._by_http = asyncio.get_running_loop().create_task(asking)
        self._by_http.add_done_callback(_check)

    def stop(self) -> None:
        """Nobody waits for the one that is on its way any more."""
        if self._by_http is not None:
            self._by_http.cancel()
        self._by_http = self.problem = None

    def _ask_channel(self, on_done: Done, *, is_idle: bool) -> None:
        def answered(reply: CanaryMsg) -> None:
            self._done(on_done, reply.ok, reply.detail, is_idle=is_idle)

        self._channel.ask(RunCanaryMsg(), CanaryMsg, answered)

    async def _ask_by_http(self, path: str, on_done: Done) -> None:
        while True:
            try:
                verdict = await ask_by_http(path)
            except Unanswered as error:
                self.problem = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            self._by_http = self.problem = None
            if verdict is None:
                self._ask_channel(on_done, is_idle=True)
            else:
                self._done(on_done, verdict.ok, verdict.detail, is_idle=True)
            return

    def _done(self, on_done: Done, ok: bool, detail: str, *, is_idle: bool) -> None:
        verdict = "passed" if ok else "failed"
        event = self._log.record(
            "engine.canary",
            f"canary {verdict}" + (f": {detail}" if detail else ""),
            "info" if ok else "error",
            {"ok": ok, "detail": detail, "is_idle": is_idle},
        )
        self.last = EngineLastCanary(ok, rfc3339(event.ts))
        on_done(ok, detail)


def _check(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()  # raises what only a bug of ours can raise


ANSWER_BYTES_MAX = 65_536  # a verdict has a sentence
NO_SUCH_PATH = frozenset({404, 405, 501})
REQUEST = (
    f"POST {hop.CANARY_PATH} HTTP/1.1\r\nHost: engine\r\n{hop.GATEWAY}: {hop.VERSION}\r\n"
    "Content-Length: 0\r\nConnection: close\r\n\r\n"
).encode()


class Verdict(msgspec.Struct, frozen=True):
    """The body of an answer."""

    ok: bool
    detail: str = ""


class Unanswered(Exception):
    """No verdict, and why not."""


async def ask_by_http(path: str) -> Verdict | None:
    """One attempt; None where this way cannot be taken at all.

    Raises:
        Unanswered: no verdict this time.
    """
    try:
        # Not with a socket of our own: at a timeout uvloop would close it, and so would its object.
        reader, writer = await asyncio.open_unix_connection(path, limit=ANSWER_BYTES_MAX)
    except OSError as error:
        if is_shortage(error):
            return None
        what = "its backlog is full" if isinstance(error, BlockingIOError) else error.strerror
        raise Unanswered(f"cannot connect to {path}: {what}") from error
    try:
        writer.write(REQUEST)
        status, body = await _answer(reader)
    except OSError as error:
        raise Unanswered(f"the connection to {path} broke: {error.strerror}") from error
    finally:
        writer.transport.abort()  # everything was read, or nothing will be
    if status in NO_SUCH_PATH:
        return None
    try:
        return msgspec.json.decode(body, type=Verdict)
    except msgspec.DecodeError as error:
        raise Unanswered(f"{path} answered the canary with HTTP {status}, no verdict") from error


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the answer.

    Raises:
        Unanswered: it ended early, is too long, or is not HTTP.
        OSError: the connection broke.
    """
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        fields = (line.partition(":") for line in lines)
        sizes = [int(value) for name, _, value in fields if name.lower() == "content-length"]
        body_bytes = sizes[0] if sizes else 0
        if body_bytes > ANSWER_BYTES_MAX:
            raise Unanswered(f"the answer to the canary has {body_bytes} bytes")
        version, code, *_ = first.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(version)
        return int(code), await reader.readexactly(body_bytes)
    except asyncio.IncompleteReadError as error:
        raise Unanswered("the backend closed the connection without an answer") from error
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise Unanswered("what the backend answers is not HTTP") from error
