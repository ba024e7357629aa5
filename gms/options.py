"""Options that several of the `gms` commands take."""

from __future__ import annotations

from plumbing.pod import paths
from plumbing.service.config import Option

DIRECTORY = Option("dir", str, paths.DIRECTORY, "The directory that the pod's processes share.")
ONE_DEVICE = Option("device", str, None, "Only this device.")
FREE_TIMEOUT = Option(
    "timeout_s", float, 30.0, "How long in seconds to wait until the memory is free.", minimum=0.0
)
