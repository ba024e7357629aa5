"""What a scene is given and what it yields, the openings that several share, and the words in
which evidence and fixes name processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from plumbing.wire.blocking import BlockingClient
from tests.lockserver.engines import EngineProcess
from tests.lockserver.processes import ServerProcess

QUICK = ("--silent-ms", "300", "--window-ms", "50")


@dataclass
class Scene:
    """What a state is made of: a pod's directory, and what starts servers and engines in it, which
    end with the test."""

    directory: str
    server: Callable[..., ServerProcess]
    engine: Callable[..., EngineProcess]

    def held(self, *flags: str, **options: Any) -> tuple[ServerProcess, EngineProcess]:
        """A server with `flags`, and engine-0, a process of its own, which holds `active`."""
        server = self.server(*flags)
        holder = self.engine("engine-0", **options)
        holder.granted()
        return server, holder

    def witness(self) -> str:
        """The name of engine-0's only witness."""
        names = os.listdir(self.directory)
        (name,) = [each for each in names if each.startswith("witness_engine-0_")]
        return name


@dataclass
class Told:
    """What must be reported. All words of `evidence` and `fix` must occur."""

    reason: str
    engine: str | None
    evidence: tuple[str, ...]
    fix: tuple[str, ...]
    lock: str = "active"
    token: int | None = None
    pid: int | None = None
    is_fault: bool = True
    by_http: ServerProcess | None = None
    by_client: BlockingClient | None = None  # where no other one is accepted


def backends_of(engine: EngineProcess) -> list[int]:
    """Without its supervisor, in the order in which a fix names them."""
    return sorted(engine.pids[1:])


def with_names(pids: Iterable[int]) -> tuple[str, ...]:
    """As evidence names those that hold a witness: each with its command's name, which is left
    open here."""
    return tuple(f"pid {pid} (" for pid in pids)


def lives(supervisor_pid: int) -> str:
    """As evidence states that a supervisor is alive: its pidfd is not readable."""
    return f"(pid {supervisor_pid}) is alive"


def kills(*pids: int) -> str:
    return f"kill -9 {' '.join(map(str, pids))}"
