"""One incarnation: its witness, its processes, its channel, its way to the weights.

Owns the translation between what a backend says and does and the events of the lifecycle. Must not
know in which state the engine is. It is over once its last process is reaped *and* the channel's
end has been read: a backend's last words (a checkpoint is broken) often come a moment after its
death has been seen.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

from engine import messages
from engine.backends import process
from engine.core.events import (
    CanaryPassed,
    Drained,
    Event,
    Failed,
    Prepared,
    Serving,
    WakingStep,
    Woken,
)
from engine.core.loading import Leave, Loading
from engine.supervisor import huge_pages
from engine.supervisor.channel import Channel
from engine.supervisor.kv_layout import NAME as KV_LAYOUT
from engine.supervisor.kv_layout import KvLayout
from engine.supervisor.leftovers import Leftovers
from engine.supervisor.settings import Settings
from engine.supervisor.tree import Death, Tree
from lockserver.client import witness
from plumbing.errors import UnderstudyError
from plumbing.service import parent
from plumbing.service.clock import rfc3339
from plumbing.service.events import EventLog
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message

Reply = Callable[[messages.Load], None]

# How soon to look again at a record that another supervisor is just writing; it takes it 0.1 ms.
LAYOUT_RETRY_S = 0.05


class Launch:
    """What a supervisor has of one incarnation, from `start` to `on_gone`."""

    def __init__(
        self,
        settings: Settings,
        incarnation: str,
        *,
        post: Callable[[Event], None],
        log: EventLog,
        leftovers: Leftovers,
        layout: KvLayout,
        on_gone: Callable[[], None],
        on_loader: Callable[[], None],
    ) -> None:
        """`on_loader` is called when the loader lock is wanted or no longer wanted."""
        self.incarnation = incarnation
        self.witness_path: str | None = None
        self.loading = Loading(settings.role)
        self.prepared: messages.Prepared | None = None
        self.fault: messages.FaultReport | None = None
        self.rehearsed_ms: float | None = None
        self.last_canary: dict[str, Any] | None = None
        self.exit: str | None = None
        self.is_wake_asked = False
        self._settings = settings
        self._post = post
        self._log = log
        self._leftovers = leftovers
        self._layout = layout
        self._waits_for_layout = False
        self._on_gone = on_gone
        self._on_loader = on_loader
        self._is_over = False
        self._witness_id = (0, 0)
        self._loads: dict[int, Reply] = {}
        self._theirs: socket.socket | None
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.tree = Tree(self._dying, self._died, self._settle)
        self.channel = Channel(
            ours,
            on_word=self._word,
            on_fault=lambda text: self._post(Failed("backend_fault", text)),
            on_closed=lambda reason: self._settle(),
        )

    # ------------------------------------------------------------------ its life

    def start(self) -> None:
        """Make the witness and start the main process; a failure is an event like any other."""
        theirs, self._theirs = self._theirs, None
        assert theirs is not None
        self._leftovers.starting()
        with theirs:
            try:
                directory = self._settings.directory
                self.witness_path, held = witness.create(directory, self.incarnation)
                with OwnedFd(held):
                    found = os.fstat(held)
                    self._witness_id = (found.st_dev, found.st_ino)
                    environ = self._environment(theirs.fileno())
                    self.tree.start(self._settings.command, environ, held, [theirs.fileno()])
            except UnderstudyError as error:
                self._post(Failed("cannot_start", error.message, error.exit_code))
            except OSError as error:
                text = f"cannot launch: {error.strerror} ({self._settings.directory})"
                self._post(Failed("cannot_start", text))

    def _environment(self, channel_fd: int) -> dict[str, str]:
        settings = self._settings
        return {
            **os.environ,
            **parent.environment(),
            **huge_pages.environment(os.environ),
            process.CHANNEL_ENV: str(channel_fd),
            process.WITNESS_ENV: self.witness_path or "",
            process.INCARNATION_ENV: self.incarnation,
            process.ENGINE_ID_ENV: settings.engine,
            process.ENGINE_SOCKET_ENV: settings.control_path,
            "GMS_SOCKET_DIR": settings.gms_socket_dir,
            "UNDERSTUDY_DIR": settings.directory,
            "UNDERSTUDY_MEMBER": str(settings.member),
            "UNDERSTUDY_MEMBERS": str(settings.members),
        }

    def tick(self) -> None:
        """Once a second: look for processes that have come since, and for what they hold."""
        self.tree.scan()
        is_prepared = self.prepared is not None
        self._leftovers.tick(self.tree.everyone(), is_prepared=is_prepared)

    def kill(self) -> None:
        self.tree.kill()

    def _dying(self, what: str) -> None:
        self._post(Failed("child_exit", what))

    def _died(self, death: Death) -> None:
        self.exit = death.describe()
        self._log.record(
            "engine.child_exit",
            self.exit,
            "info" if self.rehearsed_ms is not None else "warning",
            {
                "child_pid": death.pid,
                "name": death.name,
                "signal": death.signal,
                "exit_code": death.exit_code,
                "incarnation": self.incarnation,
                "is_rehearsed": self.rehearsed_ms is not None,
            },
        )
        if self.fault is None:  # or the process itself has said it better
            self._post(Failed("child_exit", self.exit))

    def _settle(self) -> None:
        if self.tree.is_gone and self.channel.is_closed and not self._is_over:
            self._is_over = True
            self._leftovers.reaped()
            if self._settings.is_remote and self.witness_path is not None:
                witness.discard(self.witness_path, *self._witness_id)  # no server here will
            self._on_gone()

    # ------------------------------------------------------------------ what the backend says

    def _word(self, message: Message) -> None:
        match message:
            case messages.Prepared():
                self.prepared = message
                self._judge()
            case messages.FaultReport():
                self.broken(message)
            case _:
                text = f"the backend said {message.TYPE}, which nobody asked for"
                self._post(Failed("backend_fault", text))

    def broken(self, fault: messages.FaultReport) -> None:
        """The last words of a process of the backend. The first ones count: what follows, from
        its parents, is about losing it."""
        if self.fault is None:
            self._post(self._failed("backend_fault", fault))

    def _failed(self, cause: str, fault: messages.FaultReport) -> Failed:
        self.fault = fault
        self._log.record(
            "engine.fault",
            fault.message,
            "error",
            {"error_code": fault.code, "permanent": fault.permanent},
        )
        return Failed(cause, fault.message, fault.exit_code if fault.permanent else None)

    @property
    def waiting(self) -> str | None:
        """What a launch that is otherwise ready waits for."""
        if not self._waits_for_layout:
            return None
        return f"waiting for another engine to write {KV_LAYOUT}; is its supervisor stopped?"

    def _judge(self) -> None:
        if self._is_over:
            return
        event = self._judge_prepared()
        self._waits_for_layout = event is None
        if event is None:
            asyncio.get_running_loop().call_later(LAYOUT_RETRY_S, self._judge)
        else:
            self._post(event)

    def _judge_prepared(self) -> Event | None:
        """Whether it may stand by: every rank has its weights, every process the witness, and the
        KV cache the size on which the pod's engines agree. None: ask again in a moment."""
        missing = self.loading.missing
        if missing is not None:
            return Failed("weights_missing", f"the backend is prepared, but {missing}")
        objection = self.tree.check_witness(*self._witness_id)
        self._leftovers.look(self.tree.everyone())
        if objection is not None:
            return Failed("witness_missing", objection)
        return self._judge_size()

    def _judge_size(self) -> Event | None:
        assert self.prepared is not None
        before = self._layout.note
        try:
            is_agreed = self._layout.agree(self.prepared.kv_bytes, self.loading.ranks)
        except UnderstudyError as error:
            return self._failed("kv_differs", process.fault_report(error))
        if self._layout.note not in (None, before):
            self._log.record("engine.kv_layout", self._layout.note or "", "warning")
        return Prepared() if is_agreed else None

    def leftover(self, path: str) -> None:
        self._leftovers.told(path)

    # ------------------------------------------------------------------ what it is asked

    def wake(self, token: int, listener: OwnedFd) -> None:
        """Takes `listener`, the socket that the backend will accept from."""
        self.is_wake_asked = True
        self.channel.ask(
            messages.Wake(token, self._settings.engine),
            messages.Woken,
            lambda reply: self._post(Woken()),
            fds=[listener],
        )

    def ask(self, step: WakingStep) -> None:
        if step is WakingStep.CANARY:
            self.run_canary(self._gate, is_idle=False)
        elif step is WakingStep.SERVE:
            self.channel.ask(
                messages.Serve(), messages.Serving, lambda reply: self._post(Serving())
            )

    def _gate(self, ok: bool, detail: str) -> None:
        if ok:
            self._post(CanaryPassed())
        else:
            self._post(Failed("canary_failed", f"the canary failed: {detail or 'wrong tokens'}"))

    def run_canary(self, on_done: Callable[[bool, str], None], *, is_idle: bool) -> None:
        def done(reply: Message) -> None:
            assert isinstance(reply, messages.Canary)
            word = "passed" if reply.ok else "failed"
            event = self._log.record(
                "engine.canary",
                f"canary {word}" + (f": {reply.detail}" if reply.detail else ""),
                "info" if reply.ok else "error",
                {"ok": reply.ok, "detail": reply.detail, "is_idle": is_idle},
            )
            self.last_canary = {"ok": reply.ok, "at": rfc3339(event.ts)}
            on_done(reply.ok, reply.detail)

        self.channel.ask(messages.RunCanary(), messages.Canary, done)

    def ask_health(self, on_reply: Callable[[messages.Healthy], None]) -> None:
        def answered(reply: Message) -> None:
            assert isinstance(reply, messages.Healthy)
            on_reply(reply)

        self.channel.ask(messages.Health(), messages.Healthy, answered)

    def drain(self, budget_ms: int) -> None:
        self.channel.ask(
            messages.Drain(budget_ms),
            messages.Drained,
            lambda reply: self._post(Drained()),
        )

    # ------------------------------------------------------------------ the way to the weights

    def may_load(self, rank: int, ranks: int, reply: Reply) -> None:
        """Call `reply` once `rank` may go to the weights."""
        self._loads[rank] = reply
        leaves = self.loading.asked(rank, ranks)
        self._on_loader()
        self._let_go(leaves)

    def loader_granted(self, token: int) -> None:
        leaves = self.loading.granted(token)
        self._on_loader()
        self._let_go(leaves)

    def attached(self, rank: int, identity: dict[str, Any]) -> None:
        objection = self.loading.attached(rank, identity)
        if objection is not None:
            self._post(Failed("identity_mismatch", objection))
        self._on_loader()

    def _let_go(self, leaves: list[Leave]) -> None:
        for leave in leaves:
            self._loads.pop(leave.rank)(messages.Load(leave.mode, leave.token))
