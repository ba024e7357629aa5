"""What the memory service holds, by device and model, and how much of each device others use.

Joins the words of its servers, one for each model and device, and one for each copy of weights in
host memory. Nothing is reported of a device before all of its servers have been heard: what is
unknown must not look free.

`PlaceLink` is the connection to one of them. It is watched, and asked for its status whenever
something has happened; while memory is on its way out nothing may happen for a moment, so it is
asked more often then. The link asks the server to free memory once no process uses it, and repeats
that until the memory is free or is needed again.
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
from plumbing.pod.paths import gms_socket
from plumbing.wire.connection import Connection
from plumbing.wire.messages import Message
from pool.client.link import KeptLink
from pool.core.events import AskMemory, MemoryIs, PoolEvent
from pool.core.states import HOST, EntryKind

SAMPLE_S = 1.0  # between two samples of a device
SAMPLES = 3
GRAIN_BYTES = 16 << 20  # what is less is noise: no event, and no new decision


class MemorySide:
    """`feed` gets `MemoryIs`."""

    def __init__(
        self,
        directory: str,
        models: Mapping[str, Sequence[str]],
        host_bytes: int,
        feed: Callable[[PoolEvent], None],
        beside: Callable[[str], int | None],
    ) -> None:
        """`models`: the devices of each. `host_bytes`: for copies of weights, 0 for none. `beside`:
        what engines and leases have on a device beside weights and KV memory; None while that is
        not known of one of them."""
        self._host_bytes, self._feed, self._beside = host_bytes, feed, beside
        self._places: dict[str, list[PlaceLink]] = {}  # by device, HOST included
        self._told: dict[str, MemoryIs] = {}
        self._samples: dict[str, deque[int]] = {}  # the last ones
        self._sampled_s: dict[str, float] = {}  # when the newest of them was begun
        for model, devices in models.items():
            for device in devices:
                place = place_of(device, model)
                link = PlaceLink(directory, place, self._changed)
                self._places.setdefault(device, []).append(link)
                if host_bytes:
                    copy = PlaceLink(directory, offload_device(place), self._changed, is_copy=True)
                    self._places.setdefault(HOST, []).append(copy)

    @property
    def problems(self) -> Iterator[str]:
        for link in self.links():
            if link.problem is not None:
                yield f"memory of {link.place}: {link.problem}"

    def links(self, model: str | None = None) -> Iterator[PlaceLink]:
        for links in self._places.values():
            yield from (link for link in links if model in (None, model_at(link.place)))

    def start(self) -> list[asyncio.Task[None]]:
        """Connect to all of them."""
        return [link.start() for link in self.links()]

    def sample(self) -> None:
        """Look how much of each device is used. Call this every second."""
        for device, links in self._places.items():
            if device != HOST:
                links[0].look_soon(LOOK_S)

    def ask(self, question: AskMemory) -> None:
        """Look anew at this memory, and report it with this number; have it freed."""
        for link in self.links(question.model):
            link.ask(question)

    def keep(self, model: str, *, and_kv: bool) -> None:
        """Its memory is needed again."""
        for link in self.links(model):
            kept = link.kinds if and_kv else link.kinds - {EntryKind.KV}
            link.frees -= kept
            link.awaited -= kept

    def _changed(self, link: PlaceLink) -> None:
        device = next(name for name, links in self._places.items() if link in links)
        links = self._places[device]
        if any(each.held is None for each in links):
            return
        held: dict[tuple[EntryKind, str], int] = {}
        asked: dict[str, int] = {}
        for each in links:
            model = model_at(each.place)
            if each.answered:
                asked[model] = each.answered
            found = (each.held or {}).items()
            held |= {(kind, model): size_bytes for kind, size_bytes in found if size_bytes}
        total_bytes, used_bytes = links[0].device if device != HOST else (self._host_bytes, None)
        outside_bytes = self._outside_bytes(device, used_bytes, sum(held.values()))
        said = MemoryIs(device, total_bytes, held, asked, outside_bytes)
        if said != self._told.get(device):
            self._told[device] = said
            self._feed(said)

    def _outside_bytes(self, device: str, used_bytes: int | None, held_bytes: int) -> int:
        """What is used outside the pool. An engine that starts takes memory before it
        can say so, and two samples are not of one instant: so the least of the last samples counts.
        """
        beside = self._beside(device)
        samples = self._samples.setdefault(device, deque(maxlen=SAMPLES))
        if beside is not None and used_bytes is not None:
            ours = beside + held_bytes
            now_s = asyncio.get_running_loop().time()
            if samples and now_s - self._sampled_s[device] < SAMPLE_S / 2:
                samples.pop()  # of the same moment
            else:
                self._sampled_s[device] = now_s
            samples.append(max(0, used_bytes - ours) // GRAIN_BYTES * GRAIN_BYTES)
        return min(samples, default=0)


LOOK_S = 0.002
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
    """`on_change(link)` is called when `held`, `answered` or `device` is another one."""

    def __init__(
        self,
        directory: str,
        place: str,
        on_change: Callable[[PlaceLink], None],
        *,
        is_copy: bool = False,
    ) -> None:
        """`is_copy`: of weights, in host memory. It has a keeper, which maps it as long as the copy
        is in service."""
        super().__init__(gms_socket(directory, place), weights.CATALOGUE)
        self.place = place
        self.kinds = frozenset({EntryKind.COPY} if is_copy else {EntryKind.WEIGHTS, EntryKind.KV})
        self.held: dict[EntryKind, int] | None = None  # None: not known yet
        self.device: DeviceSample = (0, None)
        self.frees: set[EntryKind] = set()  # no engine needs it: as soon as no process maps it
        self.awaited: set[EntryKind] = set()  # a model waits for this memory to be free
        self.answered = 0  # the newest question that a look after it has answered
        self._question = 0  # the newest one; a look has its number
        self._dropping: set[EntryKind] = set()  # not answered yet
        self._on_change = on_change
        self._restless_s = RESTLESS_S

    def ask(self, question: AskMemory) -> None:
        """Look anew; `answered` is the number then. Asked again on every connection until it is."""
        asked = question.kinds & self.kinds
        self.awaited |= asked
        self.frees |= asked & {EntryKind.KV}
        if question.frees_weights:
            self.frees |= self.kinds - {EntryKind.KV}
        if asked:
            self._question = question.number
        if asked or self.frees:
            self.look()

    def look(self) -> None:
        self._ask(StatusMsg())

    def _ask(self, question: Message) -> None:
        self.forget_look()
        if self.conn is not None:
            self.conn.send(question, self._question)

    def begin(self, conn: Connection) -> None:
        self._ask(WatchMsg())

    def lose(self, reason: str) -> None:
        self._dropping.clear()

    def hear(self, message: Message, request_id: int) -> None:
        match message:
            case StatusReplyMsg():
                self.problem = None
                self._look_at(message.document, request_id)
            case EventMsg() if self.awaited and self.held is not None:
                self.look()  # its memory may be free now, and a model waits for that
            case EventMsg():
                self.look_soon(CALM_LOOK_S)
            case weights.DroppedMsg():
                self._dropping.clear()
                self.look_soon(LOOK_S)

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        if self._dropping:
            self._refusal = None  # if this connection ends, then for another reason
            self.problem = f"{self.place} is not freed yet: {error.message}"
            self._dropping.clear()
            self.look_soon(RETRY_S)

    def _look_at(self, document: dict[str, Any], number: int) -> None:
        """`idle`: there is some of these kinds, and no process but the keeper of a copy has it."""
        (kind,) = self.kinds - {EntryKind.KV}
        held = {kind: sum(int(document[name]) for name in WEIGHTS_PHASES)}
        is_leaving = bool(document["releasing_bytes"] or document["superseded_bytes"])
        # An offloaded epoch takes no memory here, but the next load waits until it is dropped.
        has_some = document["committed_bytes"] or document["state"] == "offloaded"
        keeper = (weights.COPIER, "ro") if kind is EntryKind.COPY else None
        users = [each for each in document["sessions"] if (each["engine"], each["mode"]) != keeper]
        idle = {kind} if has_some and not users else set()
        if EntryKind.KV in self.kinds:
            kv = document["kv"]
            held[EntryKind.KV] = int(kv["pool_bytes"])
            if kv["state"] == "recovering":  # it does not know the size of what it has lost
                held[EntryKind.KV] = max(kv["pool_bytes"], (self.held or {}).get(EntryKind.KV, 0))
                if not held[EntryKind.KV]:
                    return self.look_soon(RESTLESS_S)
            is_leaving |= kv["state"] in LEAVING
            idle |= {EntryKind.KV} if kv["state"] == "idle" else set()
        self.awaited -= {kind for kind in held if not held[kind]}
        device = int(document["capacity_bytes"]), document["device_used_bytes"]
        answered = max(self.answered, number)
        if (held, device, answered) != (self.held, self.device, self.answered):
            self.held, self.device, self.answered = held, device, answered
            self._restless_s = RESTLESS_S
            self._on_change(self)
        for each in self.frees & idle - self._dropping:
            self._drop(each)
        stays = self.frees & {kind for kind in held if held[kind]}
        if is_leaving or stays - self._dropping:
            self.look_soon(self._restless_s)
            self._restless_s = min(1.5 * self._restless_s, RESTLESS_S_MAX)
        return None

    def _drop(self, kind: EntryKind) -> None:
        is_copy, is_kv = kind is EntryKind.COPY, kind is EntryKind.KV
        if self.conn is not None:
            self._dropping.add(kind)
            self.conn.send(weights.DropMsg(even_if_mapped=is_copy, is_kv=is_kv), 1)
