"""`understudy events`: what happens in a pod, from all its parts, as it happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from lockserver.client import messages as lock_messages
from understudy.errors import UnreachableError
from understudy.pod.gather import LOCKSERVER_SOCKET, engine_sockets
from understudy.pod.peers import Watch
from understudy.wire import observe
from understudy.wire.messages import Message

Record = dict[str, Any]


async def follow_events(directory: Path, heard: Callable[[Record], None]) -> None:
    """Call `heard` with every event of the lock server and the engines, until cancelled.

    Raises:
        UnreachableError: `pod.no_sockets`, there is no pod in `directory`.
    """

    def hear(message: Message) -> None:
        if isinstance(message, observe.EventRecord):
            heard(message.record)

    lockserver, engines = directory / LOCKSERVER_SOCKET, engine_sockets(directory)
    if not lockserver.exists() and not engines:
        raise UnreachableError(
            "pod.no_sockets", f"there is no pod in {directory}; start one with `understudy up`"
        )
    watches = [Watch(str(lockserver), lock_messages.CATALOGUE, observe.Watch(), hear)]
    watches += [
        Watch(path, engine_messages.CONTROL, observe.Watch(), hear) for path in engines.values()
    ]
    try:
        await asyncio.Event().wait()
    finally:
        for watch in watches:
            await watch.close()
