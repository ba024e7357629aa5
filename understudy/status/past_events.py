"""What the parts of a pod remember: each keeps its last thousand events, while it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plumbing.part import observe
from plumbing.part.peers import ASK_TIMEOUT_S, Watch
from plumbing.wire.messages import Message
from understudy.status.follow import Record, no_pod, sources


class _Kept:
    """What one part remembers; complete once the newest that its status speaks of is here."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.is_complete = asyncio.Event()
        self._newest_id: int | None = None

    def told(self, message: Message) -> None:
        if isinstance(message, observe.StatusReplyMsg):
            self._newest_id = message.document["as_of_event_id"]
        elif isinstance(message, observe.EventMsg):
            self.records.append(message.record)
        last_id = self.records[-1]["id"] if self.records else 0
        if self._newest_id is not None and last_id >= self._newest_id:
            self.is_complete.set()


async def past_events(directory: Path, after: Mapping[str, int] | None = None) -> list[Record]:
    """What every part that answers remembers, in the order in which it happened.

    `after`: of the parts that it names only, and only what came after these ids.

    Raises:
        UnreachableError: `pod.no_sockets`, there is no pod in `directory`.
    """
    found = sources(directory)
    if not found:
        raise no_pod(directory)
    since = dict.fromkeys((each.name for each in found.values()), 0) if after is None else after
    kept: list[_Kept] = []
    watches: list[Watch] = []
    for path, source in found.items():
        if source.name in since:
            each = _Kept()
            kept.append(each)
            question = source.ask(since[source.name])
            watches.append(Watch(path, source.catalogue, question, each.told, each.is_complete.set))
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            for each in kept:
                await each.is_complete.wait()
    except TimeoutError:
        pass  # one that hangs does not keep the others' from people
    finally:
        for watch in watches:
            await watch.close()
    records = [record for each in kept for record in each.records]
    return sorted(records, key=lambda record: float(record["mono_ms"]))


async def last_event(directory: Path, view: Mapping[str, Any]) -> Record | None:
    """The newest event of the parts that have answered in `view`."""
    newest = {"lockserver": view["lockserver"].get("as_of_event_id")}
    newest |= {f"gms-{each.get('device_uuid')}": each.get("as_of_event_id") for each in view["gms"]}
    for part in view["engines"]:
        newest[str((part.get("engine") or {}).get("id"))] = part.get("as_of_event_id")
    after = {name: int(id_) - 1 for name, id_ in newest.items() if id_}
    records = await past_events(directory, after) if after else []
    return records[-1] if records else None
