"""What a part of the device check works with: peers, NVML, limits, and a place for its findings.

What is known is written to the part's result file at once, so that it survives a time limit.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hack.device.nvml import MIB, Nvml
from hack.device.remote import Peer

GIB = 1 << 30
SPARE_BYTES = 4 * GIB  # of the device, which the checks leave to others
NOISE_BYTES = 96 * MIB  # what a driver's own bookkeeping may add to memory in use


class Skipped(Exception):
    """This part cannot be asked here; the reason is for people."""


class Part:
    """What a part is given, and where it puts what it finds."""

    def __init__(
        self,
        *,
        device: str,
        result: str,
        directory: str,
        limit_s: float,
        bytes_max: int,
        allocations_max: int,
    ) -> None:
        self.device, self.directory = device, directory
        self.bytes_max, self.allocations_max = bytes_max, allocations_max
        self._result, self._end = Path(result), time.monotonic() + limit_s
        self._found: dict[str, Any] = {"claims": {}, "figures": {}}
        self._nvml: Nvml | None = None
        self._started = contextlib.ExitStack()

    @property
    def nvml(self) -> Nvml:
        """Opened when it is first asked for."""
        self._nvml = self._nvml or Nvml(self.device)
        return self._nvml

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def note(self, **figures: Any) -> None:
        """Add to what this part has found."""
        self._found["figures"] |= figures
        self._write()

    def claim(self, **claims: bool) -> None:
        """What the design relies on, and whether it holds here."""
        self._found["claims"] |= claims
        self._write()

    def peer(self, *, context: bool = False, witness: str | None = None) -> Peer:
        """A process with the device open; it ends with this part."""
        peer = Peer(self.device, witness)
        self._started.callback(peer.close)
        peer("open", context=context)
        return peer

    def fits(self, size_bytes: int) -> bool:
        return size_bytes <= min(self.bytes_max, self.nvml.free() - SPARE_BYTES)

    def need(self, size_bytes: int) -> None:
        """
        Raises:
            Skipped: the device has not so much to spare, or it was told to take less.
        """
        if not self.fits(size_bytes):
            raise Skipped(
                f"needs {size_bytes // MIB} MiB, within --max-gib ({self.bytes_max / GIB:g}) and "
                f"with {SPARE_BYTES // GIB} GiB of the device to spare"
            )

    def finish(self, **more: Any) -> None:
        """The last word."""
        self._found |= more
        self._write()

    @contextlib.contextmanager
    def ending_peers(self) -> Iterator[None]:
        with self._started:
            yield

    def _write(self) -> None:
        part = self._result.with_suffix(".part")
        part.write_text(json.dumps(self._found))
        part.replace(self._result)


def mib(size_bytes: int) -> float:
    return round(size_bytes / MIB, 1)
