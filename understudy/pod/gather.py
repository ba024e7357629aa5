"""Collects the status of every part of a pod through the sockets in its directory.

Owns which socket answers which question. Decides nothing: `view.py` says what the answers mean.
The directory is the list of parts, so a pod looks the same whoever started it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from gms.client import messages as gms_messages
from lockserver.client import messages as lock_messages
from understudy.errors import UnderstudyError
from understudy.pod.peers import ASK_TIMEOUT_S, ask
from understudy.pod.view import pod_view
from understudy.wire.messages import Catalogue, Message

LOCKSERVER_SOCKET = "lockserver.sock"


def engine_sockets(directory: Path) -> dict[str, str]:
    """Path of each engine's control socket, by engine id."""
    return {
        path.name.removeprefix("engine_").removesuffix(".sock"): str(path)
        for path in sorted(directory.glob("engine_*.sock"))
    }


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


async def lock_status(directory: Path) -> dict[str, Any]:
    path = str(directory / LOCKSERVER_SOCKET)
    return await status_of("lockserver", path, lock_messages.CATALOGUE, lock_messages.Status())


async def engine_status(engine: str, path: str) -> dict[str, Any]:
    return await status_of(engine, path, engine_messages.CONTROL, engine_messages.Status())


async def gather(directory: Path) -> dict[str, Any]:
    """The whole pod's view (`view.pod_view`), every part asked at once."""
    # HOST-2 before HOST-10.
    gms = sorted(directory.glob("gms_*.sock"), key=lambda path: (len(path.name), path.name))
    engines = engine_sockets(directory)
    lock, *others = await asyncio.gather(
        lock_status(directory),
        *(
            status_of(path.stem, str(path), gms_messages.CATALOGUE, gms_messages.Status())
            for path in gms
        ),
        *(engine_status(engine, path) for engine, path in engines.items()),
    )
    return pod_view(str(directory), lock, others[: len(gms)], others[len(gms) :])
