"""Runs the containers of a pod on this machine: starts them in order, restarts them, stops them.

A container's first process is an init, which restarts its program in place, also one that hangs.
The runner restarts a container whose first process has ended: an init that was killed or has given
up. Children die with the runner: they ask the kernel to be killed when it exits.

The surprising thing: during the *first* start an exit with a code (not by a signal) is final,
because a retry does not cure a bad flag, and the user waits for the error. For the same reason the
runner's deadline ends a first start, not its startup probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from plumbing.errors import GivenUpError, UnderstudyError, UsageError, WaitTimeoutError
from plumbing.pod.supervision import ChildProcess
from plumbing.service import init
from plumbing.service.init import FIRST_START_ENV
from plumbing.service.process import parent_environment
from plumbing.service.procfs import children, is_alive
from plumbing.service.signals import ENDING
from plumbing.text import duration
from understudy.http_get import HttpReply, get
from understudy.pod.output import ContainerLog
from understudy.pod.table import Container, starts, stops

LOOK_S = 0.01  # how often a start checks for news
WAIT_SHOWN_AFTER_S = 1.0  # shorter waits are not reported
STARTUP_PERIOD_S = 0.05  # a start takes seconds; a probe costs about a millisecond
STARTUP_TIMEOUT_S = 2.0
GOOD_LIFE_S = 10.0  # two shorter lives in a row are a loop
LAST_GRACE_S = 2.0  # of each container, once the pod has used up its grace period
OK = range(200, 400)  # Kubernetes counts a redirect as success
NOT_STARTED = 127  # the shell's code for a command that cannot be run

T = TypeVar("T")
Say = Callable[[str], None]


class RunningContainer:
    """A container that is kept running from `start` to `stop`."""

    def __init__(self, container: Container, log: ContainerLog) -> None:
        self.container = container
        self.log = log
        self.was_up = container.startup is None  # in any of its lives
        self.ended = "has not started"
        self.exit_code: int | None = None
        self.last_reply = HttpReply(0, reason="not probed yet")  # of its startup probe
        self.is_given_up = False
        self._is_started = False  # in this life
        self.restarts = 0  # of its first process
        self._stopping = asyncio.Event()
        self._process: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The container's program, while it lives: the first process, or init's eldest child. Init
        has no other child when it starts the program; orphans come later. Of a program that is
        being replaced, which has no orphans, the youngest."""
        process = self._process
        if process is None or process.returncode is not None:
            return None
        if not self.container.init:
            return process.pid
        found = [pid for pid in children(process.pid) if is_alive(pid)]
        if not found:
            return None
        return found[-1 if init.REPLACEABLE in self.container.init else 0]

    @property
    def is_up(self) -> bool:
        """Whether it runs and its startup probe has passed."""
        return self.pid is not None and self._is_started

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"container {self.container.name}")

    def kill(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def stop(self, stopping_for_s: float = 0.0) -> None:
        """Stop it and wait until it is reaped. The pod has been stopping for `stopping_for_s`: all
        containers share one grace period, but each gets at least `LAST_GRACE_S`."""
        if self._task is None:
            return
        self._stopping.set()
        self._signal(signal.SIGTERM)
        grace_s = self.container.grace_s
        grace_s = max(min(grace_s, LAST_GRACE_S), grace_s - stopping_for_s)
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        if not done:
            self.log.note(f"(runner) still running after {grace_s:.3g} s: SIGKILL")
            self._signal(signal.SIGKILL)
        await self._task

    def start_failed(self) -> UnderstudyError:
        # A usage error of a part is ours, too: same exit code.
        error = UsageError if self.exit_code == UsageError.exit_code else UnderstudyError
        name = self.container.name
        return error(
            "pod.start_failed",
            f"{name} {self.ended} while starting: {self.log.last_error()} (see {self.log.path})",
            container=name,
        )

    async def _keep(self) -> None:
        """Its lives, one after another."""
        was_short, loop = False, asyncio.get_running_loop()
        while not self._stopping.is_set():
            began_s = loop.time()
            code = self.exit_code = await self._live_once()
            self.ended = f"exited with code {code}" if code >= 0 else f"died of signal {-code}"
            if self._stopping.is_set():
                return
            if code >= 0 and not self.was_up:
                self.log.note(f"(runner) {self.ended}; not restarted")
                self.is_given_up = True
                return
            is_short = loop.time() - began_s < GOOD_LIFE_S
            delay_s = self.container.pause_s if is_short and was_short else 0.0
            was_short = is_short
            when = f"in {duration(delay_s * 1000)}" if delay_s else "now"
            self.log.note(f"(runner) {self.ended}; restarting {when}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            self.restarts += 1

    async def _live_once(self) -> int:
        """One process from start to reaping; its exit code, negative for a signal."""
        container, writing = self.container, self.log.open_pipe()
        command = (*container.init, *container.command)
        is_first = container.init and not self.was_up
        first = {FIRST_START_ENV: "final"} if is_first else {}
        self._is_started = False
        try:
            self._process = ChildProcess(
                command,
                {**os.environ, **container.env, **first, **parent_environment()},
                stdout=writing,
                stderr=writing,
                start_new_session=True,  # Ctrl-C is for the runner, which stops them in order
            )
        except OSError as error:
            self.log.note(f"error: {command[0]} cannot be started: {error}")
            return NOT_STARTED
        finally:
            os.close(writing)
        probing = asyncio.create_task(self._probe(), name=f"probe of {container.name}")
        try:
            return await self._process.wait()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self) -> None:
        """Wait until this life is up; its exit cancels this. The patience with a first start is the
        runner's."""
        probe, loop = self.container.startup, asyncio.get_running_loop()
        began_s = loop.time()
        while probe is not None:
            self.last_reply = await get(probe.url, STARTUP_TIMEOUT_S)
            if self.last_reply.status in OK:
                break
            if self.was_up and loop.time() > began_s + probe.patience_s:
                said = self.last_reply.said()
                why = f"startup probe failed for {probe.patience_s:g} s ({said})"
                self.log.note(f"(runner) {why}: SIGKILL")
                self._signal(signal.SIGKILL)
                return
            await asyncio.sleep(STARTUP_PERIOD_S)
        self._is_started = self.was_up = True

    def _signal(self, number: int) -> None:
        """To a child that is not reaped yet, so never to a recycled pid."""
        if self._process is not None:
            self._process.send_signal(number)


class PodRunner:
    """The containers of one pod and the tasks that keep them running."""

    def __init__(
        self, containers: Sequence[Container], log_dir: Path, say: Say = lambda line: None
    ) -> None:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._say = say
        self._kept: dict[str, RunningContainer] = {}
        for each in containers:
            log = ContainerLog(each.name, log_dir / f"{each.name}.log", say)
            self._kept[each.name] = RunningContainer(each, log)
        self._starts = [[container.name for container in group] for group in starts(containers)]
        self._stops = [[container.name for container in group] for group in stops(containers)]
        self.killed_by: int | None = None  # the signal that had it killed instead of stopped

    def pids(self) -> Mapping[str, int]:
        """The programs that are running, by container."""
        return {name: pid for name, kept in self._kept.items() if (pid := kept.pid) is not None}

    def restarts(self) -> Mapping[str, int]:
        """How often each container was started again, other than by its init in place."""
        return {name: kept.restarts for name, kept in self._kept.items()}

    def not_up(self) -> list[str]:
        """The containers that should be up and are not, or not again."""
        kept = self._kept.items()
        return [name for name, each in kept if not each.is_given_up and not each.is_up]

    async def start(self) -> None:
        """Start every container in order; returns when the last one passed its startup probe.

        Raises:
            UnderstudyError: `pod.start_failed`, one exited before its probe passed.
            WaitTimeoutError: `pod.start_deadline`, one did not pass its probe in time.
        """
        for group in self._starts:
            for name in group:
                self._kept[name].start()
            waits = [asyncio.create_task(self._wait_up(self._kept[name])) for name in group]
            try:
                await asyncio.gather(*waits)
            finally:
                for each in waits:
                    each.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    def check(self) -> None:
        """Raise for a part that has given up, such as one whose memory can never fit.

        Raises:
            UnderstudyError: `pod.start_failed`.
        """
        for kept in self._kept.values():
            if kept.exit_code == GivenUpError.exit_code:
                raise kept.start_failed()

    async def restart(self, name: str) -> None:
        """Stop a container and start it anew; returns when it has passed its startup probe.

        Raises:
            UnderstudyError, WaitTimeoutError: as `start`.
        """
        old = self._kept[name]
        await old.stop()
        new = self._kept[name] = RunningContainer(old.container, old.log)
        new.start()
        await self._wait_up(new)

    async def stop(self) -> None:
        """Stop all in reverse order and wait until every process is reaped. May be called twice."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for group in self._stops:
            spent_s = loop.time() - began_s
            await asyncio.gather(*(self._kept[name].stop(spent_s) for name in group))
        for kept in self._kept.values():
            kept.log.close()

    def kill(self) -> None:
        """SIGKILL all at once; call `stop` afterwards."""
        for kept in self._kept.values():
            kept.kill()

    async def _wait_up(self, kept: RunningContainer) -> None:
        """Wait until `kept` is up; reports what it waits for."""
        container, startup = kept.container, kept.container.startup
        loop = asyncio.get_running_loop()
        began_s, shown = loop.time(), ""
        while not (kept.was_up or kept.is_given_up):
            waited_s, said = loop.time() - began_s, kept.last_reply.said()
            if startup is not None and waited_s > startup.patience_s:
                raise WaitTimeoutError(
                    "pod.start_deadline",
                    f"{container.name} did not start within {startup.patience_s:g} s: "
                    f"{said}; see its log, {kept.log.path}",
                    container=container.name,
                )
            if waited_s > WAIT_SHOWN_AFTER_S and said != shown:
                shown = said
                why = f": {shown}" if kept.last_reply.status else " to start"
                self._say(f"waiting for {container.name}{why}")
            await asyncio.sleep(LOOK_S)
        if not kept.was_up:
            raise kept.start_failed()


async def run_pod(
    runner: PodRunner,
    body: Callable[[], Awaitable[T]],
    say: Say = lambda line: None,
    while_stopping: Callable[[], Awaitable[None]] | None = None,
) -> T | None:
    """Start the pod, run `body`, stop the pod; None if a signal ended it first.

    The first SIGTERM or SIGINT cancels `body` and stops the pod in order; the second one kills it.
    `while_stopping` runs between the first signal and the end. The pod is stopped whatever `body`
    raises.
    """

    loop, is_interrupted = asyncio.get_running_loop(), False
    watching: asyncio.Future[None] = loop.create_future()

    async def start_and_run() -> T:
        await runner.start()
        return await body()

    def signalled(number: int) -> None:
        nonlocal is_interrupted, watching
        name = signal.Signals(number).name
        if is_interrupted or work.done():
            runner.killed_by = number
            if runner.pids():
                say(f"{name}: killed the pod; requests that were running are cut")
            runner.kill()
            return
        is_interrupted = True
        ours = "stopping the pod; send it again to kill it"
        # Without containers the pod is another program's.
        say(f"{name}: {ours if runner.restarts() else 'stopping; the pod keeps running'}")
        work.cancel()
        if while_stopping is not None:
            watching = asyncio.ensure_future(while_stopping())

    work = asyncio.ensure_future(start_and_run())
    for each in ENDING:
        loop.add_signal_handler(each, signalled, each)
    try:
        await asyncio.wait({work})
        return None if is_interrupted else work.result()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await runner.stop()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for each in ENDING:
            loop.remove_signal_handler(each)
