"""One container and its process: started, asked by its probes, ended, started again.

Owns the process, its probes' tasks and the wait before the next start. What an answer means is
`probes.py`'s, what an end means is `containers.py`'s. Signals are sent only to children that it
started and has not reaped yet, so never to a stranger who was given a recycled pid. Children end
with the runner: they are told its pid in UNDERSTUDY_PARENT_PID and ask the kernel to be killed when
it goes, or `enter_namespace.py` asks for them.

The surprising thing: during the *first* start an exit with a code (not by a signal) is final. A
bad flag or a missing model does not heal by trying again, and people wait for the sentence. For
the same reason a first start is ended by the runner's clock, not by its startup probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping

from plumbing.service.parent import environment
from understudy.kubelet import namespaces
from understudy.kubelet.containers import Backoff, Container, Kind, grace_left_s
from understudy.kubelet.http_get import Answer, get
from understudy.kubelet.log import ContainerLog
from understudy.kubelet.probes import Health, Question, is_yes

ASK_AGAIN_S = 0.05  # an interpreter needs some tenths of a second until it has its handlers

# How the names of our settings begin.
OURS = ("UNDERSTUDY_", "ENGINE_", "LOCKSERVER_", "GMS_")


class Kept:
    """A container that runs from `start` to `stop`, whatever its process does."""

    def __init__(
        self, container: Container, log: ContainerLog, after_end: Callable[[], None] = lambda: None
    ) -> None:
        """`after_end` is called whenever its process has ended and is reaped."""
        self.container = container
        self.log = log
        self._after_end = after_end
        self.is_starting = False  # a process is being made, whose pid is not known yet
        self.restarts = 0
        # In any of its lives: one that nobody asks is up as soon as it is started.
        self.was_up = container.startup is None and container.kind is not Kind.INIT
        self.ended = "has not run"
        self.exit_code: int | None = None
        self.last_answer = Answer(0, reason="it has not been asked yet")  # of its startup probe
        self.settled = asyncio.Event()  # it is up, or has been given up: look which
        if self.was_up:
            self.settled.set()
        self.is_given_up = False
        self.health = Health(container.probes)
        self._stopping = asyncio.Event()
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the container's first process, while there is one."""
        process = self._process
        if process is None or process.returncode is not None:
            return None
        if self.container.has_pid_namespace:
            return namespaces.first_process(process.pid)
        return process.pid

    @property
    def child(self) -> int | None:
        """The child of ours that is to be waited for: the first process, or the one outside."""
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
        """End it and wait until it is reaped; the pod has been stopping for so long already."""
        if self._task is None:
            return
        self._stopping.set()
        asking = asyncio.create_task(self._ask_to_end(), name=f"end of {self.container.name}")
        grace_s = grace_left_s(self.container.grace_s, stopping_for_s)
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if not done:
            self.log.note(f"(runner) still there after {grace_s:.3g} s: SIGKILL")
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
            if self._is_final(code):
                self.log.note(f"(runner) {self.ended}; not started again")
                self.was_up = self.was_up or (self.container.kind is Kind.INIT and code == 0)
                self.is_given_up = True
                self.settled.set()
                return
            delay_ms = backoff.next_delay_ms((loop.time() - began) * 1000)
            when = f"in {delay_ms / 1000:g} s" if delay_ms else "now"
            self.log.note(f"(runner) {self.ended}; started again {when}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_ms / 1000)
            self.restarts += 1

    def _is_final(self, code: int) -> bool:
        return not self.container.restart.applies(code) or (code >= 0 and not self.was_up)

    async def _live_once(self) -> int:
        """One process from start to reaping; its exit code, negative for a signal."""
        container, writing = self.container, self.log.open_pipe()
        self.health = Health(container.probes)
        is_inside = container.has_pid_namespace
        self.is_starting = True
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(namespaces.inside(container.command) if is_inside else container.command),
                stdin=DEVNULL,
                stdout=writing,
                stderr=writing,
                env=self._environment(os.environ),
                start_new_session=True,  # Ctrl-C is for the runner, which stops them in order
            )
        except OSError as error:
            self.log.note(f"error: {container.command[0]} cannot be started: {error}")
            return 127  # the shell's code for a command that cannot be run
        finally:
            self.is_starting = False
            os.close(writing)
        if self._stopping.is_set():  # asked to stop while the process was being made
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
        # Its parent there is nobody that it could watch: another process watches for it.
        return found if self.container.has_pid_namespace else found | environment()

    # ------------------------------------------------------------------ its probes

    async def _probe(self) -> None:
        """Ask what is to be asked of this process, and end it if that says so."""
        began_s = asyncio.get_running_loop().time()
        if not self.health.is_started:
            await self._ask(Question.STARTUP, began_s)
        async with asyncio.TaskGroup() as group:
            for question in self.health.asked_now():
                if question is not Question.STARTUP:
                    group.create_task(self._ask(question, began_s))

    async def _ask(self, question: Question, began_s: float) -> None:
        """One probe until its question is settled for this process, or for as long as it lives."""
        loop, probe = asyncio.get_running_loop(), self.container.probes[question]
        due_s = max(began_s + probe.initial_delay_s, loop.time())
        while question in self.health.asked_now():
            await asyncio.sleep(due_s - loop.time())
            answer = await get(probe.url, probe.timeout_s)
            has_failed = self.health.answered(question, is_ok=is_yes(answer.status))
            if question is Question.STARTUP:
                self.last_answer = answer
                if self.health.is_started:
                    self.was_up = True
                    self.settled.set()
            if has_failed and self.was_up:
                times = self.health.failures(question)
                grace_s = self.container.grace_s if probe.grace_s is None else probe.grace_s
                await self._end(f"{question} failed {times} times, {answer.why()}", grace_s)
            due_s = probe.next_due_s(due_s, loop.time())

    async def _end(self, why: str, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`. The process's end cancels this."""
        self.log.note(f"(runner) {why}: SIGTERM, and SIGKILL after {grace_s:g} s")
        self._signal(signal.SIGTERM)
        await asyncio.sleep(grace_s)
        self._signal(signal.SIGKILL)
        await asyncio.Event().wait()

    async def _ask_to_end(self) -> None:
        """SIGTERM, and again for as long as it is dropped: whoever is pid 1 and has only just been
        started has no handler yet, and would be waited for until the grace period is over."""
        is_heeded = False
        while not is_heeded:
            pid = self.pid if self.container.has_pid_namespace else None
            is_heeded = pid is None or namespaces.is_heeded(pid, signal.SIGTERM)
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
