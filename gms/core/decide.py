"""The grant decision: one pure function from a request and the epochs of a device to a verdict.

It is speculative (called for every waiter at every change), so it changes nothing and logs
nothing. The order of its checks is the order of priorities: a committed epoch is never doubled or
lost by accident, and no session writes while memory without an owner may still be mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gms.core.capacity import EPOCHS_MAX
from gms.core.events import EpochPhase, Mode
from gms.core.identity import first_mismatch
from gms.core.state import Epoch, Session
from gms.messages import AttachMsg
from plumbing.errors import UnderstudyError


@dataclass(frozen=True, slots=True)
class GrantRead:
    """Grant RO on the committed epoch."""


@dataclass(frozen=True, slots=True)
class GrantWrite:
    """Grant RW: a staging epoch of its own."""


@dataclass(frozen=True, slots=True)
class Deny:
    """Waiting cannot help: an error, at once."""

    error: UnderstudyError


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Not yet; `reason` is a code, `message` a sentence that names what the session waits for."""

    reason: str
    message: str


Verdict = GrantRead | GrantWrite | Deny | KeepWaiting


def decide(request: AttachMsg, epochs: Iterable[Epoch], writer: Session | None) -> Verdict:
    """The verdict on `request`, with `epochs` of the device and its one `writer`, if any."""
    everything = list(epochs)
    committed = next((e for e in everything if e.phase is EpochPhase.COMMITTED), None)
    if committed is not None:
        verdict = _on_committed(request, committed)
        if verdict is not None:
            return verdict
    unowned = _in_phase(everything, EpochPhase.ORPHANED)
    if unowned:
        return KeepWaiting(
            "recovering",
            f"memory of the previous server is still mapped: {_holders(unowned)}; it is freed when "
            "they exit",
        )
    if writer is not None:
        return KeepWaiting("writer", f"{writer.label} is loading the weights")
    if request.mode == Mode.RO:
        return KeepWaiting("not_committed", "nothing is committed and no engine is loading")
    # A given-up epoch that a reader has come back to has an owner again (`Epoch.is_being_freed`).
    unowned = [epoch for epoch in everything if epoch.is_being_freed]
    if unowned:
        return KeepWaiting(
            "releasing", f"memory of a session that has ended is not free yet: {_holders(unowned)}"
        )
    if len(everything) >= EPOCHS_MAX:
        return KeepWaiting(
            "epochs",
            f"{len(everything)} epochs of this device are still read, which is the limit; stop the "
            "engines that read superseded ones",
        )
    return GrantWrite()


def _on_committed(request: AttachMsg, committed: Epoch) -> Verdict | None:
    """The verdict where something is committed; None: the request is to replace it."""
    if request.mode == Mode.RW:
        if request.replace:
            return None
        return Deny(
            UnderstudyError(
                "gms.already_committed",
                f"epoch {committed.id} is committed on this device; attach with rw_or_ro to use "
                "it, or ask to replace it",
                epoch=committed.id,
            )
        )
    if request.identity is None or committed.identity is None:
        return GrantRead()
    mismatch = first_mismatch(committed.identity, request.identity)
    if mismatch is None:
        return GrantRead()
    if request.mode == Mode.RW_OR_RO and request.replace:
        return None
    return Deny(
        UnderstudyError(
            "gms.identity_mismatch",
            f"the committed weights are not the requested ones: {mismatch}; start every engine "
            "with the same checkpoint and settings, or ask to replace the epoch",
            epoch=committed.id,
            field=mismatch.field,
            expected=mismatch.expected,
            offered=mismatch.offered,
        )
    )


def _in_phase(epochs: Iterable[Epoch], phase: EpochPhase) -> list[Epoch]:
    return [epoch for epoch in epochs if epoch.phase is phase]


def _holders(epochs: Sequence[Epoch]) -> str:
    parts = []
    for epoch in epochs:
        pids = ", ".join(f"pid {pid}" for pid in epoch.holders)
        parts.append(f"epoch {epoch.id}" + (f" by {pids}" if pids else ""))
    return "; ".join(parts)
