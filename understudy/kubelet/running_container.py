"""One container and its process: started, probed, stopped, restarted.

`containers.py` has the rules. Signals go only to children not reaped yet, so never to a recycled
pid. Children die with the runner: they get its pid in UNDERSTUDY_PARENT_PID and ask the kernel to
be killed when it exits, or `enter_namespace.py` does so for them.

The surprising thing: during the *first* start an exit with a code (not by a signal) is final,
because a retry does not cure a bad flag, and the user waits for the error. For the same reason the
runner's deadline ends a first start, not its startup probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping

from plumbing.part.format import duration
from plumbing.service.init import FIRST_START_ENV, RESTARTS_ENV
from plumbing.service.process import parent_environment
from plumbing.service.procfs import children, environment_of, is_alive
from understudy.kubelet import namespaces
from understudy.kubelet.containers import (
    Backoff,
    Container,
    ContainerHealth,
    Kind,
    Question,
    grace_left_s,
    is_yes,
)
from understudy.kubelet.http_get import HttpReply, get
from understudy.kubelet.log import ContainerLog

ASK_AGAIN_S = 0.05  # an interpreter installs its handlers within some 0.1 s

# Prefixes of our settings.
OURS = ("UNDERSTUDY_", "ENGINE_", "LOCKSERVER_", "GMS_")


class RunningContainer:
    """A container that is kept running from `start` to `stop`."""

    def __init__(
        self, container: Container, log: ContainerLog, after_end: Callable[[], None] = lambda: None
    ) -> None:
        """`after_end` is called whenever its process has exited and was reaped."""
        self.container = container
        self.log = log
        self._after_end = after_end
        self.is_starting = False  # a process is being created, its pid not known yet
        self._restarts = 0  # of its first process
        self._program_restarts = 0  # by the present init, as far as seen
        self._earlier_restarts = 0  # by the inits before it
        # In any of its lives; without a startup probe, as soon as it is started.
        self.was_up = container.startup is None and container.kind is not Kind.INIT
        self.ended = "has not started"
        self.exit_code: int | None = None
        self.last_reply = HttpReply(0, reason="not probed yet")  # of its startup probe
        self.settled = asyncio.Event()  # it is up, or was given up
        if self.was_up:
            self.settled.set()
        self.is_given_up = False
        self.health = ContainerHealth(container.probes)
        self._stopping = asyncio.Event()
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def first(self) -> int | None:
        """The container's first process, while it lives."""
        process = self._process
        if process is None or process.returncode is not None:
            return None
        if self.container.has_pid_namespace:
            return namespaces.first_process(process.pid)
        return process.pid

    @property
    def pid(self) -> int | None:
        """The container's program, while it lives: the first process, or init's eldest child. Init
        has no other child when it starts the program; orphans come later."""
        first = self.first
        if first is None or not self.container.init:
            return first
        return next((pid for pid in children(first) if is_alive(pid)), None)

    @property
    def restarts(self) -> int:
        """How often its program was restarted, by its init or with the whole container."""
        pid = self.pid if self.container.init else None
        if pid is not None:
            count = environment_of(pid).get(RESTARTS_ENV, "")
            self._program_restarts = int(count or self._program_restarts)
        return self._restarts + self._earlier_restarts + self._program_restarts

    @property
    def child(self) -> int | None:
        """Our child to wait for: the first process, or the one outside its namespace."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def is_up(self) -> bool:
        """Whether it runs and its startup probe has passed."""
        return self.pid is not None and self.health.is_started

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"container {self.container.name}")

    def kill(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def stop(self, stopping_for_s: float = 0.0) -> None:
        """Stop it and wait until it is reaped. The pod has been stopping for `stopping_for_s`."""
        if self._task is None:
            return
        self._stopping.set()
        asking = asyncio.create_task(self._terminate(), name=f"end of {self.container.name}")
        grace_s = grace_left_s(self.container.grace_s, stopping_for_s)
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if not done:
            self.log.note(f"(runner) still running after {grace_s:.3g} s: SIGKILL")
            self._signal(signal.SIGKILL)
        await self._task

    # ------------------------------------------------------------------ its lives

    async def _keep(self) -> None:
        backoff = Backoff(self.container.pace)
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            code = self.exit_code = await self._live_once()
            self.ended = f"exited with code {code}" if code >= 0 else f"died of signal {-code}"
            if self._stopping.is_set():
                return
            if not self.container.restart.applies(code) or (code >= 0 and not self.was_up):
                self.log.note(f"(runner) {self.ended}; not restarted")
                self.was_up = self.was_up or (self.container.kind is Kind.INIT and code == 0)
                self.is_given_up = True
                self.settled.set()
                return
            delay_ms = backoff.next_delay_ms((loop.time() - began) * 1000)
            when = f"in {duration(delay_ms)}" if delay_ms else "now"
            self.log.note(f"(runner) {self.ended}; restarting {when}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_ms / 1000)
            self._restarts += 1
            self._earlier_restarts += self._program_restarts
            self._program_restarts = 0

    async def _live_once(self) -> int:
        """One process from start to reaping; its exit code, negative for a signal."""
        container, writing = self.container, self.log.open_pipe()
        command = (*container.init, *container.command)
        self.health = ContainerHealth(container.probes)
        is_inside = container.has_pid_namespace
        self.is_starting = True
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(namespaces.inside(command) if is_inside else command),
                stdin=DEVNULL,
                stdout=writing,
                stderr=writing,
                env=self._environment(os.environ),
                start_new_session=True,  # Ctrl-C is for the runner, which stops them in order
            )
        except OSError as error:
            self.log.note(f"error: {command[0]} cannot be started: {error}")
            return 127  # the shell's code for a command that cannot be run
        finally:
            self.is_starting = False
            os.close(writing)
        if self._stopping.is_set():  # stopped while the process was being created
            self._signal(signal.SIGTERM)
        probing = asyncio.create_task(self._probe(), name=f"probes of {container.name}")
        try:
            return await self._process.wait()
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing
            self._after_end()

    def _environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        is_private = self.container.is_private
        found = {
            name: value
            for name, value in inherited.items()
            if not (is_private and name.startswith(OURS))
        }
        found |= self.container.env
        if not self.was_up:
            found[FIRST_START_ENV] = "final"
        # In a namespace it cannot watch its parent; enter_namespace.py does.
        return found if self.container.has_pid_namespace else found | parent_environment()

    # ------------------------------------------------------------------ its probes

    async def _probe(self) -> None:
        """Run the probes of this process, and stop it if one fails."""
        began_s = asyncio.get_running_loop().time()
        if not self.health.is_started:
            await self._ask(Question.STARTUP, began_s)
        async with asyncio.TaskGroup() as group:
            for question in self.health.asked_now():
                if question is not Question.STARTUP:
                    group.create_task(self._ask(question, began_s))

    async def _ask(self, question: Question, began_s: float) -> None:
        """Run one probe until its question is settled, or the process exits."""
        loop, probe = asyncio.get_running_loop(), self.container.probes[question]
        due_s = max(began_s + probe.initial_delay_s, loop.time())
        while question in self.health.asked_now():
            await asyncio.sleep(due_s - loop.time())
            reply = await get(probe.url, probe.timeout_s)
            has_failed = self.health.answered(question, is_ok=is_yes(reply.status))
            if question is Question.STARTUP:
                self.last_reply = reply
                if self.health.is_started:
                    self.was_up = True
                    self.settled.set()
            if has_failed and self.was_up:
                times = self.health.failures(question)
                grace_s = self.container.grace_s if probe.grace_s is None else probe.grace_s
                await self._end(
                    f"{question} probe failed {times} times ({reply.summary()})", grace_s
                )
            due_s = probe.next_due_s(due_s, loop.time())

    async def _end(self, why: str, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`. The exit of the process cancels this."""
        self.log.note(f"(runner) {why}: SIGTERM, and SIGKILL after {grace_s:g} s")
        self._signal(signal.SIGTERM)
        await asyncio.sleep(grace_s)
        self._signal(signal.SIGKILL)
        await asyncio.Event().wait()

    async def _terminate(self) -> None:
        """Send SIGTERM until it is accepted: the kernel drops it for a pid 1 that has just started
        and has no handler yet."""
        is_accepted = False
        while not is_accepted:
            pid = self.first if self.container.has_pid_namespace else None
            is_accepted = pid is None or namespaces.accepts_signal(pid, signal.SIGTERM)
            self._signal(signal.SIGTERM)
            await asyncio.sleep(ASK_AGAIN_S)

    def _signal(self, number: int) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.container.has_pid_namespace:
                namespaces.signal_first(process.pid, number)
            else:
                process.send_signal(number)
