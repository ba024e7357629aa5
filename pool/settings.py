"""The settings of a pool and of its models, as its file has them, with their defaults.

Plain values; `pool_file.py` reads and checks them. Must not know where memory is free.

`digests` compares what runs with what the file says now.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from plumbing.pod.messages import Tier
from plumbing.pod.models import NAME_PATTERN
from pool.core.states import PRIORITY_MAX, TICKETS_MAX, ModelRules, PoolRules

ALIASES_MAX = 32
DEVICES_MAX = 64
ARGS_MAX = 256


class Seconds(float):
    """A time as people write it: `5m`, `30s`, `250ms`, or a number of seconds."""


class Period(float):
    """The same, of what returns again and again: a second at least."""


class SecondsOrNever(float):
    """The same, or `never` (`off`, -1), which is infinite."""


class Size(int):
    """Bytes as people write them: `20GiB`; or `none`."""


class DeviceName(str):
    """`HOST-0`, `GPU-<uuid>`, or a number, which counts the devices that the machine has."""

    __slots__ = ()


Name = Annotated[str, Meta(min_length=1, max_length=256)]
ModelKey = Annotated[str, Meta(pattern=f"^{NAME_PATTERN}$")]


class DrainTimeout(Struct, frozen=True, forbid_unknown_fields=True):
    """When a yielding model's streams are parked, and when the rest is cut."""

    park: Seconds = Seconds(2)
    cut: SecondsOrNever = SecondsOrNever(30)


class QueueLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests may wait, in all and for one model, and for how long."""

    max: Annotated[int, Meta(ge=1, le=TICKETS_MAX)] = 512
    per_model: Annotated[int, Meta(ge=1, le=TICKETS_MAX)] = 128  # not above `max`, unless given
    wait: Seconds = Seconds(300)


class ModelMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine needs on each of its devices, for a model that was never measured."""

    weights: Size
    kv: Size
    base: Size = Size(0)


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One model, with what `defaults` say for all. `devices`: by name, once the file is read."""

    model: Name
    backend: Name = "vllm"
    args: Annotated[tuple[str | int | float, ...], Meta(max_length=ARGS_MAX)] = ()
    aliases: Annotated[tuple[Name, ...], Meta(max_length=ALIASES_MAX)] = ()
    devices: Annotated[tuple[DeviceName, ...], Meta(max_length=DEVICES_MAX)] = ()
    tensor_parallel: Annotated[int, Meta(ge=1, le=DEVICES_MAX)] = 1
    memory: ModelMemory | None = None
    shadow: Literal["none", "follows", "keeps"] = "none"
    pinned: bool = False
    preload: bool = False  # load it when the pool starts
    on_demand: bool = True  # a request may load it from cold
    max_in_flight: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    priority: Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] = 0
    client_priority: Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    rest: Literal["cold", "offloaded", "warm"] = "warm"
    min_runtime: Seconds = Seconds(10)
    max_wait: Seconds = Seconds(5)
    keep_alive: SecondsOrNever = SecondsOrNever(300)
    offload_after: SecondsOrNever = SecondsOrNever(math.inf)
    unload_after: SecondsOrNever = SecondsOrNever(math.inf)
    drain_timeout: DrainTimeout = DrainTimeout()

    @property
    def rules(self) -> ModelRules:
        return ModelRules(
            devices=self.devices,
            priority=self.priority,
            is_pinned=self.pinned,
            shadow_keeps=self.shadow == "keeps",
            rest=Tier(self.rest),
            is_on_demand=self.on_demand,
            min_runtime_ms=self.min_runtime * 1000,
            max_wait_ms=self.max_wait * 1000,
            keep_alive_ms=self.keep_alive * 1000,
            offload_after_ms=_finite_ms(self.offload_after),
            unload_after_ms=_finite_ms(self.unload_after),
            park_ms=self.drain_timeout.park * 1000,
            cut_ms=_finite_ms(self.drain_timeout.cut),
        )


class PoolFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file; `models` by name, in its order."""

    devices: Annotated[tuple[DeviceName, ...], Meta(min_length=1, max_length=DEVICES_MAX)]
    models: dict[ModelKey, ModelSettings]
    listen: Name = "127.0.0.1:8000"
    host_memory: Size = Size(0)  # for copies of weights; 0: there are none
    margin: Size = Size(512 << 20)
    queue: QueueLimits = QueueLimits()
    starve_after: Period = Period(60)
    quantum_factor: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        """Where clients connect: host and port.

        Raises:
            ValueError: `listen` is not an address.
        """
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{self.listen!r} is not HOST:PORT, such as 127.0.0.1:8000")
        return host, int(port)

    @property
    def rules(self) -> PoolRules:
        return PoolRules(self.margin, self.starve_after * 1000, self.quantum_factor)


def engines_of(model: str, settings: ModelSettings) -> tuple[str, ...]:
    """The ids of a model's engines: the primary, and the shadow if it has one. An id has no dot."""
    stem = model.replace(".", "-")
    return (f"{stem}-0",) if settings.shadow == "none" else (f"{stem}-0", f"{stem}-1")


def _finite_ms(seconds: float) -> float | None:
    return seconds * 1000 if math.isfinite(seconds) else None


DIGITS = 12


def digests(file: PoolFile) -> dict[str, str]:
    """By model, and of the rest under `""`. `defaults` are in the models' own settings already."""
    whole = replace(file, models={}, defaults={})
    return {"": _digest(whole)} | {name: _digest(each) for name, each in file.models.items()}


def _digest(settings: msgspec.Struct) -> str:
    text = msgspec.json.encode(settings, enc_hook=str, order="sorted")  # times and sizes by `str`
    return hashlib.sha256(text).hexdigest()[:DIGITS]
