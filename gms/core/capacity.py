"""How much of a device is used, by whom, and whether one more slab fits.

Pure. Every epoch counts until the kernel says that no process maps it: memory that a dying process
still has is not free, whatever our own accounts say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any

from gms.core.events import EpochPhase
from gms.core.state import Epoch, Session
from plumbing.errors import UnderstudyError
from plumbing.text import size

EPOCHS_MAX = 8  # one is committed, one superseded; each keeps a manifest of up to 15 MiB here
EPOCH_BYTES_MAX = 1 << 50  # no device has a pebibyte; sums over all sessions stay below 64 bits


class Fit(Enum):
    NOW = auto()
    LATER = auto()  # when memory that was given up is free
    WITHOUT_COMMITTED = auto()  # the committed epoch has no readers and may be replaced


def free_bytes(epochs: Iterable[Epoch], capacity_bytes: int, kv_bytes: int) -> int:
    """The free bytes of the device; never below zero (an orphan may exceed a smaller device)."""
    return max(0, capacity_bytes - kv_bytes - sum(epoch.size_bytes for epoch in epochs))


def fit(
    size_bytes: int,
    epochs: Iterable[Epoch],
    capacity_bytes: int,
    sessions: Mapping[int, Session],
    *,
    may_replace: bool,
    kv_bytes: int = 0,
) -> Fit | UnderstudyError:
    """Whether `size_bytes` more fit, or what would make them fit; the error if nothing would."""
    everything = list(epochs)
    free = free_bytes(everything, capacity_bytes, kv_bytes)
    if size_bytes <= free:
        return Fit.NOW
    being_freed = sum(e.size_bytes for e in everything if e.is_being_freed)
    if size_bytes <= free + being_freed:
        return Fit.LATER
    committed = next((e for e in everything if e.phase is EpochPhase.COMMITTED), None)
    if (
        may_replace
        and committed is not None
        and not committed.readers
        and size_bytes <= free + being_freed + committed.size_bytes
    ):
        return Fit.WITHOUT_COMMITTED
    return _out_of_memory(size_bytes, free, everything, capacity_bytes, sessions, kv_bytes)


def device_full(
    error: UnderstudyError,
    epochs: Iterable[Epoch],
    sessions: Mapping[int, Session],
    kv_bytes: int = 0,
) -> UnderstudyError:
    """The driver's error for memory that should be free, with what our own sessions hold."""
    holders, shown = _holders(epochs, sessions)
    shown += _kv(kv_bytes)
    ours, said = "; ".join(shown) or "nothing", error.details.get("said", error.message)
    return UnderstudyError(
        "gms.out_of_memory",
        f"{said}. Held by this service: {ours}. Stop whatever "
        "else uses the device, or use a smaller model",
        **{**error.details, "said": said, "holders": holders},
    )


def _out_of_memory(
    size_bytes: int,
    free: int,
    epochs: Iterable[Epoch],
    capacity_bytes: int,
    sessions: Mapping[int, Session],
    kv_bytes: int,
) -> UnderstudyError:
    holders, shown = _holders(epochs, sessions)
    shown += _kv(kv_bytes)
    return UnderstudyError(
        "gms.out_of_memory",
        f"a slab of {size(size_bytes)} does not fit: the device has {size(capacity_bytes)}, "
        f"{size(free)} of it free"
        + (f"; {'; '.join(shown)}" if shown else "")
        + ". Use a smaller model, a larger device (--device-bytes), or stop what holds the memory",
        capacity_bytes=capacity_bytes,
        needed_bytes=size_bytes,
        free_bytes=free,
        kv_bytes=kv_bytes,
        holders=holders,
    )


def _kv(kv_bytes: int) -> list[str]:
    how = "`gms drop-kv` frees it if no engine uses it"
    return [f"KV memory {size(kv_bytes)} ({how})"] if kv_bytes else []


def _holders(
    epochs: Iterable[Epoch], sessions: Mapping[int, Session]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The holders of each epoch: as data, and as phrases for a message."""
    holders: list[dict[str, Any]] = []
    shown = []
    for epoch in epochs:
        if not epoch.size_bytes:
            continue
        users = [s.label for s in sessions.values() if s.epoch == epoch.id]
        users += [f"pid {pid}" for pid in epoch.holders]
        holders.append(
            {
                "epoch": epoch.id,
                "phase": str(epoch.phase),
                "size_bytes": epoch.size_bytes,
                "users": users,
            }
        )
        by = f" used by {', '.join(users)}" if users else " without users"
        shown.append(f"{epoch.phase} epoch {epoch.id[:8]} {size(epoch.size_bytes)}{by}")
    return holders, shown
