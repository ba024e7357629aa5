"""The engine's state file: what outlives the supervisor, and what other processes may look up.

Owns `engine_<id>.json`: the status document, whether any incarnation ever reached standby in this
pod, and the counters that must survive a restart. It outlives processes, not the machine, so
nothing is synced to disk. Written on a thread, because a disk may hang; only the newest content
waits. A full disk is reported and retried: nothing here may stop an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from engine.schema import EngineMemory
from engine.supervisor.hub import EngineHub, shortage
from plumbing.errors import UnderstudyError, is_shortage
from plumbing.pod.messages import GoalGeneration, Tier
from plumbing.pod.paths import engine_state
from plumbing.service.files import read_json, write_atomic
from plumbing.text import to_json

SOON_S = 0.02
CLOSE_DEADLINE_S = 2.0  # a disk that hangs must not keep the process
RETRY_S = 2.0  # a write that failed; a full disk or a shortage of descriptors lasts longer


def load(path: str, goal: Tier = Tier.AWAKE) -> tuple[EngineMemory, str | None]:
    """What `path` holds, and what is wrong with the file, if anything: then it is a new state.
    `goal`: of an engine that was never given one."""
    fresh = EngineMemory(goal=goal.value, was_cold=goal is Tier.COLD)
    try:
        saved = (read_json(path) or {}).get("memory", {})
        found = msgspec.convert(msgspec.structs.asdict(fresh) | saved, EngineMemory)
        Tier(found.goal)
        from_text(found.generation)
        return found, None
    except (UnderstudyError, OSError, TypeError, ValueError, msgspec.MsgspecError) as error:
        return fresh, str(error)


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


class EngineStateFile:
    """Writes documents one after another; a newer one replaces the one that waits.

    Whatever changes within a moment is one document: to make one takes longer than a step of a
    wake, which needs the CPU itself. A new goal or launch does not wait: the next supervisor
    needs it.
    """

    def __init__(self, hub: EngineHub) -> None:
        self.path = engine_state(hub.settings.directory, hub.settings.engine)
        self.problem: str | None = None
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._make: Callable[[], dict[str, Any]] | None = None  # what is due soon
        self._urgent: tuple[object, ...] = ()  # on file, or on its way there
        self._newest: str | None = None
        self._is_closing = False
        self._is_due = threading.Event()
        # It cannot delay the exit.
        self._thread = threading.Thread(target=self._run, name="state-file", daemon=True)
        self._thread.start()

    def write(self, make: Callable[[], dict[str, Any]], urgent: tuple[object, ...]) -> None:
        """Write what `make` says soon; at once if what is `urgent` has changed."""
        if urgent == self._urgent and self._make is None:
            self._loop.call_later(SOON_S, self._take)
        self._make = make
        if urgent != self._urgent:
            self._urgent = urgent
            self._take()

    def close(self) -> None:
        """Wait a moment for what is not written yet."""
        self._take()
        self._is_closing = True
        self._is_due.set()
        self._thread.join(CLOSE_DEADLINE_S)

    def _take(self) -> None:
        make, self._make = self._make, None
        if make is not None:
            self._newest = to_json(make(), indent=1) + "\n"
            self._is_due.set()

    def _run(self) -> None:
        """On the thread. What cannot be written is tried again."""
        error: Exception | None = None
        while self._is_due.is_set() or not self._is_closing:
            self._is_due.wait(RETRY_S if error is not None else None)
            self._is_due.clear()
            error = None
            try:
                if self._newest is not None:
                    write_atomic(self.path, self._newest)
            except Exception as failure:
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._wrote, error)

    def _wrote(self, error: Exception | None) -> None:
        problem = self._why(error) if error is not None else None
        if problem != self.problem:
            self.problem = problem
            severity = "info" if problem is None else "warning"
            said = problem or "the state file can be written again"
            self._hub.log.record("engine.state_file", said, severity)

    def _why(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            raise error  # our own fault, which must not stay on the thread
        if is_shortage(error):
            return shortage(f"write {self.path}", error)
        return f"cannot write {self.path}: {error.strerror}; free space on that disk"
