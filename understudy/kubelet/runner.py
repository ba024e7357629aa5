"""Runs a list of containers as processes of this machine: the pod without Kubernetes.

Starts them in order, each after the previous one is up; stops them in reverse, with SIGTERM and,
after the grace period, SIGKILL. `running_container.py` handles each one in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from plumbing.errors import UnderstudyError, UsageError, WaitTimeoutError
from understudy.kubelet.containers import Container, starts, stops
from understudy.kubelet.log import LOG_MAX_BYTES, ContainerLog
from understudy.kubelet.namespaces import reap_zombies
from understudy.kubelet.running_container import RunningContainer

LOOK_S = 0.05  # how often a start checks for news
WAIT_SHOWN_AFTER_S = 1.0  # shorter waits are not reported

T = TypeVar("T")
Say = Callable[[str], None]


class PodRunner:
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
        self._kept: dict[str, RunningContainer] = {}
        for name, container in zip(names, containers, strict=True):
            log = ContainerLog(name, log_dir / f"{name}.log", say, log_max_bytes)
            self._kept[name] = RunningContainer(container, log, self._reap_orphans)
        self._starts = [[container.name for container in group] for group in starts(containers)]
        self.killed_by: int | None = None  # the signal that had it killed instead of stopped
        self._stops = [[container.name for container in group] for group in stops(containers)]

    def pids(self) -> Mapping[str, int]:
        """The processes that are running, by container."""
        return {name: kept.pid for name, kept in self._kept.items() if kept.pid is not None}

    def restarts(self) -> Mapping[str, int]:
        """How often each container was restarted."""
        return {name: kept.restarts for name, kept in self._kept.items()}

    @property
    def stopping(self) -> str:
        """What a signal does, for people; without containers, the pod is somebody else's."""
        if not self._kept:
            return "stopping; the pod keeps running"
        return "stopping the pod; send it again to kill it"

    def not_up(self) -> list[str]:
        """The containers that should be up and are not, or not again."""
        return [
            name for name, kept in self._kept.items() if not kept.is_given_up and not kept.is_up
        ]

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

    def container(self, name: str) -> Container:
        """The container of that name."""
        return self._kept[name].container

    async def replace(self, container: Container) -> None:
        """Stop the container of the same name and start this one in its place; returns when it has
        passed its startup probe.

        Raises:
            UnderstudyError, WaitTimeoutError: as `start`.
        """
        old = self._kept[container.name]
        await old.stop()
        old.log.note("(runner) replaced by a container with another configuration")
        new = self._kept[container.name] = RunningContainer(container, old.log, self._reap_orphans)
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

    def _reap_orphans(self) -> None:
        """As pid 1 of a container we inherit orphans, and no one else reaps them. Those that exit
        later are reaped with the next one."""
        kept = self._kept.values()
        if os.getpid() == 1 and not any(each.is_starting for each in kept):
            reap_zombies(exclude={each.child for each in kept})

    async def _wait_up(self, kept: RunningContainer) -> None:
        """Wait until `kept` is up; reports what it waits for."""
        container, startup = kept.container, kept.container.startup
        loop = asyncio.get_running_loop()
        began, shown = loop.time(), ""
        while not kept.settled.is_set():
            waited_s, reply = loop.time() - began, kept.last_reply
            if startup is not None and waited_s > startup.patience_s:
                raise WaitTimeoutError(
                    "pod.start_deadline",
                    f"{container.name} did not start within {startup.patience_s:g} s: "
                    f"{reply.summary()}; see its log, {kept.log.path}",
                    container=container.name,
                )
            is_long = startup is not None and waited_s > WAIT_SHOWN_AFTER_S
            if is_long and reply.sentence() != shown:
                shown = reply.sentence()
                self._say(f"waiting for {container.name}: {shown}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(kept.settled.wait(), LOOK_S)
        if not kept.was_up:
            # A usage error of a part is ours, too: same exit code.
            error = UsageError if kept.exit_code == UsageError.exit_code else UnderstudyError
            raise error(
                "pod.start_failed",
                f"{container.name} {kept.ended} while starting: {kept.log.last_error()} "
                f"(see {kept.log.path})",
                container=container.name,
            )


async def run_pod(
    runner: PodRunner,
    body: Callable[[], Awaitable[T]],
    next_signal: Callable[[], Awaitable[int]],
    say: Say = lambda line: None,
    start_within_s: float | None = None,
    while_stopping: Callable[[], Awaitable[None]] | None = None,
) -> T | None:
    """Start the pod, run `body`, stop the pod; None if a signal ended it first.

    The first SIGTERM or SIGINT cancels `body` and stops the pod in order; the second one kills it.
    `while_stopping` runs between the first signal and the end. The pod is stopped whatever `body`
    raises, and if it has not started after `start_within_s`.
    """
    watching: asyncio.Future[None] | None = None

    async def start_and_run() -> T:
        try:
            async with asyncio.timeout(start_within_s):
                await runner.start()
        except TimeoutError as error:
            missing = ", ".join(runner.not_up())
            raise WaitTimeoutError(
                "pod.start_deadline",
                f"the pod did not start within {start_within_s:g} s: {missing}",
            ) from error
        return await body()

    work = asyncio.ensure_future(start_and_run())
    interrupt = asyncio.ensure_future(next_signal())
    try:
        either: set[asyncio.Future[Any]] = {work, interrupt}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        say(f"{signal.Signals(interrupt.result()).name}: {runner.stopping}")
        if while_stopping is not None:
            watching = asyncio.ensure_future(while_stopping())
        return None
    finally:
        work.cancel()
        if interrupt.done():
            interrupt = asyncio.ensure_future(next_signal())
        await _stop_or_kill(runner, work, interrupt, say)
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _stop_or_kill(
    runner: PodRunner, work: asyncio.Future[T], interrupt: asyncio.Future[int], say: Say
) -> None:
    async def stop() -> None:
        await asyncio.gather(work, return_exceptions=True)
        await runner.stop()

    stopping = asyncio.ensure_future(stop())
    either: set[asyncio.Future[Any]] = {stopping, interrupt}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        runner.killed_by = interrupt.result()
        if runner.pids():
            name = signal.Signals(runner.killed_by).name
            say(f"{name}: killed the pod; requests that were running are cut")
        runner.kill()
    interrupt.cancel()
    await stopping
