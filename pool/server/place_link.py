"""One memory server of a model on a device: how much it holds, and what it should free.

It is watched, and asked for its status whenever something has happened; while memory is on its way
out nothing may happen for a moment, so it is asked more often then. What it should free is asked
of it once nobody uses it, and again until it is done or not wanted any more. That has a connection
of its own, since a refusal ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gms.client import kv_messages as kv
from gms.client import messages as weights
from lockserver.client.reconnect import keep_connected
from plumbing.errors import UnderstudyError
from plumbing.pod.messages import EventMsg, StatusMsg, StatusReplyMsg, WatchMsg
from plumbing.pod.observers import ask
from plumbing.pod.paths import KV, WEIGHTS, gms_socket
from plumbing.wire.connection import Connection, Handler, connect
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message

LOOK_S = 0.002  # after an event; those of one change come together
RESTLESS_S, RESTLESS_S_MAX = 0.01, 0.5  # while memory is on its way out, or is to be freed
RETRY_S = 0.2  # after a refusal

# Of a weights' server: every byte that the kernel has not given back to the device.
WEIGHTS_PHASES = ("committed_bytes", "staging_bytes", "superseded_bytes", "releasing_bytes")
LEAVING = ("discarded", "releasing", "making")  # states of a KV server that pass by themselves

# Of a weights' server: the size of its device, and what of it is used by whomever; None: host
# memory with a limit of its own, in which there are no others.
DeviceSample = tuple[int, int | None]


class PlaceLink(Handler):
    """`on_change(link)` is called when `held_bytes` or `device` is another one."""

    def __init__(
        self,
        directory: str,
        place: str,
        tag: str,
        on_change: Callable[[PlaceLink], None],
        *,
        is_copy: bool = False,
    ) -> None:
        """`is_copy`: of weights, in host memory. It has a keeper, which maps it as long as the copy
        is in service."""
        self.place, self.tag = place, tag
        self._is_copy = is_copy
        self.held_bytes: int | None = None  # None: not known yet
        self.device: DeviceSample | None = None
        self.problem: str | None = "not connected yet"
        self.is_to_free = self.is_copy_to_stay = False
        self._is_to_forget = False  # also what stands for offloaded weights
        self._path = gms_socket(directory, place, tag)
        self._on_change = on_change
        self._catalogue = kv.CATALOGUE if tag == KV else weights.CATALOGUE
        self._conn: Connection | None = None
        self._ended = asyncio.Event()
        self._due: asyncio.TimerHandle | None = None
        self._freeing: asyncio.Task[None] | None = None
        self._restless_s = RESTLESS_S
        self._question = 0  # the newest one
        self._asked: tuple[int, int] = (0, 0)  # the newest request, and the question before it
        self.answered = 0  # the newest question that a look after it has answered

    def ask(self, number: int) -> None:
        """Look anew; `answered` is `number` then. Asked again on every connection until it is."""
        self._question = number
        self._look()

    def free(self, *, keeps_copy: bool = False) -> None:
        """Nobody needs this memory: have it freed as soon as no process maps it. `keeps_copy`: of
        weights, so that the copy in host memory stands for them."""
        self.is_to_free, self.is_copy_to_stay = True, keeps_copy
        self._is_to_forget = not keeps_copy
        self.look_soon()

    def keep(self) -> None:
        """It is needed again."""
        self.is_to_free = False

    async def run(self) -> None:
        """Stay connected until cancelled."""
        try:
            await keep_connected(self._connect, self._ended, self._failed)
        finally:
            for each in (self._due, self._freeing):
                if each is not None:
                    each.cancel()
            if self._conn is not None:
                conn, self._conn = self._conn, None
                conn.close("the pool is ending")

    def look_soon(self, delay_s: float = LOOK_S) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(delay_s, self._look)

    async def _connect(self) -> None:
        await connect(self._path, self._catalogue, self)

    def _failed(self, why: str) -> None:
        self.problem = why

    def _look(self, question: Message | None = None) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._conn is not None:
            self._asked = self._asked[0] + 1, self._question
            self._conn.send(question or StatusMsg(), self._asked[0])

    async def _free(self) -> None:
        try:
            if self.tag == KV:
                await ask(self._path, kv.CATALOGUE, kv.DropPoolMsg())
            elif self.is_copy_to_stay:
                await ask(self._path, weights.CATALOGUE, weights.OffloadMsg())
            else:
                drop = weights.DropMsg(even_if_mapped=self._is_copy)
                await ask(self._path, weights.CATALOGUE, drop)
        except UnderstudyError as error:
            self.problem = f"{self.place} is not freed yet: {error.message}"
            if error.code == "gms.no_copy":
                self.is_copy_to_stay = False  # there is nothing to come back from
            await asyncio.sleep(RETRY_S)
        self._freeing = None
        self.look_soon()

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conn = conn
        self._look(WatchMsg())

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case StatusReplyMsg():
                self.problem = None
                self._look_at(message.document, is_newest=request_id == self._asked[0])
            case EventMsg():
                self.look_soon()
            case FaultMsg():
                self.problem = message.message

    def closed(self, conn: Connection, reason: str) -> None:
        if conn is self._conn:
            self._conn = None
            self.problem = f"the connection ended: {reason}"
        self._ended.set()

    # ------------------------------------------------------------------ inside

    def _look_at(self, document: dict[str, Any], *, is_newest: bool) -> None:
        state = document["state"]
        if self.tag == KV:
            held = int(document["pool_bytes"])
            if state == "recovering":  # it does not know the size of what it has lost
                held = max(held, self.held_bytes or 0)
                if not held:
                    return self.look_soon(RESTLESS_S)
            is_restless, is_used, has_some = state in LEAVING, state != "idle", bool(held)
        else:
            held = sum(int(document[name]) for name in WEIGHTS_PHASES)
            is_restless = bool(document["releasing_bytes"] or document["superseded_bytes"])
            # What stands for offloaded weights takes nothing here, and the next load waits for it.
            is_to_forget = state == "offloaded" and self._is_to_forget
            has_some = bool(document["committed_bytes"]) or is_to_forget
            is_used = self._is_used(document["sessions"]) or not has_some
        is_news, self.held_bytes = held != self.held_bytes, held
        if is_newest and self.answered != self._asked[1]:
            self.answered, is_news = self._asked[1], True
        sample = _sample(document)
        if sample is not None and sample != self.device:
            self.device, is_news = sample, True
        if is_news:
            self._restless_s = RESTLESS_S
            self._on_change(self)
        has_some = has_some or bool(held)
        if self.is_to_free and has_some and not is_used and self._freeing is None:
            self._freeing = asyncio.get_running_loop().create_task(self._free())
        elif is_restless or (self.is_to_free and has_some and self._freeing is None):
            self.look_soon(self._restless_s)
            self._restless_s = min(1.5 * self._restless_s, RESTLESS_S_MAX)
        return None

    def _is_used(self, sessions: list[dict[str, Any]]) -> bool:
        """Whether anybody but the keeper of a copy is there."""
        return any(
            not self._is_copy or (each["engine"], each["mode"]) != (weights.COPIER, "ro")
            for each in sessions
        )


def _sample(document: dict[str, Any]) -> DeviceSample | None:
    if document["tag"] != WEIGHTS:
        return None
    return int(document["capacity_bytes"]), document.get("device_used_bytes")
