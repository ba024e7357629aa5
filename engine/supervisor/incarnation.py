"""One incarnation: its witness and its serving file, its processes, its access to the weights, and
what its backend is asked: the wake, the drain, the rest, and where the weights are.

Owns the translation between what a backend reports and does and the events of the lifecycle, and
what must be true of its answers (docs/lock.md, H15 and H18): a standby's processes hold the
witness, between waking and serving all of them hold the serving file, and after a sleep none does.
Must not know in which state the engine is. It is over once its last process is reaped.

A sleep is complete when the *file* is free, not when the backend says so. A helper that is being
forked shares the descriptor for a moment, so a look that finds it held is repeated until the budget
ends the engine. Requests to release the weights are repeated while something prevents it: a copy
that is not made yet, or another engine that still maps them. Only the tier that is shown waits for
it, so what is in the way is a note.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from engine import messages
from engine.backends import process
from engine.backends.process import MODEL_ENV
from engine.core import events as ev
from engine.core.events import EngineEvent, Failed, State
from engine.core.health import StoppedLooks
from engine.core.loading import Loading
from engine.schema import EngineLastCanary
from engine.supervisor import leftovers
from engine.supervisor.hub import EngineHub, shortage
from engine.supervisor.tree import ProcessDeath, Tree
from lockserver.client import serving, witness
from plumbing.errors import DISK, ProtocolError, UnderstudyError, is_disk_fault
from plumbing.pod.paths import loader_lock
from plumbing.service import procfs
from plumbing.service.clock import rfc3339
from plumbing.service.files import open_locked
from plumbing.service.process import parent_environment
from plumbing.text import size
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message

LoadReply = Callable[[messages.LoadMsg], None]
Reply = TypeVar("Reply", bound=Message)

# How soon to look again at what the backend's processes hold: a fork takes milliseconds to exec.
LOOK_AGAIN_MS = 10.0
LOADER_POLL_MS = 50.0  # while another engine loads, which takes seconds
NOTHING_OVER = 0  # look at the serving file without sealing it: only the lock server does that
# A copy of the weights is made within seconds of the first load. Later, what is in the way may stay
# for hours, and vLLM's workers spin for a second after every question.
AGAIN_MS_MIN = 1_000.0
AGAIN_MS_MAX = 16_000.0

# Asks glibc to back malloc with huge pages (madvise, which the kernel's usual setting allows; "The
# GNU C Library", Memory Allocation Tunables; another libc ignores it). The fence waits for the
# kernel to free the old engine's memory: four processes that have imported vLLM, 430 MB each, are
# gone 120 to 145 ms after they are killed together on two cores, and after 70 to 85 ms with huge
# pages. That costs 2 MB per process. Python's own arenas, the other half, would need
# PYTHONMALLOC=malloc, which makes every start 15 % slower; vLLM's processes move them when they are
# prepared (`backends/process_memory.py`).
TUNABLES_ENV = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb"


def huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to a backend's environment; none where the user has already chosen."""
    given = environ.get(TUNABLES_ENV, "")
    if HUGE_PAGES in given:
        return {}
    return {TUNABLES_ENV: f"{given}:{HUGE_PAGES}=1" if given else f"{HUGE_PAGES}=1"}


