"""The engine's state file: what outlives the supervisor, and what other processes may look up.

Owns `engine_<id>.json`: the status document, whether any incarnation ever reached standby in this
pod, and the counters that must survive a restart. It outlives processes, not the machine, so
nothing is synced to disk. Written on a thread, because a disk may hang; only the newest content
waits. A full disk is reported and retried: nothing here may stop an engine.

`serving_engine` reads the files of the other engines on this machine: it finds the one that holds
the lock, whether or not the lock server answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.lifecycle import HOLDING
from plumbing.errors import UnderstudyError, is_shortage
from plumbing.pod.messages import GoalGeneration, Tier
from plumbing.pod.paths import engine_socket, engine_state, engine_states
from plumbing.service.events import EventLog
from plumbing.service.files import read_json, write_atomic
from plumbing.text import to_json
from plumbing.wire.sockets import no_descriptors

FLUSH_DEADLINE_S = 2.0  # at the end of the process: a disk that hangs must not keep it
RETRY_S = 2.0  # a write that failed; a full disk or a shortage of descriptors lasts longer


@dataclass
class SavedState:
    """The facts that a later supervisor of the same engine must know."""

    was_standby: bool = False
    was_cold: bool = False  # on purpose; then its startup probe has passed
    number: int = 0  # launches so far
    failover_attempts: int = 0
    failover_successes: int = 0
    goal: str = Tier.AWAKE.value  # the tier that the engine was last asked for
    generation: str = ""  # of the newest goal of a pool, as `to_text` writes it

    @property
    def newest(self) -> GoalGeneration | None:
        return from_text(self.generation)

    def checked(self) -> SavedState:
        """Itself.

        Raises:
            ValueError: no engine can have that goal, or no pool gave it that generation.
        """
        Tier(self.goal)
        from_text(self.generation)
        return self


def load(path: str, goal: Tier = Tier.AWAKE) -> tuple[SavedState, str | None]:
    """What `path` holds, and what is wrong with the file, if anything: then it is a new state.
    `goal`: of an engine that was never given one."""
    fresh = vars(SavedState(goal=goal.value, was_cold=goal is Tier.COLD))
    try:
        document = read_json(path) or {}
        saved = document.get("memory", {})
        return SavedState(
            **{name: type(default)(saved.get(name, default)) for name, default in fresh.items()}
        ).checked(), None
    except (UnderstudyError, OSError, TypeError, ValueError, AttributeError) as error:
        return SavedState(**fresh), str(error)


def to_text(generation: GoalGeneration | None) -> str:
    """`ERA.START.NUMBER`; "" of none."""
    if generation is None:
        return ""
    return f"{generation.era}.{generation.start}.{generation.number}"


def from_text(text: str) -> GoalGeneration | None:
    """What `to_text` wrote.

    Raises:
        ValueError: it did not.
    """
    if not text:
        return None
    era, start, number = text.rsplit(".", 2)
    return GoalGeneration(era, int(start), int(number))


def is_active(directory: str, engine: str, token: int) -> bool:
    """Whether the state file of `engine` says that it is active under `token`."""
    try:
        document = read_json(engine_state(directory, engine)) or {}
        return bool(document["engine"]["state"] == "active" and document["lock"]["token"] == token)
    except (UnderstudyError, OSError, KeyError, TypeError):
        return False


def is_holding(directory: str, engine: str) -> bool:
    """Whether the state file of `engine` says that it holds the lock."""
    try:
        document = read_json(engine_state(directory, engine)) or {}
        return bool(document["engine"]["state"] in HOLDING)
    except (UnderstudyError, OSError, KeyError, TypeError):
        return False


class EngineStateFile:
    """Writes documents one after another; a newer one replaces the one that waits."""

    def __init__(self, path: str, log: EventLog) -> None:
        self.path = path
        self.problem: str | None = None
        self._log = log
        self._waiting: str | None = None
        self._writer: asyncio.Task[None] | None = None
        self._is_closing = asyncio.Event()

    def write(self, document: dict[str, Any]) -> None:
        """Write `document` soon."""
        self._waiting = to_json(document, indent=1) + "\n"
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_all())

    async def close(self) -> None:
        """Wait a moment for what is not written yet."""
        self._is_closing.set()
        if self._writer is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._writer), FLUSH_DEADLINE_S)

    async def _write_all(self) -> None:
        while self._waiting is not None:
            text, self._waiting = self._waiting, None
            error = await _write_on_thread(self.path, text)
            self._report(error)
            if error is not None and not self._is_closing.is_set():
                self._waiting = self._waiting or text
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_closing.wait(), RETRY_S)
        self._writer = None

    def _report(self, error: OSError | None) -> None:
        problem = None
        if error is not None:
            problem = f"cannot write {self.path}: {error.strerror}; free space on that disk"
            if is_shortage(error) or isinstance(error, BlockingIOError):
                problem = no_descriptors(f"write {self.path}", error).message
        if problem != self.problem:
            self.problem = problem
            severity = "info" if problem is None else "warning"
            text = problem or "the state file can be written again"
            self._log.record("engine.state_file", text, severity)


async def _write_on_thread(path: str, text: str) -> OSError | None:
    """On a daemon thread: unlike an executor's, it cannot delay the exit of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[OSError | None] = loop.create_future()

    def settle(error: OSError | None) -> None:
        if not done.done():
            done.set_result(error)

    def run() -> None:
        error: OSError | None = None
        try:
            write_atomic(path, text, survives_power_cut=False)
        except OSError as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, error)

    try:
        threading.Thread(target=run, name="state-file", daemon=True).start()
    except RuntimeError:  # Python says no more
        return BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return await done


def serving_engine(directory: str, engine: str) -> str | None:
    """The other engine that holds the lock and needs this machine, by its state file.

    A supervisor that has just started launches before it is connected to the lock server, so it
    cannot ask there. A file that a dead supervisor has left does not count.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):  # no descriptor left to look
        names = [path.stem.removeprefix("engine_") for path in engine_states(Path(directory))]
    for name in names:
        is_other = name != engine and is_holding(directory, name)
        if is_other and _is_listening(engine_socket(directory, name)):
            return name
    return None


def _is_listening(path: str) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            sock.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        pass  # too busy to accept, or we have no descriptor left: not a proof of its end
    return True
