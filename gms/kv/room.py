"""Whether a device has room for a KV pool beside its weights.

A GPU's driver has the last word, and so has whoever touches host memory first. But a pool is made
on the path of a wake: what cannot fit is better said at once, with what takes the room. Only the
machine is asked, never the limit of this process's own control group: memory counts against the
group of the process that touches it first, which is the engine's. The engine looks at that before
it fills the pool (`engine.backends.process_memory.has_room_for`).
"""

from __future__ import annotations

import logging

from gms import messages as msg
from gms import names
from gms.server import journal
from gms.server.neighbours import bytes_elsewhere
from plumbing.errors import UnderstudyError
from plumbing.text import size
from plumbing.wire.blocking import BlockingClient

RESERVE_BYTES = 64 << 20  # of host memory, left for the rest of the machine
ASK_S = 1.0  # the weights' server answers in milliseconds
MEMINFO = "/proc/meminfo"

logger = logging.getLogger(__name__)


def check_room(directory: str, device: str, needed_bytes: int, capacity_bytes: int | None) -> None:
    """
    Raises:
        UnderstudyError: `gms.kv_too_large`, it never fits; `gms.device_full`, not now.
    """
    if capacity_bytes is not None:
        _check_limit(needed_bytes, capacity_bytes, "this device")
        weights_bytes = _weights_bytes(directory, device)
        others_bytes = bytes_elsewhere(directory, device)
        if needed_bytes + weights_bytes + others_bytes > capacity_bytes:
            others = f", and {size(others_bytes)} are other models'" if others_bytes else ""
            raise UnderstudyError(
                "gms.device_full",
                f"the KV memory needs {size(needed_bytes)}, and {size(weights_bytes)} of the"
                f" {size(capacity_bytes)} of {device} hold weights{others}; use less KV memory, a"
                " smaller model, or a larger --device-bytes",
                needed_bytes=needed_bytes,
                weights_bytes=weights_bytes,
                capacity_bytes=capacity_bytes,
            )
    if device.startswith("HOST-"):
        _check_machine(needed_bytes)


def beside_weights(error: UnderstudyError, directory: str, device: str) -> UnderstudyError:
    """The driver's `gms.device_full`, with what the device's weights take."""
    weights_bytes = _weights_bytes(directory, device)
    text = f"{error.message}; weights of this service take {size(weights_bytes)}"
    return UnderstudyError(error.code, text, **error.details, weights_bytes=weights_bytes)


def _check_machine(needed_bytes: int) -> None:
    found = _meminfo()
    _check_limit(needed_bytes, found["MemTotal"] - RESERVE_BYTES, "this machine's memory")
    free_bytes = found["MemAvailable"]
    if needed_bytes + RESERVE_BYTES > free_bytes:
        raise UnderstudyError(
            "gms.device_full",
            f"the KV memory needs {size(needed_bytes)}, and this machine has {size(free_bytes)}"
            f" free, of which {size(RESERVE_BYTES)} are reserved; stop what holds the memory, or"
            " use less KV memory",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def _check_limit(needed_bytes: int, limit_bytes: int, of: str) -> None:
    if needed_bytes > limit_bytes:
        raise UnderstudyError(
            "gms.kv_too_large",
            f"{size(needed_bytes)} of KV memory can never fit: {of} has {size(limit_bytes)}; use"
            " less KV memory",
            needed_bytes=needed_bytes,
            limit_bytes=limit_bytes,
        )


def _weights_bytes(directory: str, device: str) -> int:
    """The size of the device's weights. While the journalled epoch is the only one with a file that
    is all there is, and nobody need be asked. If their server does not answer, it is the size of
    those that were committed last, which the engines that map them keep.
    """
    record = journal.peek(names.journal_path(directory, device))
    size_bytes = record.size_bytes if record is not None else 0
    if names.epochs_on_disk(directory, device) == ([record.epoch] if record is not None else []):
        return size_bytes
    path = names.socket_path(directory, device)
    try:
        with BlockingClient(path, msg.CATALOGUE, connect_timeout_s=ASK_S) as client:
            answer = client.request(msg.StatusMsg(), timeout_s=ASK_S).message
    except UnderstudyError as error:
        logger.warning(
            "counting %s of weights, by their journal: %s", size(size_bytes), error.message
        )
        return size_bytes
    assert isinstance(answer, msg.StatusReplyMsg)
    phases = ("committed_bytes", "staging_bytes", "superseded_bytes", "releasing_bytes")
    return sum(int(answer.document[name]) for name in phases)


def _meminfo() -> dict[str, int]:
    values = {}
    with open(MEMINFO, encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    return values
