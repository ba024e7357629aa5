"""What the memory service holds, by device and model, and how much of each device others use.

Joins the words of its servers, one for each model, device and kind of memory. Nothing is reported
of a device before all of its servers have been heard: what is unknown must not look free.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from gms.client import offload_device
from plumbing.pod.models import model_at, place_of
from plumbing.pod.paths import KV, WEIGHTS
from pool.core.events import DeviceIs, MemoryIs, PoolEvent
from pool.core.states import HOST
from pool.server.place_link import PlaceLink

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
        """
        Args:
            models: the devices of each.
            host_bytes: for copies of weights, 0 for none.
            bases: what engines have on a device beside weights and KV memory; None while that is
                not known of one of them.
        """
        self._host_bytes, self._feed, self._bases = host_bytes, feed, bases
        self._places: dict[str, list[PlaceLink]] = {}  # by device, HOST included
        self._told: dict[str, MemoryIs] = {}
        self._outside: dict[str, deque[int]] = {}  # the last samples
        self._sampled_s: dict[str, float] = {}  # when the newest of them was begun
        self._said: dict[str, DeviceIs] = {}
        for model, devices in models.items():
            for device in devices:
                place = place_of(device, model)
                self._add(device, PlaceLink(directory, place, WEIGHTS, self._changed))
                self._add(device, PlaceLink(directory, place, KV, self._changed))
                if host_bytes:
                    copy = offload_device(place)
                    link = PlaceLink(directory, copy, WEIGHTS, self._changed, is_copy=True)
                    self._add(HOST, link)

    @property
    def problems(self) -> Iterator[str]:
        for link in self.links():
            if link.problem is not None:
                yield f"memory of {link.place} ({link.tag}): {link.problem}"

    @property
    def heard(self) -> int:
        return sum(link.held_bytes is not None for link in self.links())

    def links(self, model: str | None = None) -> Iterator[PlaceLink]:
        for links in self._places.values():
            yield from (link for link in links if model in (None, model_at(link.place)))

    def start(self) -> list[asyncio.Task[None]]:
        """Connect to all of them."""
        if self._host_bytes:
            self._feed(DeviceIs(HOST, self._host_bytes, 0))
        loop = asyncio.get_running_loop()
        return [loop.create_task(link.run()) for link in self.links()]

    def sample(self) -> None:
        """Look how much of each device is used. Call this every second."""
        for device, links in self._places.items():
            if device != HOST:
                links[0].look_soon()

    def ask(self, model: str, number: int) -> None:
        """Look anew at all memory of `model`, and report it with this number."""
        for link in self.links(model):
            link.ask(number)

    def free_kv(self, model: str) -> None:
        for link in self.links(model):
            if link.tag == KV:
                link.free()

    def free_weights(self, model: str, *, and_copy: bool) -> None:
        for device, links in self._places.items():
            for link in links:
                if link.tag != WEIGHTS or model_at(link.place) != model:
                    continue
                if device != HOST:
                    link.free(keeps_copy=not and_copy)
                elif and_copy:
                    link.free()

    def keep(self, model: str, *, and_kv: bool) -> None:
        """Its memory is needed again."""
        for link in self.links(model):
            if and_kv or link.tag != KV:
                link.keep()

    def _add(self, device: str, link: PlaceLink) -> None:
        self._places.setdefault(device, []).append(link)

    def _changed(self, link: PlaceLink) -> None:
        device = next(name for name, links in self._places.items() if link in links)
        links = self._places[device]
        if all(each.held_bytes is not None for each in links):
            self._tell_memory(device, links)
            sample = links[0].device
            if device != HOST and sample is not None:
                self._tell_device(device, links, *sample)

    def _tell_memory(self, device: str, links: Sequence[PlaceLink]) -> None:
        held: dict[str, dict[str, int]] = {WEIGHTS: {}, KV: {}}
        asked: dict[str, int] = {}
        for link in links:
            model = model_at(link.place)
            asked[model] = min(asked.get(model, link.answered), link.answered)
            if link.held_bytes:
                held[link.tag][model] = link.held_bytes
        asked = {model: number for model, number in asked.items() if number}
        if device == HOST:
            told = MemoryIs(HOST, {}, {}, held[WEIGHTS], asked)
        else:
            told = MemoryIs(device, held[WEIGHTS], held[KV], {}, asked)
        if told != self._told.get(device):
            self._told[device] = told
            self._feed(told)

    def _tell_device(
        self, device: str, links: Sequence[PlaceLink], total_bytes: int, used_bytes: int | None
    ) -> None:
        """What is used by nobody that the pool knows. An engine that starts takes memory before it
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
        said = DeviceIs(device, total_bytes, min(samples, default=0))
        if said != self._said.get(device):
            self._said[device] = said
            self._feed(said)
