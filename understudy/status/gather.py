"""Collects the status of every part of a pod through the sockets in its directory.

Decides nothing: `view.py` says what the answers mean. The directory is the list of parts, so a pod
looks the same whatever started it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from gms.client import messages as gms_messages
from lockserver.client import messages as lock_messages
from plumbing.errors import UnderstudyError
from plumbing.part.paths import (
    LOCKSERVER_SOCKET,
    engine_sockets,
    engine_states,
    gms_sockets,
    lockserver_socket,
)
from plumbing.part.peers import ASK_TIMEOUT_S, ask
from plumbing.service.files import read_json
from plumbing.wire.messages import Catalogue, Message
from understudy.status.view import pod_view


def start_hint(directory: Path) -> str:
    """What to do when no part of a pod answers in `directory`."""
    from understudy.manifest.placement import VOLUMES  # loads parsers that nothing else here needs

    # The parts of a manifest share a volume of its pod, or a directory in one.
    sockets = [f"{VOLUMES}/{between}{LOCKSERVER_SOCKET}" for between in ("*/", "*/*/")]
    found = sorted({path.parent for each in sockets for path in directory.glob(each)})
    if not found:
        return "start one with `understudy up`"
    return f"`understudy up -f` keeps its pod in a volume: use --dir {found[0]}"


def states_on_file(directory: Path) -> list[dict[str, Any]]:
    """The document in each engine's state file that can be read."""
    found = []
    for path in engine_states(directory):
        with contextlib.suppress(UnderstudyError, OSError):  # `engine status` reports why
            found.append(read_json(str(path)))
    return [document for document in found if document is not None]


async def status_of(
    name: str, path: str, catalogue: Catalogue, question: Message, timeout_s: float = ASK_TIMEOUT_S
) -> dict[str, Any]:
    """One part's status document, or `{"name", "error"}` with the reason for its absence."""
    try:
        answer = (await ask(path, catalogue, question, timeout_s)).message
    except UnderstudyError as error:
        return {"name": name, "error": error.message}
    document = getattr(answer, "document", None)
    if not isinstance(document, dict):
        return {"name": name, "error": f"it answered a status request with {answer.TYPE}"}
    return document


async def lock_status(directory: Path, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    path, question = lockserver_socket(str(directory)), lock_messages.StatusMsg()
    return await status_of("lockserver", path, lock_messages.CATALOGUE, question, timeout_s)


async def engine_status(engine: str, path: str, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    question = engine_messages.StatusMsg()
    return await status_of(engine, path, engine_messages.CONTROL, question, timeout_s)


async def memory_status(device: str, path: str, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    question = gms_messages.StatusMsg()
    return await status_of(device, path, gms_messages.CATALOGUE, question, timeout_s)


@dataclass(frozen=True, slots=True)
class Pids:
    """The pids of the parts that answer, as this process sees them: a part knows only its pid in
    its own PID namespace. Processes that are not visible here are left out."""

    lockserver: int | None
    gms: dict[str, int]  # a device's server, by device
    engines: dict[str, int]  # a supervisor, by engine

    def named(self) -> list[str]:
        """`pid 17 is lockserver`, …: every part that answers here."""
        lock = {"lockserver": self.lockserver} if self.lockserver else {}
        return [f"pid {pid} is {name}" for name, pid in (lock | self.gms | self.engines).items()]


async def pids_of(directory: Path) -> Pids:
    """The pids of the parts that answer in `directory`, from the kernel."""
    gms, engines = gms_sockets(directory), engine_sockets(directory)
    of_gms = (gms_messages.CATALOGUE, gms_messages.StatusMsg())
    of_engine = (engine_messages.CONTROL, engine_messages.StatusMsg())
    lock, *others = await asyncio.gather(
        _pid(lockserver_socket(str(directory)), lock_messages.CATALOGUE, lock_messages.StatusMsg()),
        *(_pid(path, *of_gms) for path in gms.values()),
        *(_pid(path, *of_engine) for path in engines.values()),
    )
    servers = zip(gms, others[: len(gms)], strict=True)
    supervisors = zip(engines, others[len(gms) :], strict=True)
    return Pids(
        lock or None,
        {device: pid for device, pid in servers if pid},
        {engine: pid for engine, pid in supervisors if pid},
    )


async def _pid(path: str, catalogue: Catalogue, question: Message) -> int:
    try:
        return (await ask(path, catalogue, question)).pid
    except UnderstudyError:
        return 0


async def gather(directory: Path, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    """The whole pod's view (`view.pod_view`): every part is asked once, all at the same time."""
    gms = gms_sockets(directory)
    engines = engine_sockets(directory)
    lock, *others = await asyncio.gather(
        lock_status(directory, timeout_s),
        *(memory_status(device, path, timeout_s) for device, path in gms.items()),
        *(engine_status(engine, path, timeout_s) for engine, path in engines.items()),
    )
    return pod_view(str(directory), lock, others[: len(gms)], others[len(gms) :])
