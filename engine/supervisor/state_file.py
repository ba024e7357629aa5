"""The engine's state file: what outlives the supervisor, and what others may look up.

Owns `engine_<id>.json` in the shared directory: the status document, whether any incarnation ever
reached standby in this pod, and the counters that must survive a restart. It outlives processes,
not the machine, whose end is the pod's: nothing waits for the disk, so a launch is on file long
before its engine can be killed. Written on a thread of its own, because a disk may hang; only the
newest content waits. A full disk is reported and forgotten: nothing here may stop an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plumbing.errors import UnderstudyError
from plumbing.part.paths import engine_state
from plumbing.service.files import read_json, write_atomic

FLUSH_DEADLINE_S = 2.0  # at the end of the process: a disk that hangs must not keep it


@dataclass
class Memory:
    """What a later supervisor of the same engine must know."""

    was_standby: bool = False
    number: int = 0  # launches so far
    failover_attempts: int = 0
    failover_successes: int = 0


def load(path: str) -> tuple[Memory, str | None]:
    """The memory in `path`, and what is wrong with the file, if anything: then it starts anew."""
    try:
        document = read_json(path) or {}
        memory = document.get("memory", {})
        return Memory(
            **{name: type(default)(memory.get(name, default)) for name, default in _FRESH}
        ), None
    except (UnderstudyError, OSError, TypeError, ValueError, AttributeError) as error:
        return Memory(), str(error)


_FRESH = tuple(vars(Memory()).items())


def is_active(directory: str, engine: str, token: int) -> bool:
    """Whether `engine` says of itself that it is active under `token`."""
    try:
        document = read_json(engine_state(directory, engine)) or {}
        return bool(document["engine"]["state"] == "active" and document["lock"]["token"] == token)
    except (UnderstudyError, OSError, KeyError, TypeError):
        return False


class StateFile:
    """Writes documents one after another; a newer one replaces the one that waits."""

    def __init__(self, path: str, on_problem: Callable[[str | None], None]) -> None:
        """`on_problem` is called on the loop when writing begins to fail, and with None when it
        works again."""
        self.path = path
        self.problem: str | None = None
        self._on_problem = on_problem
        self._waiting: str | None = None
        self._writer: asyncio.Task[None] | None = None

    def write(self, document: dict[str, Any]) -> None:
        """Have `document` written soon."""
        self._waiting = json.dumps(document, ensure_ascii=False, indent=1, default=str) + "\n"
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_all())

    async def close(self) -> None:
        """Wait a moment for what is not on disk yet."""
        if self._writer is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._writer), FLUSH_DEADLINE_S)

    async def _write_all(self) -> None:
        while self._waiting is not None:
            text, self._waiting = self._waiting, None
            error = await _on_thread(_write, self.path, text)
            problem = None
            if error is not None:
                problem = f"cannot write {self.path}: {error.strerror}; make room on that disk"
            if problem != self.problem:
                self.problem = problem
                self._on_problem(problem)
        self._writer = None


def _write(path: str, text: str) -> None:
    write_atomic(path, text, survives_power_cut=False)


async def _on_thread(work: Callable[[str, str], None], path: str, text: str) -> OSError | None:
    """Do `work` on a daemon thread: unlike an executor's, it cannot hold up the process's end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[OSError | None] = loop.create_future()

    def settle(error: OSError | None) -> None:
        if not done.done():
            done.set_result(error)

    def run() -> None:
        error: OSError | None = None
        try:
            work(path, text)
        except OSError as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="state-file", daemon=True).start()
    return await done