class Incarnation:
    """What a supervisor has of the incarnation `id`, from `start` to `on_gone`."""

    def __init__(
        self,
        hub: EngineHub,
        incarnation_id: str,
        *,
        temporary: str,
        failures: int,
        on_gone: Callable[[], None],
    ) -> None:
        """`temporary`: where its processes have their temporary files. `failures`: launches before
        it that failed in a row."""
        self.id = incarnation_id
        self.witness_path: str | None = None
        self.witness_id = (0, 0)
        self.loading = Loading(hub.settings.role)
        self.prepared: messages.PreparedMsg | None = None
        self.fault: messages.FaultReportMsg | None = None
        self.rehearsed_ms: float | None = None
        self.exit: str | None = None
        self.machine_fault = ""  # why it ends, if that is not its own fault
        self.waiting: str | None = None  # why what the backend reported does not count yet
        self.problem: str | None = None  # why not every process of the tree is known
        self.woken: messages.WokenMsg | None = None
        self.is_wake_asked = False
        self.note = ""  # why the weights are not away, or their memory is not free
        self._hub, self._settings = hub, hub.settings
        self._temporary, self._failures = temporary, failures
        self._on_gone = on_gone
        self.loader = LoaderLock(hub.settings.gms_socket_dir, hub.settings.model)
        self.loads: list[LoadReply] = []  # of the ranks that wait for their turn
        self.tree = Tree(self._dying, self._died, self._gone)
        self.channel = BackendChannel(
            on_message=self._received,
            on_fault=functools.partial(self._fail, "backend_fault"),
            on_closed=self._channel_closed,
        )
        self.private_path: str | None = None  # where the backend serves, since it was woken
        self.last_canary: EngineLastCanary | None = None
        self.canary_ms = 0.0  # when that had its verdict
        self._stopped = StoppedLooks()
        self._serving_path = ""
        self._serving: serving.ServingFile | None = None
        self._drained_ms = 0.0
        self._wants_away = False
        self._again_ms = AGAIN_MS_MIN
        self._placings = 0  # requests so far; only the last one's answer counts

    # ------------------------------------------------------------------ its life

    def start(self) -> None:
        """Make channel and witness and start the main process; a failure is an event like any
        other."""
        try:
            self._start()
        except UnderstudyError as error:
            self._hub.post(Failed("cannot_start", error.message, error.exit_code))
        except OSError as error:
            what = f"launch the backend with {self._settings.directory}"
            self._fail("cannot_start", shortage(what, error), is_disk_fault(error))

    def _start(self) -> None:
        settings = self._settings
        guard = settings.control_path.removesuffix(".sock") + ".lock"
        leftovers.remake(self._temporary, guard)
        with self.channel.open() as backend_end:
            self.witness_path, held = witness.create(settings.directory, self.id)
            with OwnedFd(held):
                found = os.fstat(held)
                self.witness_id = (found.st_dev, found.st_ino)
                environ = self._environment(backend_end.fileno())
                if not settings.is_remote:  # only a lock server on this host can try it
                    self._serving_path, file = serving.create(settings.directory, self.id)
                    self._serving = file
                    environ[process.SERVING_ENV] = self._serving_path
                    environ[process.SERVING_ID_ENV] = f"{file.dev}:{file.ino}"
                self.tree.start(settings.command, environ, held, [backend_end.fileno()])

    def _environment(self, channel: int) -> dict[str, str]:
        settings = self._settings
        return {
            **os.environ,
            **parent_environment(),
            **huge_pages(os.environ),
            process.CHANNEL_ENV: str(channel),
            process.WITNESS_ENV: self.witness_path or "",
            process.INCARNATION_ENV: self.id,
            process.ENGINE_ID_ENV: settings.engine,
            process.FAILURES_ENV: str(self._failures),
            process.ENGINE_SOCKET_ENV: settings.control_path,
            **({MODEL_ENV: settings.model} if settings.model else {}),
            "GMS_SOCKET_DIR": settings.gms_socket_dir,
            "UNDERSTUDY_DIR": settings.directory,
            "TMPDIR": self._temporary,
        }

    def tick(self, *, is_asked: bool) -> None:
        """Once a second, look for new processes. Unless the health check asks the backend, look for
        stopped ones, too."""
        try:
            self.tree.scan()
            stopped = [] if is_asked else self.tree.stopped()
            self.problem = None
        except OSError as error:
            stopped, self.problem = [], shortage("look for processes of the backend", error)
        verdict = self._stopped.looked(stopped)
        if verdict is not None:
            self._hub.post(Failed("stopped", verdict))

    def _dying(self, what: str) -> None:
        self._hub.post(Failed("child_exit", what))

    def _died(self, death: ProcessDeath) -> None:
        self.exit, is_rehearsed = death.describe(), self.rehearsed_ms is not None
        self._hub.log.record(
            "engine.child_exit",
            self.exit,
            "info" if is_rehearsed else "warning",
            {
                "child_pid": death.pid,
                "name": death.name,
                "signal": death.signal,
                "exit_code": death.code if death.signal is None else None,
                "incarnation": self.id,
                "is_rehearsed": is_rehearsed,
            },
        )
        if self.fault is None:  # a fault report explains it better
            self._hub.post(Failed("child_exit", self.exit))

    def _channel_closed(self, reason: str) -> None:
        text = f"the channel to the backend was closed: {reason}"
        self._hub.log.record("engine.channel", text, "debug", {"incarnation": self.id})

    def _gone(self) -> None:
        self.channel.close()
        if self._settings.is_remote and self.witness_path is not None:
            with contextlib.suppress(OSError):  # then the next supervisor does
                witness.discard(self.witness_path, *self.witness_id)  # no server here will
        self._hub.cancel("look", "loader")
        self.loader.leave()
        self._stop_placing()
        self._on_gone()

    def _fail(self, cause: str, text: str, is_machine: bool, code: str = "") -> None:
        self.machine_fault = text if is_machine else self.machine_fault
        exit_code = 1 if code in process.PERMANENT else None
        self._hub.post(Failed(ev.MACHINE_FAULT if is_machine else cause, text, exit_code))

    # ------------------------------------------------------------------ what the backend reports

    def _received(self, message: Message) -> None:
        match message:
            case messages.PreparedMsg():
                self.prepared = message
                self._judge(self._look_prepared)
            case messages.DrainedMsg():
                self._drained(message)
            case _:
                text = f"the backend sent {message.TYPE} without a request"
                self._hub.post(Failed("backend_fault", text))

    def broken(self, fault: messages.FaultReportMsg) -> None:
        """A process of the backend reports why it ends. The first report counts: those that follow,
        from its parents, are about losing it."""
        if self.fault is None:
            self._hub.post(self._failed("backend_fault", fault))

    def _failed(self, cause: str, fault: messages.FaultReportMsg) -> Failed:
        self.fault = fault
        data = {"error_code": fault.code, "permanent": fault.permanent}
        self._hub.log.record("engine.fault", fault.message, "error", data)
        if fault.is_machine:
            cause, self.machine_fault = ev.MACHINE_FAULT, fault.message
        return Failed(cause, fault.message, fault.exit_code if fault.permanent else None)

    @property
    def can_rest(self) -> bool:
        """Whether it can give its KV memory back and be woken again, which must be provable."""
        return self.prepared is not None and self.prepared.can_rest and self._serving is not None

    def _judge(self, look: Callable[[], EngineEvent | str]) -> None:
        """Post what `look` finds. A string is what it waits for, and there is another look soon;
        also where there is no memory to look, which proves nothing."""
        try:
            found = look()
        except OSError as error:
            found = shortage("check what the backend's processes hold", error)
        self.waiting = found if isinstance(found, str) else None
        if isinstance(found, str):
            self._hub.after("look", LOOK_AGAIN_MS, lambda: self._judge(look))
        else:
            self._hub.post(found)

    def _look_prepared(self) -> EngineEvent | str:
        """Whether it may stand by: every rank has its weights, every process holds the witness."""
        missing = self.loading.missing
        if missing is not None:
            return Failed("weights_missing", f"the backend is prepared, but {missing}")
        objection = self.tree.check_witness(*self.witness_id)
        if objection is not None:
            return Failed("witness_missing", objection)
        assert self.prepared is not None
        return ev.Prepared(self.can_rest, self.can_rest and not self.prepared.cannot_offload)

    # ------------------------------------------------------------------ access to the weights

    def may_load(self, ranks: int, reply: LoadReply) -> None:
        """Call `reply` once a rank, one of `ranks`, may load its weights."""
        self.loads.append(reply)
        self.loading.asked(ranks)
        self._settle_loader()

    def attached(self, rank: int, identity: dict[str, Any], place: str = "") -> None:
        objection = self.loading.attached(rank, identity, place)
        if objection is not None:
            self._hub.post(Failed("identity_mismatch", objection))
        self._settle_loader()

    def _settle_loader(self) -> None:
        """Hold the loader lock while it is wanted; while another engine has it, look again."""
        is_wanted = self.loading.wants_loader
        has_loader = is_wanted and self.loader.take()
        if not is_wanted:
            self.loader.leave()
        elif not has_loader:
            self._hub.after("loader", LOADER_POLL_MS, self._settle_loader)
        while self.loads and self.loading.is_permitted(has_loader=has_loader):
            self.loads.pop(0)(messages.LoadMsg(self.loading.mode))

    def _budget_ms(self, state: State) -> int:
        return self._settings.budgets_ms[state]

    # ------------------------------------------------------------------ waking and serving

    def wake(self, token: int, era: str, listener: OwnedFd, private_path: str | None) -> None:
        """Takes `listener`, the socket that the backend will accept from; behind a gateway it is
        the private one, at `private_path`. `era` is that of `token`."""
        self._stop_placing()
        self.is_wake_asked, self.private_path = True, private_path
        wake = messages.WakeMsg(token, era)
        self.channel.ask(wake, messages.WokenMsg, self._woke, [listener])

    def _woke(self, woken: messages.WokenMsg) -> None:
        self.woken = woken
        data = {"memory": woken.kv_memory, "adopted_blocks": woken.adopted_blocks}
        text = _begun(woken)
        self._hub.log.record("engine.kv_begun", text, data={**data, "note": woken.kv_note or None})
        if self.can_rest:
            self._judge(self._look_woken)
        else:
            self._hub.post(ev.Woken())

    def _look_woken(self) -> EngineEvent | str:
        """H15: a process without the file could serve on after a hand-over, unseen."""
        assert self._serving is not None
        for name, pid in self.tree.pids().items():
            file = self._serving.dev, self._serving.ino
            if procfs.is_alive(pid) and not procfs.holds_flock(pid, *file):
                return Failed(
                    "serving_file_missing",
                    f"{name} (pid {pid}) of the backend does not hold the serving file, so its end"
                    " of serving could not be proven",
                )
        return ev.Woken()

    def serve(self) -> None:
        """Have it serve once its canary has passed."""
        self._judge_canary(messages.ServeMsg(), self._gate)

    def canary(self, on_done: Callable[[bool, str], object]) -> None:
        """One real inference: call `on_done` with its verdict."""
        self._judge_canary(messages.RunCanaryMsg(), on_done)

    def _judge_canary(self, request: Message, on_done: Callable[[bool, str], object]) -> None:

        def done(found: messages.CanaryMsg) -> None:
            self.canary_ms = found.mono_ms
            text = f"canary {'passed' if found.ok else 'failed'}"
            text += f": {found.detail}" if found.detail else ""
            data = {"ok": found.ok, "detail": found.detail}
            severity = "info" if found.ok else "error"
            event = self._hub.log.record("engine.canary", text, severity, data)
            self.last_canary = EngineLastCanary(found.ok, rfc3339(event.ts))
            on_done(found.ok, found.detail)

        self.channel.ask(request, messages.CanaryMsg, done)

    def _gate(self, ok: bool, detail: str) -> None:
        failed = Failed("canary_failed", f"the canary failed: {detail or 'wrong tokens'}")
        self._hub.post(ev.Serving() if ok else failed)

    # ------------------------------------------------------------------ resting

    def drain(self, *, resume: bool, rest: bool, keep_kv: bool) -> None:
        """`rest`: then have it give all KV memory back; `Rested` comes once no process holds the
        file."""
        release_ms = self._budget_ms(State.RELEASING) if rest else None
        drain = messages.DrainMsg(self._budget_ms(State.DRAINING), resume, release_ms, keep_kv)
        if rest:
            self.channel.ask(drain, messages.RestedMsg, lambda reply: self._did(reply, keep_kv))
        else:
            self.channel.ask(drain, messages.DrainedMsg, self._drained)

    def _drained(self, drained: messages.DrainedMsg) -> None:
        self._drained_ms = self._hub.clock.now_ms()
        self._hub.post(ev.Drained())

    def _did(self, rested: messages.RestedMsg, keep_kv: bool) -> None:
        if rested.kv_bytes_resident:
            left = size(rested.kv_bytes_resident)
            text = f"the backend sleeps, but still maps {left} of KV"
            self._hub.post(Failed("kv_resident", text))
        else:
            self._judge(lambda: self._look_rested(keep_kv))

    def _look_rested(self, keep_kv: bool) -> EngineEvent | str:
        """H18: it is over once it is certain that no process holds the file."""
        assert self._serving is not None
        name = os.path.basename(self._serving_path)
        match serving.probe(self._serving_path, self._serving, NOTHING_OVER):
            case serving.WitnessState.HELD:
                pids = procfs.holders_of(self._serving.dev, self._serving.ino)
                who = f"pid {', '.join(map(str, pids))}" if pids else "a process"
                return f"the backend says that it stopped serving, but {who} still holds {name}"
            case serving.WitnessState.FREE:
                pass
            case found:
                return f"{name} is {found.value}: nothing proves the end of serving yet"
        self.is_wake_asked, self.woken, self.private_path = False, None, None
        took_ms = round(self._hub.clock.now_ms() - self._drained_ms, 3)
        self._hub.log.record(
            "engine.rested",
            f"all KV memory was freed after {took_ms:.1f} ms",
            data={"incarnation": self.id, "ms": took_ms, "keep_kv": keep_kv},
        )
        return ev.Rested()

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
        self.channel.ask(message, reply, lambda placed: self._placed(number, placed))
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


