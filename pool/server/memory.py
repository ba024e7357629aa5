"""What the memory service holds, by device and model, and how much of each device others use.

Joins the words of its servers, one for each model, device and kind of memory. Nothing is reported
of a device before all of its servers have been heard: what is unknown must not look free.

`PlaceLink` is the connection to one memory server of a model on a device. It is watched, and asked
for its status whenever something has happened; while memory is on its way out nothing may happen
for a moment, so it is asked more often then. What it should free is asked of it once it is not
used, and again until it is done or not wanted any more. That has a connection of its own, since a
refusal ends it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gms.client import messages as weights
from gms.client import offload_device
from plumbing.errors import UnderstudyError
from plumbing.pod.messages import EventMsg, StatusMsg, StatusReplyMsg, WatchMsg
from plumbing.pod.models import model_at, place_of
from plumbing.pod.observers import ask
from plumbing.pod.paths import KV, WEIGHTS, gms_socket
from plumbing.wire.connection import Connection
from plumbing.wire.messages import Message
from pool.client.link import KeptLink
from pool.core.events import AskMemory, DeviceIs, MemoryIs, PoolEvent
from pool.core.states import HOST, EntryKind

SAMPLE_S = 1.0  # between two samples of a device
SAMPLES = 3
GRAIN_BYTES = 16 << 20  # what is less is noise: no event, and no new decision


class MemorySide:
    """`feed` gets `MemoryIs` and `DeviceIs`."""

    def __init__(
        self,
        directory: str,
        models: Mapping[str, Sequence[str]],
        host_bytes: int,
        feed: Callable[[PoolEvent], None],
        bases: Callable[[str], int | None],
    ) -> None:
        """`models`: the devices of each. `host_bytes`: for copies of weights, 0 for none. `bases`:
        what engines have on a device beside weights and KV memory; None while that is not known of
        one of them."""
        self._host_bytes, self._feed, self._bases = host_bytes, feed, bases
        self._places: dict[str, list[PlaceLink]] = {}  # by device, HOST included
        self._told: dict[tuple[str, type[PoolEvent]], PoolEvent] = {}
        self._outside: dict[str, deque[int]] = {}  # the last samples
        self._sampled_s: dict[str, float] = {}  # when the newest of them was begun
        for model, devices in models.items():
            for device in devices:
                place = place_of(device, model)
                links = self._places.setdefault(device, [])
                links += [PlaceLink(directory, place, tag, self._changed) for tag in (WEIGHTS, KV)]
                if host_bytes:
                    copy = offload_device(place)
                    link = PlaceLink(directory, copy, WEIGHTS, self._changed, is_copy=True)
                    self._places.setdefault(HOST, []).append(link)

    @property
    def problems(self) -> Iterator[str]:
        for link in self.links():
            if link.problem is not None:
                yield f"memory of {link.place} ({link.tag}): {link.problem}"

    def links(self, model: str | None = None) -> Iterator[PlaceLink]:
        for links in self._places.values():
            yield from (link for link in links if model in (None, model_at(link.place)))

    def start(self) -> list[asyncio.Task[None]]:
        """Connect to all of them."""
        if self._host_bytes:
            self._feed(DeviceIs(HOST, self._host_bytes, 0))
        return [link.start() for link in self.links()]

    def sample(self) -> None:
        """Look how much of each device is used. Call this every second."""
        for device, links in self._places.items():
            if device != HOST:
                links[0].look_soon(LOOK_S)

    def ask(self, question: AskMemory) -> None:
        """Look anew at this memory, and report it with this number; have it freed."""
        for link in self.links(question.model):
            is_asked = link.kind in question.kinds
            link.is_to_free |= is_asked if link.tag == KV else question.frees_weights
            if is_asked:
                link.ask(question.number)
            elif link.is_to_free:
                link.look()

    def keep(self, model: str, *, and_kv: bool) -> None:
        """Its memory is needed again."""
        for link in self.links(model):
            if and_kv or link.tag != KV:
                link.is_to_free = link.is_awaited = False

    def _changed(self, link: PlaceLink) -> None:
        device = next(name for name, links in self._places.items() if link in links)
        links = self._places[device]
        if all(each.held_bytes is not None for each in links):
            self._tell_memory(device, links)
            sample = links[0].device
            if device != HOST and sample is not None:
                self._tell_device(device, links, *sample)

    def _tell_memory(self, device: str, links: Sequence[PlaceLink]) -> None:
        held: dict[tuple[EntryKind, str], int] = {}
        asked: dict[tuple[EntryKind, str], int] = {}
        for link in links:
            model = model_at(link.place)
            if link.answered:
                asked[link.kind, model] = link.answered
            if link.held_bytes:
                held[link.kind, model] = link.held_bytes
        self._tell(MemoryIs(device, held, asked))

    def _tell(self, said: MemoryIs | DeviceIs) -> None:
        if said != self._told.get((said.device, type(said))):
            self._told[said.device, type(said)] = said
            self._feed(said)

    def _tell_device(
        self, device: str, links: Sequence[PlaceLink], total_bytes: int, used_bytes: int | None
    ) -> None:
        """What is used outside the pool. An engine that starts takes memory before it
        can say so, and two samples are not of one instant: so the least of the last samples counts.
        """
        bases = self._bases(device)
        samples = self._outside.setdefault(device, deque(maxlen=SAMPLES))
        if bases is not None and used_bytes is not None:
            ours = bases + sum(link.held_bytes or 0 for link in links)
            now_s = asyncio.get_running_loop().time()
            if samples and now_s - self._sampled_s[device] < SAMPLE_S / 2:
                samples.pop()  # of the same moment
            else:
                self._sampled_s[device] = now_s
            samples.append(max(0, used_bytes - ours) // GRAIN_BYTES * GRAIN_BYTES)
        self._tell(DeviceIs(device, total_bytes, min(samples, default=0)))


LOOK_S = 0.002  # after an event; those of one change come together
# Where no model waits for memory to leave: as while a model wakes, which needs the CPU itself.
CALM_LOOK_S = 0.05
RESTLESS_S, RESTLESS_S_MAX = 0.01, 0.5  # while memory is on its way out, or is to be freed
RETRY_S = 0.2  # after a refusal

# Of a weights' server: every byte that the kernel has not given back to the device.
WEIGHTS_PHASES = ("committed_bytes", "staging_bytes", "superseded_bytes", "releasing_bytes")
LEAVING = ("discarded", "releasing", "making")  # states of a KV server that pass by themselves

# Of a weights' server: the size of its device, and what of it is used by whomever; None: host
# memory with a limit of its own, in which there are no others.
DeviceSample = tuple[int, int | None]


class PlaceLink(KeptLink):
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
        super().__init__(gms_socket(directory, place, tag), weights.CATALOGUE)
        self.place, self.tag = place, tag
        self.kind = EntryKind.COPY if is_copy else EntryKind(tag)
        self.held_bytes: int | None = None  # None: not known yet
        self.device: DeviceSample | None = None
        self.is_to_free = False  # no engine needs it: as soon as no process maps it
        self._on_change = on_change
        self._freeing: asyncio.Task[None] | None = None
        self._restless_s = RESTLESS_S
        self._question = 0  # the newest one
        self.is_awaited = False  # a model waits for this memory to be free
        self._asked: tuple[int, int] = (0, 0)  # the newest request, and the question before it
        self.answered = 0  # the newest question that a look after it has answered

    def ask(self, number: int) -> None:
        """Look anew; `answered` is `number` then. Asked again on every connection until it is."""
        self._question, self.is_awaited = number, True
        self.look()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        try:
            await super().run()
        finally:
            if self._freeing is not None:
                self._freeing.cancel()

    def look(self) -> None:
        self._ask(StatusMsg())

    def _ask(self, question: Message) -> None:
        self.forget_look()
        if self.conn is not None:
            self._asked = self._asked[0] + 1, self._question
            self.conn.send(question, self._asked[0])

    async def _free(self) -> None:
        drop = (
            weights.DropPoolMsg()
            if self.tag == KV
            else weights.DropMsg(even_if_mapped=self.kind is EntryKind.COPY)
        )
        try:
            await ask(self.path, weights.CATALOGUE, drop)
        except UnderstudyError as error:
            self.problem = f"{self.place} is not freed yet: {error.message}"
            await asyncio.sleep(RETRY_S)
        self._freeing = None
        self.look_soon(LOOK_S)

    def begin(self, conn: Connection) -> None:
        self._ask(WatchMsg())

    def hear(self, message: Message, request_id: int) -> None:
        match message:
            case StatusReplyMsg():
                self.problem = None
                self._look_at(message.document, is_newest=request_id == self._asked[0])
            case EventMsg():
                is_calm = self.held_bytes is not None and not (self.is_awaited or self.is_to_free)
                self.look_soon(CALM_LOOK_S if is_calm else LOOK_S)

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
            is_to_forget = state == "offloaded" and self.is_to_free
            has_some = bool(document["committed_bytes"]) or is_to_forget
            is_used = self._is_used(document["sessions"]) or not has_some
        is_news, self.held_bytes = held != self.held_bytes, held
        self.is_awaited &= held > 0
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
            self.kind is not EntryKind.COPY
            or (each["engine"], each["mode"]) != (weights.COPIER, "ro")
            for each in sessions
        )


def _sample(document: dict[str, Any]) -> DeviceSample | None:
    if document["tag"] != WEIGHTS:
        return None
    return int(document["capacity_bytes"]), document.get("device_used_bytes")
