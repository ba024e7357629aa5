"""The words of the pool: a model's phases, what is booked on devices, the settings it goes by."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from plumbing.pod.messages import GoalGeneration as GoalGeneration

HOST = "HOST"  # the host's memory, beside the devices: copies of weights are booked on it

NAME_CHARS_MAX = 25  # of a model: the lock `loader:<model>` has 32 at most
MODELS_MAX = 100  # what one decision looks at within a millisecond, and one slot of the state holds
TICKETS_MAX = 512  # of one model in one gateway: the largest queue that a pool file may ask for
PRIORITY_MAX = 1000  # either way
# Characters of a fault that an engine reports, and of a reason on file. A hundred models may all
# have one, in their state file, in each message to a gateway and twice in the status.
FAULT_CHARS_MAX = 200
COUNT_MAX = 2**63 - 1
NEVER_MS = float("inf")
BYTES_MAX = 2**62  # beyond any device, and sums of a few still fit 64 bits

# The bounds of what a gateway says, and is told: these values travel as they are (`pool.messages`).
ModelName = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
HexId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Millis = Annotated[float, Meta(ge=0.0)]
Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
# `HOST-0`, `GPU-<uuid>`, or a number, which counts the devices that the machine has.
DeviceName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}\Z")]


class ModelState(StrEnum):
    """What is known of a model, or is being done with it. Idle is a timer on `AWAKE`."""

    COLD = "cold"
    LOADING = "loading"  # processes start and load weights
    OFFLOADED = "offloaded"
    WARM = "warm"
    PENDING = "pending"  # wanted, no room yet; keeps the tier it held, its floor
    WAKING = "waking"
    AWAKE = "awake"
    DRAINING = "draining"  # its door is shut; running requests end or are parked
    RELEASING = "releasing"  # memory leaves, and is booked until that is proven
    UNLOADING = "unloading"  # its processes are being killed
    FAILED = "failed"


REST = (ModelState.OFFLOADED, ModelState.WARM)
RISING = frozenset({ModelState.LOADING, ModelState.WAKING})
FALLING = frozenset({ModelState.DRAINING, ModelState.RELEASING, ModelState.UNLOADING})


class EntryKind(StrEnum):
    """What memory is booked for."""

    BASE = "base"  # of an engine: context, graphs, workspaces; all that is neither weights nor KV
    WEIGHTS = "weights"
    COPY = "copy"  # of the weights, in host memory
    KV = "kv"
    LEASE = "lease"  # of a neighbour


class EntryKey(Struct, frozen=True):
    """One line of the ledger. `owner` is a model, for `BASE` an engine, for `LEASE` its id."""

    device: str
    kind: EntryKind
    owner: str


def by_device(entries: Mapping[EntryKey, int]) -> dict[str, int]:
    """The sums of these."""
    found: dict[str, int] = {}
    for key, size_bytes in entries.items():
        found[key.device] = found.get(key.device, 0) + size_bytes
    return found


class EngineSizes(Struct, frozen=True):
    """Bytes that one engine needs, by device."""

    base: Mapping[str, int]
    weights: Mapping[str, int]  # shared with the shadow
    kv: Mapping[str, int]
    is_estimated: bool = False  # from the files of the model; not measured yet


class PooledRules(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a model that its gateways go by, as they are now; times in ms. `priority`: of
    requests that name none; `keep_alive_ms` too, inf: for ever; `max_in_flight` None: as it is in
    the gateway's own file; `client_priority`: the most urgent one that a request may name, None:
    `priority`."""

    priority: Priority
    keep_alive_ms: Millis
    starve_after_ms: Millis
    max_in_flight: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = None
    client_priority: Priority | None = None


def key_of(name: str) -> str:
    """What a setting is called in the pool file: there a value names its own unit."""
    return name.removeprefix("is_").removesuffix("_ms").removesuffix("_bytes")


class PoolRules(Struct, frozen=True, rename=key_of):
    """The settings of the whole pool, by their keys in the pool file. Times are in ms."""

    margin_bytes: int = 512 << 20  # of each device, kept free
    starve_after_ms: float = 60_000.0  # a ticket so old counts as of the next better priority
    # A turn lasts at least so many switches.
    quantum_factor: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0


class ModelRules(Struct, frozen=True, forbid_unknown_fields=True, rename=key_of):
    """The settings of one model that decide when it is awake. Times are in ms; infinite: never."""

    devices: Annotated[tuple[DeviceName, ...], Meta(max_length=64)] = ()
    priority: Priority = 0
    is_pinned: bool = False
    # `follows` is what `keeps` was called where a shadow gave its memory to others.
    shadow: Literal["none", "keeps", "follows"] = "none"
    rest: Literal["cold", "offloaded", "warm"] = "warm"  # where it goes without requests
    is_on_demand: bool = True  # a request may load it from cold
    min_runtime_ms: float = 10_000.0
    max_wait_ms: float = 5_000.0
    keep_alive_ms: float = 300_000.0
    offload_after_ms: float = NEVER_MS  # asleep
    unload_after_ms: float = NEVER_MS
    park_ms: float = 2_000.0  # of a drain: then streams are parked
    cut_ms: float = 30_000.0  # then the rest is cut
