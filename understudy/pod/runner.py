"""Runs a list of containers as processes of this machine: the pod without Kubernetes.

Starts them in order, each after the one before passed its startup probe; restarts what dies;
stops in reverse order, SIGTERM first, SIGKILL after the grace period. It knows containers, not
what runs in them. Signals are sent only to children that it started and has not reaped yet, so
never to a stranger who was given a recycled pid. Children end with the runner: they are told its
pid in UNDERSTUDY_PARENT_PID and ask the kernel to be killed when it goes.

The surprising thing: during the *first* start an exit with a code (not by a signal) is final. A
bad flag or a missing model does not heal by trying again, and people wait for the sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from understudy.errors import UnderstudyError, UsageError, WaitTimeoutError
from understudy.pod.container_log import LOG_MAX_BYTES, ContainerLog
from understudy.pod.containers import Backoff, Container
from understudy.pod.http_get import get

PROBE_PERIOD_S = 0.05  # a start takes seconds; a probe costs about a millisecond
PROBE_TIMEOUT_S = 2.0
WAIT_SHOWN_AFTER_S = 1.0  # shorter waits are not worth a line

T = TypeVar("T")
Say = Callable[[str], None]


class Runner:
    """The containers of one pod and the tasks that keep them running."""

    def __init__(
        self,
        containers: Sequence[Container],
        log_dir: Path,
        say: Say = lambda line: None,
        log_max_bytes: int = LOG_MAX_BYTES,
    ) -> None:
        names = [container.name for container in containers]
        if len(set(names)) != len(names):
            raise ValueError(f"two containers share a name: {names}")
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._say = say
        self._kept = {
            container.name: _Kept(
                container,
                ContainerLog(container.name, log_dir / f"{container.name}.log", say, log_max_bytes),
            )
            for container in containers
        }

    def pids(self) -> Mapping[str, int]:
        """The processes that run at this moment, by container."""
        return {name: kept.pid for name, kept in self._kept.items() if kept.pid is not None}

    def restarts(self) -> Mapping[str, int]:
        """How often each container was started again."""
        return {name: kept.restarts for name, kept in self._kept.items()}

    async def start(self) -> None:
        """Start every container in order; returns when the last one passed its startup probe.

        Raises:
            UnderstudyError: `pod.start_failed`, one ended before its probe passed.
            WaitTimeoutError: `pod.start_deadline`, one did not pass its probe in time.
        """
        for kept in self._kept.values():
            kept.start()
            await self._wait_startup(kept)

    async def stop(self) -> None:
        """Stop all in reverse order and wait until every process is reaped. May be called twice."""
        for kept in reversed(self._kept.values()):
            await kept.stop()
        for kept in self._kept.values():
            kept.log.close()

    def kill(self) -> None:
        """SIGKILL to everything at once; `stop` then has little left to wait for."""
        for kept in self._kept.values():
            kept.kill()

    async def _wait_startup(self, kept: _Kept) -> None:
        container, startup = kept.container, kept.container.startup
        if startup is None:
            return
        loop = asyncio.get_running_loop()
        began, shown = loop.time(), ""
        while True:
            answer = await get(startup.url, PROBE_TIMEOUT_S)
            waited_s = loop.time() - began
            if answer.status == 200 and kept.pid is not None:
                kept.started_once = True
                return
            if kept.given_up.is_set():
                # A usage error of a part is one of whoever started it: same exit code.
                error = UsageError if kept.exit_code == UsageError.exit_code else UnderstudyError
                raise error(
                    "pod.start_failed",
                    f"{container.name} {kept.ended} while starting: {kept.log.last_error()} "
                    f"(its log is {kept.log.path})",
                    container=container.name,
                )
            if waited_s > startup.deadline_s:
                raise WaitTimeoutError(
                    "pod.start_deadline",
                    f"{container.name} was not up within {startup.deadline_s:g} s: "
                    f"{answer.why()}; its log is {kept.log.path}",
                    container=container.name,
                )
            if waited_s > WAIT_SHOWN_AFTER_S and answer.why() != shown:
                shown = answer.why()
                self._say(f"waiting for {container.name}: {shown}")
            # The pause ends early if the process gives up, so that a failed start is told at once.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(kept.given_up.wait(), PROBE_PERIOD_S)


class _Kept:
    """One container and its process: `start`, then restarted until `stop`."""

    def __init__(self, container: Container, log: ContainerLog) -> None:
        self.container = container
        self.log = log
        self.restarts = 0
        self.started_once = container.startup is None
        self.ended = "has not run"
        self.exit_code: int | None = None
        self.given_up = asyncio.Event()
        self._stopping = asyncio.Event()
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"container {self.container.name}")

    def kill(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def stop(self) -> None:
        if self._task is None:
            return
        self._stopping.set()
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=self.container.grace_s)
        if not done:
            self.log.note(f"(runner) still there after {self.container.grace_s:g} s: SIGKILL")
            self._signal(signal.SIGKILL)
        await self._task

    async def _keep(self) -> None:
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            code = self.exit_code = await self._run_once()
            self.ended = f"exited with code {code}" if code >= 0 else f"died of signal {-code}"
            if self._stopping.is_set():
                return
            if not self.container.restart.applies(code) or (code >= 0 and not self.started_once):
                self.log.note(f"(runner) {self.ended}; not started again")
                self.given_up.set()
                return
            delay_ms = backoff.next_delay_ms((loop.time() - began) * 1000)
            when = f"in {delay_ms / 1000:g} s" if delay_ms else "now"
            self.log.note(f"(runner) {self.ended}; started again {when}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_ms / 1000)
            self.restarts += 1

    async def _run_once(self) -> int:
        """One process from start to reaping; its exit code, negative for a signal."""
        writing = self.log.open_pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.container.command,
                stdin=DEVNULL,
                stdout=writing,
                stderr=writing,
                env={**os.environ, **self.container.env, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
                start_new_session=True,  # Ctrl-C is for the runner, which stops them in order
            )
        except OSError as error:
            self.log.note(f"error: {self.container.command[0]} cannot be started: {error}")
            return 127  # the shell's code for a command that cannot be run
        finally:
            os.close(writing)
        if self._stopping.is_set():  # asked to stop while the process was being made
            self._signal(signal.SIGTERM)
        return await self._process.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


async def run_pod(
    runner: Runner,
    body: Callable[[], Awaitable[T]],
    next_signal: Callable[[], Awaitable[int]],
    say: Say = lambda line: None,
) -> T | None:
    """Start the pod, run `body`, stop the pod; None if a signal ended it first.

    The first SIGTERM or SIGINT cancels whatever runs and stops the pod in order; the second one
    kills at once. The pod is stopped whatever `body` raises.
    """

    async def start_and_run() -> T:
        await runner.start()
        return await body()

    work = asyncio.ensure_future(start_and_run())
    interrupt = asyncio.ensure_future(next_signal())
    try:
        either: set[asyncio.Future[Any]] = {work, interrupt}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        say(f"{signal.Signals(interrupt.result()).name}: stopping; once more kills at once")
        return None
    finally:
        work.cancel()
        if interrupt.done():
            interrupt = asyncio.ensure_future(next_signal())
        await _stop_or_kill(runner, work, interrupt)


async def _stop_or_kill(
    runner: Runner, work: asyncio.Future[T], interrupt: asyncio.Future[int]
) -> None:
    async def stop() -> None:
        await asyncio.gather(work, return_exceptions=True)
        await runner.stop()

    stopping = asyncio.ensure_future(stop())
    either: set[asyncio.Future[Any]] = {stopping, interrupt}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        runner.kill()
    interrupt.cancel()
    await stopping
