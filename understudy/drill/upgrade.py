"""Upgrades a pod under load, as in docs/operations.md: the standby is relaunched with a new
configuration, the active engine hands over to it, and is then relaunched likewise.

The runner replaces the containers, as an operator or a kubelet would. The configuration of every
process is read from /proc, so a leftover of the old backend is noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lockserver.client import messages as lock_messages
from lockserver.client import serving
from plumbing.errors import UnderstudyError
from plumbing.pod.observers import ask
from plumbing.pod.paths import LOCKSERVER_SOCKET
from plumbing.service.clock import SystemClock
from plumbing.text import duration
from understudy.drill.killer import Whole, backend_processes, wait_whole
from understudy.drill.observer import Observer, OldTree
from understudy.drill.records import Kill, Upgrade
from understudy.pod.runner import PodRunner

# A real setting of every backend that no answer depends on.
SETTING, VALUE = "UNDERSTUDY_DRAIN_MS", "44000"  # the default is 43000
SWITCHOVER_TIMEOUT_S = 120.0  # the drain's budget, the reap's, and a wake on a slow machine
SWITCHOVER = "switchover"  # in place of a kill's target

clock = SystemClock()


@dataclass(frozen=True, slots=True)
class Upgrader:
    """Upgrades the engines of the pod in `directory`, which `runner` runs; `answers` waits until
    more requests have been answered."""

    directory: Path
    runner: PodRunner
    observer: Observer
    say: Callable[[str], None]
    answers: Callable[[], Awaitable[None]]

    async def run(self, upgrade: Upgrade) -> None:
        """Upgrade both engines; fills `upgrade` step by step.

        Raises:
            UnderstudyError: a step failed.
        """
        before = await wait_whole(self.directory, self.say)
        for standby in before.standbys:
            await self._relaunch(standby)
        await self.answers()
        await self._switch_over(before, before.standbys[0], upgrade)
        await wait_whole(self.directory, self.say)
        await self.answers()
        await self._relaunch(before.engine)
        await self.answers()
        for engine in (before.engine, *before.standbys):
            upgrade.engines[engine] = self._is_upgraded(engine)

    async def _relaunch(self, engine: str) -> None:
        began_ms = clock.now_ms()
        container = self.runner.container(engine)
        env = {**container.env, SETTING: VALUE}
        await self.runner.replace(replace(container, env=env))
        await wait_whole(self.directory, self.say)
        took_ms = clock.now_ms() - began_ms
        self.say(f"{engine} is in standby with {SETTING}={VALUE} after {duration(took_ms)}")

    async def _switch_over(self, before: Whole, to: str, upgrade: Upgrade) -> None:
        pids = backend_processes(self.runner.pids()[before.engine])
        tree = OldTree.of(pids, self._serving_file(before.engine))
        upgrade.source, upgrade.old_token = before.engine, before.token
        # At the grant, the old backend must be gone here, too, or have stopped serving.
        self.observer.expect(Kill(SWITCHOVER, before.engine, before.token, clock.now_ms()), tree)
        question = lock_messages.SwitchOverMsg("active", to, round(SWITCHOVER_TIMEOUT_S * 1000))
        answered = await ask(
            str(self.directory / LOCKSERVER_SOCKET),
            lock_messages.CATALOGUE,
            question,
            timeout_s=SWITCHOVER_TIMEOUT_S + 5,
        )
        done = answered.message
        if not isinstance(done, lock_messages.SwitchedOverMsg):
            raise UnderstudyError("drill.no_switchover", f"the lock server answered {done.TYPE}")
        upgrade.target, upgrade.new_token = done.engine, done.token
        upgrade.switchover_ms = float(done.took_ms)
        self.say(f"{done.source} handed over to {done.engine} after {done.took_ms} ms")

    def _serving_file(self, engine: str) -> tuple[int, int] | None:
        incarnation = self.observer.incarnation_of(engine)
        found = serving.find(str(self.directory), incarnation) if incarnation else None
        return (found.dev, found.ino) if found else None

    def _is_upgraded(self, engine: str) -> bool:
        """Whether every process of the engine runs with the new configuration."""
        supervisor = self.runner.pids()[engine]
        wanted = f"{SETTING}={VALUE}".encode()
        processes = [supervisor, *backend_processes(supervisor)]
        return len(processes) > 1 and all(wanted in _environment(pid) for pid in processes)


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []
