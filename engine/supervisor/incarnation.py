"""One incarnation: its witness, its processes, its channel, its access to the weights.

Owns the translation between what a backend reports and does and the events of the lifecycle. Must
not know in which state the engine is. It is over once its last process is reaped *and* the end of
the channel has been read: a backend's fault report (a checkpoint is broken) often arrives a moment
after its death has been seen.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from engine import messages
from engine.backends import process
from engine.backends.process import MODEL_ENV, PROGRESS_ENV, ProgressPage
from engine.core import events as ev
from engine.core.events import EngineEvent, Failed
from engine.core.health import ParkedHealth
from engine.core.loading import Loading, LoadPermit
from engine.supervisor.channel import BackendChannel
from engine.supervisor.cpu_share import CpuShare
from engine.supervisor.hub import EngineHub
from engine.supervisor.kv_layout import KvLayout
from engine.supervisor.leftovers import Leftovers
from engine.supervisor.serving_session import ServingSession
from engine.supervisor.tree import ProcessDeath, Tree
from lockserver.client import witness
from plumbing.errors import UnderstudyError, is_disk_fault
from plumbing.service.process import parent_environment
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from plumbing.wire.sockets import no_descriptors

LoadReply = Callable[[messages.LoadMsg], None]

# How soon to check a prepared backend again. Another supervisor's writing takes 0.1 ms, a shortage
# of descriptors longer.
JUDGE_RETRY_MS = 50.0

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
        leftovers: Leftovers,
        layout: KvLayout,
        cpus: CpuShare,
        on_gone: Callable[[], None],
        on_loader: Callable[[], None],
    ) -> None:
        """`on_loader` is called when the loader lock is wanted or no longer wanted."""
        self.id = incarnation_id
        self.witness_path: str | None = None
        self.witness_id = (0, 0)
        self.loading = Loading(hub.settings.role)
        self.prepared: messages.PreparedMsg | None = None
        self.fault: messages.FaultReportMsg | None = None
        self.rehearsed_ms: float | None = None
        self.exit: str | None = None
        self.machine_fault = ""  # why it ends, if that is not its own fault
        self.cpus = cpus
        self.waiting: str | None = None  # what it waits for although the backend is prepared
        self.progress = ProgressPage()
        self._hub, self._settings = hub, hub.settings
        self._leftovers, self._layout = leftovers, layout
        self._on_gone, self._on_loader = on_gone, on_loader
        self._is_over = False
        self._loads: dict[int, LoadReply] = {}
        self.tree = Tree(self._dying, self._died, self._settle)
        self.channel = BackendChannel(
            on_message=self._received,
            on_fault=functools.partial(self._fail, "backend_fault"),
            on_closed=self._channel_closed,
        )
        self.session = ServingSession(hub, incarnation_id, self.channel, self.tree)
        self._parked = ParkedHealth()

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
            self._fail("cannot_start", no_descriptors(what, error).message, is_disk_fault(error))

    def _start(self) -> None:
        settings = self._settings
        self._leftovers.starting()
        self.progress, progress_end = ProgressPage.create()
        with progress_end or contextlib.nullcontext(), self.channel.open() as backend_end:
            self.witness_path, held = witness.create(settings.directory, self.id)
            with OwnedFd(held):
                found = os.fstat(held)
                self.witness_id = (found.st_dev, found.st_ino)
                lent = {process.CHANNEL_ENV: backend_end.fileno()}
                if progress_end is not None:
                    lent[PROGRESS_ENV] = progress_end.fileno()
                environ = self._environment(lent)
                if not settings.is_remote:  # only a lock server on this host can try it
                    environ |= self.session.create(settings.directory)
                with self.cpus.inherited():
                    self.tree.start(settings.command, environ, held, [*lent.values()])

    def _environment(self, lent: Mapping[str, int]) -> dict[str, str]:
        settings = self._settings
        return {
            **os.environ,
            **parent_environment(),
            **huge_pages(os.environ),
            **self.cpus.environment,
            **{variable: str(fd) for variable, fd in lent.items()},
            process.WITNESS_ENV: self.witness_path or "",
            process.INCARNATION_ENV: self.id,
            process.ENGINE_ID_ENV: settings.engine,
            process.ENGINE_SOCKET_ENV: settings.control_path,
            **({MODEL_ENV: settings.model} if settings.model else {}),
            "GMS_SOCKET_DIR": settings.gms_socket_dir,
            "UNDERSTUDY_DIR": settings.directory,
        }

    def tick(self, *, is_parked: bool) -> None:
        """Once a second: look for new processes, for what they hold, and whether they run."""
        self.tree.scan()
        self._leftovers.tick(self.tree.everyone(), is_prepared=self.prepared is not None)
        verdict = self._parked.looked(self.tree.stopped() if is_parked else ())
        if verdict is not None:
            self._hub.post(Failed("stopped", verdict.reason))

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
                "exit_code": death.exit_code,
                "incarnation": self.id,
                "is_rehearsed": is_rehearsed,
            },
        )
        if self.fault is None:  # a fault report explains it better
            self._hub.post(Failed("child_exit", self.exit))

    def _channel_closed(self, reason: str) -> None:
        text = f"the channel to the backend was closed: {reason}"
        self._hub.log.record("engine.channel", text, "debug", {"incarnation": self.id})
        self._settle()

    def _settle(self) -> None:
        if self.tree.is_gone and self.channel.is_closed and not self._is_over:
            self._is_over = True
            self._leftovers.reaped()
            if self._settings.is_remote and self.witness_path is not None:
                with contextlib.suppress(OSError):  # then the next supervisor does
                    witness.discard(self.witness_path, *self.witness_id)  # no server here will
            self._hub.cancel("prepared")
            self.session.stop()
            self._on_gone()
            self.progress.close()

    def _fail(self, cause: str, text: str, is_machine: bool) -> None:
        self.machine_fault = text if is_machine else self.machine_fault
        self._hub.post(Failed(ev.MACHINE_FAULT if is_machine else cause, text))

    # ------------------------------------------------------------------ what the backend reports

    def _received(self, message: Message) -> None:
        match message:
            case messages.PreparedMsg():
                self.prepared = message
                self._judge()
            case messages.FaultReportMsg():
                self.broken(message)
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
        return self.prepared is not None and self.prepared.can_rest and self.session.is_provable

    def _judge(self) -> None:
        verdict = self._judge_prepared()
        self.waiting = verdict if isinstance(verdict, str) else None
        if isinstance(verdict, str):
            self._hub.after("prepared", JUDGE_RETRY_MS, self._judge)
        else:
            self._hub.post(verdict)

    def _judge_prepared(self) -> EngineEvent | str:
        """Whether it may stand by: every rank has its weights, every process holds the witness, and
        the KV cache has the size on which the pod's engines agree. A string: what it waits for."""
        missing = self.loading.missing
        if missing is not None:
            return Failed("weights_missing", f"the backend is prepared, but {missing}")
        try:
            objection = self.tree.check_witness(*self.witness_id)
        except OSError as error:
            return no_descriptors("check who holds the witness", error).message
        if objection is not None:
            return Failed("witness_missing", objection)
        assert self.prepared is not None
        before = self._layout.note
        try:
            is_agreed = self._layout.agree(self.prepared.kv_bytes, self.loading.ranks)
        except UnderstudyError as error:
            return self._failed("kv_differs", process.fault_report(error))
        if self._layout.note not in (None, before):
            self._hub.log.record("engine.kv_layout", self._layout.note or "", "warning")
        can_offload = self.can_rest and self.prepared.can_offload
        return ev.Prepared(self.can_rest, can_offload) if is_agreed else self._layout.waits_for

    # ------------------------------------------------------------------ access to the weights

    def may_load(self, rank: int, ranks: int, reply: LoadReply) -> None:
        """Call `reply` once `rank` may load its weights."""
        self._loads[rank] = reply
        self._permit(self.loading.asked(rank, ranks))

    def loader_granted(self, token: int) -> None:
        self._permit(self.loading.granted(token))

    def attached(self, rank: int, identity: dict[str, Any], place: str = "") -> None:
        objection = self.loading.attached(rank, identity, place)
        if objection is not None:
            self._hub.post(Failed("identity_mismatch", objection))
        self._on_loader()

    def _permit(self, permits: list[LoadPermit]) -> None:
        self._on_loader()
        for permit in permits:
            self._loads.pop(permit.rank)(messages.LoadMsg(permit.mode, permit.token))
