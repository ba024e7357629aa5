"""Names of the files that a device's server and its clients share, all in one directory.

With models each has servers of its own on a device, under the name of its *place*: `HOST-0.chat`.
All that is said here of a device is true of a place.
"""

from __future__ import annotations

import os
import re

from plumbing.errors import UsageError
from plumbing.pod import paths
from plumbing.pod.models import NAME_PATTERN
from plumbing.pod.paths import KV as KV
from plumbing.pod.paths import WEIGHTS as WEIGHTS

OFFLOAD = "OFFLOAD-"
COPIES = "OFFLOAD"  # the one server of all host copies

PLACE_PATTERN = rf"[A-Za-z0-9-]+(?:\.{NAME_PATTERN})?"
# HOST-0, GPU-<uuid>, MIG-<uuid>, HOST-0.chat
_DEVICE = re.compile(rf"[A-Za-z0-9][A-Za-z0-9-]{{0,63}}(?:\.{NAME_PATTERN})?")
_POOL_FILE = re.compile(rf"gms_({PLACE_PATTERN})_kv_[0-9a-f]{{32}}\.pool")
_EPOCH_FILE = re.compile(rf"gms_({PLACE_PATTERN})_[a-z]+_[0-9a-f]{{32}}\.epoch")


def check_device(device: str) -> str:
    """`device`, if it can be part of a file name.

    Raises:
        UsageError: `gms.bad_device`.
    """
    if not _DEVICE.fullmatch(device):
        raise UsageError(
            "gms.bad_device",
            f"{device!r} is not a device name; devices are named HOST-0, HOST-1, … or GPU-<uuid>",
        )
    return device


def offload_device(device: str) -> str:
    """The device, of host memory, that keeps the sealed copy of the weights of `device`:
    OFFLOAD-0 for HOST-0, OFFLOAD-GPU-<uuid> for a GPU."""
    return OFFLOAD + device.removeprefix("HOST-")


def is_offload(device: str) -> bool:
    """Whether `device` keeps host copies; no engine attaches to it for its weights."""
    return device.startswith(OFFLOAD)


def is_host(device: str) -> bool:
    """Whether `device` is host memory, which any process can read."""
    return device.startswith(("HOST-", OFFLOAD))


def socket_path(directory: str, device: str) -> str:
    """The socket of one device's server."""
    return paths.gms_socket(directory, check_device(device))


def journal_path(directory: str, device: str) -> str:
    """The journal of one device: what is committed there, for a restarted server."""
    return paths.gms_journal(directory, check_device(device))


def epoch_file(device: str, epoch: str) -> str:
    """The file name on which every process that maps `epoch` holds a shared flock."""
    return f"gms_{device}_{WEIGHTS}_{epoch}.epoch"


def epochs_on_disk(directory: str, device: str) -> list[str]:
    """The ids of the epochs of this device that have a file."""
    return _ids_on_disk(directory, epoch_file(device, ""), _EPOCH_FILE)


def is_epoch_file(name: str) -> bool:
    """Whether `name`, which a server sent, is a plain epoch file name."""
    return _EPOCH_FILE.fullmatch(name) is not None


def is_epoch_id(value: object) -> bool:
    """Whether `value` is an epoch's id: 32 hex digits, so it is safe in a file name."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) is not None


def kv_socket_path(directory: str, device: str) -> str:
    """The socket of the server that owns one device's KV memory."""
    return paths.gms_socket(directory, check_device(device), KV)


def kv_token_path(directory: str, device: str) -> str:
    """The newest token under which one device's KV memory was lent, for a restarted server."""
    return paths.gms_journal(directory, check_device(device), KV)


def pool_file(device: str, pool: str) -> str:
    """The file name on which every process that maps the KV pool holds a shared flock."""
    return f"gms_{device}_{KV}_{pool}.pool"


def pools_on_disk(directory: str, device: str) -> list[str]:
    """The ids of the KV pools of this device that have a file."""
    return _ids_on_disk(directory, pool_file(device, ""), _POOL_FILE)


def _ids_on_disk(directory: str, without_id: str, pattern: re.Pattern[str]) -> list[str]:
    """The ids in the names that are `without_id` but for theirs."""
    prefix, dot, end = without_id.rpartition(".")
    return [
        name.removeprefix(prefix).removesuffix(dot + end)
        for name in sorted(os.listdir(directory))
        if name.startswith(prefix) and pattern.fullmatch(name)
    ]


def is_pool_file(name: str) -> bool:
    """Whether `name`, which a server sent, is the plain name of a KV pool's file."""
    return _POOL_FILE.fullmatch(name) is not None
