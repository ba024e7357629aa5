"""The list of the pod's devices, in order, which the memory service (gms) writes for the others.

A pool file may number its devices; NVML, CUDA and each container can count differently, so a number
counts what gms serves, and all processes read its list once, when they start.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence

from plumbing.pod.paths import device_list
from plumbing.service.files import write_atomic

# How a backend learns its devices in host memory, by rank, with commas; HOST-0 … unless set.
HOST_DEVICES_ENV = "UNDERSTUDY_HOST_DEVICES"


def write_device_names(directory: str, names: Sequence[str]) -> None:
    """Put the list there. Without room for it there is none, rather than an old one: only a pool
    file with numbers needs it, and its readers say that it is missing."""
    path = device_list(directory)
    try:
        content = {"schema": 1, "pid": os.getpid(), "devices": list(names)}
        write_atomic(path, content, survives_power_cut=False)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)


def read_device_names(directory: str) -> tuple[str, ...]:
    """The list; empty if no memory service has written one."""
    try:
        with open(device_list(directory), encoding="utf-8") as stream:
            names = json.load(stream)["devices"]
        return tuple(map(str, names))
    except (OSError, ValueError, KeyError, TypeError):
        return ()
