"""The engine's state file: what outlives the supervisor, and what other processes may look up.

Owns `engine_<id>.json`: the status document, whether any incarnation ever reached standby in this
pod, and the counters that must survive a restart. It outlives processes, not the machine, so
nothing is synced to disk. Written on a thread, because a disk may hang; only the newest content
waits. A full disk is reported and retried: nothing here may stop an engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from engine.schema import EngineMemory
from engine.supervisor.hub import Background, EngineHub, shortage
from plumbing.errors import UnderstudyError, is_shortage
from plumbing.pod.messages import GoalGeneration, Tier
from plumbing.pod.paths import engine_state
from plumbing.service.files import read_json, write_atomic
from plumbing.text import to_json

SOON_S = 0.02
RETRY_MS = 2_000.0  # a write that failed; a full disk or a shortage of descriptors lasts longer


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
        self._waiting: deque[str] = deque(maxlen=1)
        self._make: Callable[[], dict[str, Any]] | None = None  # what is due soon
        self._urgent: tuple[object, ...] = ()  # on file, or on its way there
        self._is_writing = False
        self._thread = Background("state-file")
        self._thread.start()

    def write(self, make: Callable[[], dict[str, Any]], urgent: tuple[object, ...]) -> None:
        """Write what `make` says soon; at once if what is `urgent` has changed."""
        if urgent == self._urgent and self._make is None:
            asyncio.get_running_loop().call_later(SOON_S, self._take)
        self._make = make
        if urgent != self._urgent:
            self._urgent = urgent
            self._take()

    def _take(self) -> None:
        make, self._make = self._make, None
        if make is not None:
            self._waiting.append(to_json(make(), indent=1) + "\n")
            self._go_on()

    async def close(self) -> None:
        """Wait a moment for what is not written yet."""
        self._take()
        self._thread.put(self._write)
        await self._thread.close()

    def _go_on(self) -> None:
        if self._waiting and not self._is_writing:
            self._is_writing = True
            self._thread.put(self._write)

    def _write(self) -> None:
        """On the thread."""
        if not self._waiting:
            return
        text, problem = self._waiting.pop(), None
        try:
            write_atomic(self.path, text, survives_power_cut=False)
        except OSError as error:
            problem = f"cannot write {self.path}: {error.strerror}; free space on that disk"
            if is_shortage(error):
                problem = shortage(f"write {self.path}", error)
        self._thread.call(lambda: self._wrote(text, problem))

    def _wrote(self, text: str, problem: str | None) -> None:
        self._is_writing = False
        if problem != self.problem:
            self.problem = problem
            severity = "info" if problem is None else "warning"
            said = problem or "the state file can be written again"
            self._hub.log.record("engine.state_file", said, severity)
        if problem is None:
            self._go_on()
            return
        if not self._waiting:
            self._waiting.append(text)
        self._hub.after("state file", RETRY_MS, self._go_on)


def word_of(directory: str, engine: str) -> tuple[str, int]:
    """State and token of `engine` by its state file; "" where that cannot be read."""
    try:
        document = read_json(engine_state(directory, engine)) or {}
        return str(document["engine"]["state"]), int(document["lock"]["token"])
    except (UnderstudyError, OSError, KeyError, TypeError, ValueError):
        return "", 0