class LoaderLock:
    """The right to write the weights of one model: a file beside the memory service's sockets that
    one engine has locked. The kernel unlocks it when that engine's supervisor ends."""

    def __init__(self, directory: str, model: str) -> None:
        self.problem = ""  # why it is not ours
        self._path = loader_lock(directory, model)
        self._held: OwnedFd | None = None

    def take(self) -> bool:
        """Hold it, unless another engine does; repeated calls do nothing."""
        if self._held is None:
            try:
                self._held = OwnedFd(open_locked(self._path, os.O_CREAT))
            except BlockingIOError:
                self.problem = "another engine is loading"
            except OSError as error:
                self.problem = shortage(f"lock {self._path}", error)
        return self._held is not None

    def leave(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def _begun(woken: messages.WokenMsg) -> str:
    """With what an engine's cache begins."""
    what = f"with {woken.adopted_blocks} blocks of an earlier engine"
    text = f"the KV cache begins {what if woken.adopted_blocks else 'empty'}"
    if woken.kv_memory == "private":
        text += " in private memory, which ends with this engine"
    return f"{text}: {woken.kv_note}" if woken.kv_note else text


class BackendChannel(Handler):
    """The socketpair to the backend, and our end of it: requests, replies, unsolicited messages.

    Owns request ids, and does not know what a reply means. Its end is not a death, which pidfds
    report. Callbacks run on the loop: `on_message` for unsolicited messages, `on_closed` once, with
    the reason."""

    def __init__(
        self,
        *,
        on_message: Callable[[Message], None],
        on_fault: Callable[[str, bool, str], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """`on_fault` gets errors, and replies of the wrong type, as a sentence, whether that is
        the machine's fault, and the code."""
        self._on_message = on_message
        self._on_fault = on_fault
        self._on_closed = on_closed
        self._ids = itertools.count(1)
        self._asked: dict[int, tuple[Message, type[Message], Callable[[Any], object]]] = {}
        self._conn: Connection | None = None

    def open(self) -> socket.socket:
        """Make the channel; the result is the backend's end, which the caller owns.

        Raises:
            OSError: there is no descriptor or memory for it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(theirs.close)
            self._conn = Connection(ours, messages.CHANNEL, self)
            undo.pop_all()
        return theirs

    def close(self) -> None:
        """Hear nothing more from a backend that is gone."""
        if self._conn is not None:
            self._conn.close("the backend is gone")

    def ask(
        self,
        message: Message,
        reply: type[Reply],
        on_reply: Callable[[Reply], object],
        fds: Sequence[OwnedFd] = (),
    ) -> None:
        """Send `message` (takes `fds`) and call `on_reply` with the reply that it must have."""
        assert self._conn is not None
        request_id = next(self._ids)
        self._asked[request_id] = (message, reply, on_reply)
        self._conn.send(message, request_id, fds)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)  # no message of the backend carries any
        if request_id and request_id not in self._asked:
            raise ProtocolError("engine.unasked_answer", f"there is no request {request_id}")
        asked = self._asked.pop(request_id) if request_id else None
        if isinstance(message, FaultMsg):
            did = f"failed at {asked[0].TYPE}" if asked is not None else "gave up"
            text = f"the backend {did}: {message.message} [{message.code}]"
            self._on_fault(text, bool(message.details.get(DISK)), message.code)
        elif asked is None:
            self._on_message(message)
        elif not isinstance(message, asked[1]):
            text = f"the backend replied to {asked[0].TYPE} with {message.TYPE}"
            self._on_fault(text, False, "")
        else:
            asked[2](message)

    def closed(self, conn: Connection, reason: str) -> None:
        self._on_closed(reason)
