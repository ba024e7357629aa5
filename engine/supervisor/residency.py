"""What one incarnation holds while it is awake: KV memory, a socket, and the proof of both.

Owns the serving file and what must be true of it (docs/lock.md, H15 and H18): between waking and
serving every process of the backend holds it, and after a rest none does. Must not know which state
the engine is in. The surprising thing: a rest is over when the *file* is free, not when the backend
says so. A helper that is being forked shares the descriptor for a moment, so a look that finds it
held is repeated until the budget ends the engine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from engine import messages
from engine.backends import process
from engine.core import events as ev
from engine.core.events import EngineEvent, Failed
from engine.supervisor.canaries import Canaries
from engine.supervisor.channel import BackendChannel
from engine.supervisor.tree import Tree
from lockserver.client import serving
from plumbing.service import procfs
from plumbing.service.clock import SystemClock
from plumbing.service.events import EventLog
from plumbing.text import size
from plumbing.wire.fds import OwnedFd
from plumbing.wire.sockets import no_descriptors

# How soon to look at the serving file again: a fork until its exec takes a few milliseconds.
LOOK_AGAIN_S = 0.01
NOTHING_OVER = 0  # look at the serving file without sealing it: only the lock server does that


class Residency:
    """Of the incarnation `id`, from its launch until it is reaped; posts `Woken`, `Rested` and what
    failed."""

    def __init__(
        self,
        incarnation: str,
        channel: BackendChannel,
        tree: Tree,
        canaries: Canaries,
        *,
        post: Callable[[EngineEvent], None],
        log: EventLog,
    ) -> None:
        self.woken: messages.WokenMsg | None = None
        self.is_wake_asked = False
        self.problem: str | None = None  # why what the backend reported does not count yet
        self._incarnation = incarnation
        self._channel = channel
        self._tree = tree
        self._canaries = canaries
        self._post = post
        self._log = log
        self._path: str | None = None
        self._file: serving.ServingFile | None = None
        self._clock = SystemClock()
        self._asked_ms = 0.0

    def create(self, directory: str) -> dict[str, str]:
        """Make the serving file; the environment that tells the backend of it.

        Raises:
            OSError: the directory cannot be written, or there is no descriptor.
        """
        self._path, self._file = serving.create(directory, self._incarnation)
        return {
            process.SERVING_ENV: self._path,
            process.SERVING_ID_ENV: f"{self._file.dev}:{self._file.ino}",
        }

    @property
    def is_provable(self) -> bool:
        """Whether the end of serving can be proven while the processes live."""
        return self._file is not None

    @property
    def private_path(self) -> str | None:
        """Since the wake, and behind a gateway: where the backend serves."""
        return self._canaries.private_path

    # ------------------------------------------------------------------ waking

    def wake(
        self, wake: messages.WakeMsg, listener: OwnedFd, private_path: str | None, *, proven: bool
    ) -> None:
        """Takes `listener`, the socket that the backend will accept from; behind a gateway it is
        the private one, at `private_path`. `proven`: all its processes must join the file."""
        self.is_wake_asked = True
        self._canaries.private_path = private_path
        self._channel.ask(
            wake, messages.WokenMsg, lambda reply: self._woke(reply, proven=proven), [listener]
        )

    def _woke(self, woken: messages.WokenMsg, *, proven: bool) -> None:
        self.woken = woken
        self._log.record("engine.kv_begun", *_begun(woken))
        if woken.torn_blocks:
            self._log.record(
                "engine.kv_torn",
                f"{woken.torn_blocks} KV blocks were not adopted: their bytes are not what was"
                " published",
                "error",
                {"incarnation": self._incarnation, "blocks": woken.torn_blocks},
            )
        if proven:
            self._judge_woken()
        else:
            self._post(ev.Woken())

    def _judge_woken(self) -> None:
        """H15: a process without the file could serve on after a hand-over, unseen."""
        if self._tree.is_gone:
            return
        try:
            missing = self._without_file()
        except OSError as error:
            self.problem = no_descriptors("check who holds the serving file", error).message
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._judge_woken)
            return
        self.problem = None
        if missing is None:
            self._post(ev.Woken())
        else:
            self._post(Failed("serving_file_missing", missing))

    def _without_file(self) -> str | None:
        assert self._file is not None
        for name, pid in self._tree.pids().items():
            if procfs.is_alive(pid) and not procfs.holds_flock(pid, self._file.dev, self._file.ino):
                return (
                    f"{name} (pid {pid}) of the backend does not hold the serving file, so its end"
                    " of serving could not be proven"
                )
        return None

    # ------------------------------------------------------------------ resting

    def rest(self, budget_ms: int, *, keep_kv: bool) -> None:
        """Ask for all KV memory back; `Rested` comes once no process holds the file."""
        self._asked_ms = self._clock.now_ms()
        rest = messages.RestMsg(keep_kv, budget_ms)
        self._channel.ask(rest, messages.RestedMsg, lambda reply: self._did(reply, keep_kv))

    def _did(self, rested: messages.RestedMsg, keep_kv: bool) -> None:
        if rested.kv_bytes_resident:
            left = size(rested.kv_bytes_resident)
            self._post(Failed("kv_resident", f"the backend rests, but still maps {left} of KV"))
        else:
            self._judge_rested(keep_kv)

    def _judge_rested(self, keep_kv: bool) -> None:
        if self._tree.is_gone:
            return
        self.problem = self._holders()
        if self.problem is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(LOOK_AGAIN_S, self._judge_rested, keep_kv)
            return
        self.is_wake_asked, self.woken, self._canaries.private_path = False, None, None
        took_ms = round(self._clock.now_ms() - self._asked_ms, 3)
        self._log.record(
            "engine.rested",
            f"all KV memory is given back, after {took_ms:.1f} ms",
            data={"incarnation": self._incarnation, "ms": took_ms, "keep_kv": keep_kv},
        )
        self._post(ev.Rested())

    def _holders(self) -> str | None:
        """Why it is not certain that no process holds the file; None if none does."""
        assert self._path is not None
        assert self._file is not None
        name = os.path.basename(self._path)
        match serving.probe(self._path, self._file, NOTHING_OVER):
            case serving.WitnessState.FREE:
                return None
            case serving.WitnessState.HELD:
                pids = procfs.holders_of(self._file.dev, self._file.ino)
                who = f"pid {', '.join(map(str, pids))}" if pids else "a process"
                return f"the backend says that it rests, but {who} still holds {name}"
            case serving.WitnessState.UNSEEN:
                return f"this supervisor has no descriptor left to look at {name}"
            case _:
                return f"{name} is missing or was replaced, so nothing proves that the engine rests"


def _begun(woken: messages.WokenMsg) -> tuple[str, str, dict[str, Any]]:
    """Message, severity and data of the event that says with what an engine's cache begins."""
    data = {"memory": woken.kv_memory, "adopted_blocks": woken.adopted_blocks}
    what = f"with {woken.adopted_blocks} blocks of an earlier engine"
    text = f"the KV cache begins {what if woken.adopted_blocks else 'empty'}"
    if woken.kv_memory == "private":
        text += " in private memory, which ends with this engine"
    why = f": {woken.kv_note}" if woken.kv_note else ""
    return text + why, "info", {**data, "note": woken.kv_note or None}
