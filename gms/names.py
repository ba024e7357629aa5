"""Names of the files that a device's server and its clients share, all in one directory.

With models each has servers of its own on a device, under the name of its *place*: `HOST-0.chat`.
All that is said here of a device is true of a place.
"""

from __future__ import annotations

import os
import re

from plumbing.pod.models import NAME_PATTERN
from plumbing.pod.paths import KV as KV
from plumbing.pod.paths import WEIGHTS as WEIGHTS

OFFLOAD = "OFFLOAD-"
COPIES = "OFFLOAD"  # the one server of all host copies

# HOST-0, GPU-<uuid>, MIG-<uuid>, HOST-0.chat
PLACE_PATTERN = rf"[A-Za-z0-9-]+(?:\.{NAME_PATTERN})?"
SUFFIXES = {WEIGHTS: ".epoch", KV: ".pool"}


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


def region_file(device: str, tag: str, region: str) -> str:
    """The name of the file on which every process that maps the region holds a shared flock."""
    return f"gms_{device}_{tag}_{region}{SUFFIXES[tag]}"


def region_path(directory: str, device: str, tag: str, region: str) -> str:
    return os.path.join(directory, region_file(device, tag, region))


def regions_on_disk(directory: str, device: str, tag: str) -> list[str]:
    """The ids of the epochs, or of the KV pools, of this device that have a file."""
    file = re.compile(re.escape(region_file(device, tag, "ID")).replace("ID", "([0-9a-f]{32})"))
    found = map(file.fullmatch, sorted(os.listdir(directory)))
    return [match[1] for match in found if match is not None]


def is_region_id(value: object) -> bool:
    """Whether `value` is an epoch's or a pool's id: 32 hex digits, so it is safe in a file name."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) is not None
