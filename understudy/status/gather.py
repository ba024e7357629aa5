"""Collects the status of every part of a pod through the sockets in its directory.

Owns which socket answers which question. Decides nothing: `view.py` says what the answers mean.
The directory is the list of parts, so a pod looks the same whoever started it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from gms.client import messages as gms_messages
from lockserver.client import messages as lock_messages
from plumbing.errors import UnderstudyError
from plumbing.part.peers import ASK_TIMEOUT_S, ask
from plumbing.wire.messages import Catalogue, Message
from understudy.status.view import pod_view

LOCKSERVER_SOCKET = "lockserver.sock"
_WEIGHTS = "_weights"  # what a device's socket is for, unless it says something else


def engine_sockets(directory: Path) -> dict[str, str]:
    """Path of each engine's control socket, by engine id."""
    return {
        path.name.removeprefix("engine_").removesuffix(".sock"): str(path)
        for path in sorted(directory.glob("engine_*.sock"))
    }


def gms_sockets(directory: Path) -> dict[str, str]:
    """Path of each device's socket, by the device: `HOST-0` of `gms_HOST-0_weights.sock`."""
    # HOST-2 before HOST-10.
    found = sorted(directory.glob("gms_*.sock"), key=lambda path: (len(path.name), path.name))
    return {path.stem.removeprefix("gms_").removesuffix(_WEIGHTS): str(path) for path in found}


def way_out(directory: Path) -> str:
    """What to do where no part of a pod answers in `directory`."""
    from understudy.manifest.place import VOLUMES  # parsers that no other look needs

    # A manifest's parts meet in a volume of its pod, or in a directory therein.
    sockets = [f"{VOLUMES}/{between}{LOCKSERVER_SOCKET}" for between in ("*/", "*/*/")]
    found = sorted({path.parent for each in sockets for path in directory.glob(each)})
    if not found:
        return "start one with `understudy up`"
    return f"the pod of an `understudy up -f` is in a volume: --dir {found[0]}"


async def status_of(
    name: str, path: str, catalogue: Catalogue, question: Message, timeout_s: float = ASK_TIMEOUT_S
) -> dict[str, Any]:
    """One part's status document, or `{"name", "error"}` with the reason why there is none."""
    try:
        answer = (await ask(path, catalogue, question, timeout_s)).message
    except UnderstudyError as error:
        return {"name": name, "error": error.message}
    document = getattr(answer, "document", None)
    if not isinstance(document, dict):
        return {"name": name, "error": f"it answered {answer.TYPE} to a question for its status"}
    return document


async def lock_status(directory: Path, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    path, question = str(directory / LOCKSERVER_SOCKET), lock_messages.StatusMsg()
    return await status_of("lockserver", path, lock_messages.CATALOGUE, question, timeout_s)


async def engine_status(engine: str, path: str, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    question = engine_messages.StatusMsg()
    return await status_of(engine, path, engine_messages.CONTROL, question, timeout_s)


async def memory_status(device: str, path: str, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    question = gms_messages.StatusMsg()
    return await status_of(device, path, gms_messages.CATALOGUE, question, timeout_s)


@dataclass(frozen=True, slots=True)
class Pids:
    """The processes that answer, as they are numbered here: what they say of themselves is their
    number in their own PID namespace. Those that are not visible here are left out."""

    lockserver: int | None
    gms: dict[str, int]  # a device's server, by device
    engines: dict[str, int]  # a supervisor, by engine

    def named(self) -> list[str]:
        """`pid 17 has lockserver`, …: every part that answers here."""
        lock = {"lockserver": self.lockserver} if self.lockserver else {}
        return [f"pid {pid} has {name}" for name, pid in (lock | self.gms | self.engines).items()]


async def pids_of(directory: Path) -> Pids:
    """Who answers in `directory`, by the kernel's word."""
    gms, engines = gms_sockets(directory), engine_sockets(directory)
    of_gms = (gms_messages.CATALOGUE, gms_messages.StatusMsg())
    of_engine = (engine_messages.CONTROL, engine_messages.StatusMsg())
    lock, *others = await asyncio.gather(
        _pid(
            str(directory / LOCKSERVER_SOCKET), lock_messages.CATALOGUE, lock_messages.StatusMsg()
        ),
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
    """The whole pod's view (`view.pod_view`), every part asked at once."""
    gms = gms_sockets(directory)
    engines = engine_sockets(directory)
    lock, *others = await asyncio.gather(
        lock_status(directory, timeout_s),
        *(memory_status(device, path, timeout_s) for device, path in gms.items()),
        *(engine_status(engine, path, timeout_s) for engine, path in engines.items()),
    )
    return pod_view(str(directory), lock, others[: len(gms)], others[len(gms) :])
