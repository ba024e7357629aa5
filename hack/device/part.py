"""What every part of the device check uses: peers, NVML, limits, and a place for its findings."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from hack.device.remote import Peer

MIB, GIB = 1 << 20, 1 << 30
SPARE_BYTES = 4 * GIB  # of the device, which stay free
NOISE_BYTES = 96 * MIB  # what a driver's own bookkeeping may add to memory in use
SETTLE_S_MAX = 5.0  # memory of a dead process is freed over some tenths of a second
PROGRAM = (
    "import sys; from gms.server.devices import devices_to_serve; from plumbing.errors import *\n"
    "try: print(*devices_to_serve([w for w in sys.argv[1:] if w]))\n"
    "except UnderstudyError as error: sys.exit(error.message)"
)
SETTINGS = ("PersistenceMode", "ComputeMode", "MigMode", "EccMode")


class Skipped(Exception):
    """This part cannot run here; its text is the reason."""


class Nvml:
    """The device as NVML sees it. While this is open, this process has the device open."""

    def __init__(self, uuid: str, still_s: float) -> None:
        """`still_s`: how long memory in use must not change to count as settled."""
        import pynvml

        self.uuid, self._api, self._still_s = uuid, pynvml, still_s
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def close(self) -> None:
        self._api.nvmlShutdown()

    def used(self) -> int:
        """Bytes in use by all processes."""
        return int(self._api.nvmlDeviceGetMemoryInfo(self._device).used)

    def free(self) -> int:
        """Free bytes."""
        return int(self._api.nvmlDeviceGetMemoryInfo(self._device).free)

    def settled(self) -> int:
        """Bytes in use, once they have not changed for a while."""
        end = time.monotonic() + SETTLE_S_MAX
        value, since = self.used(), time.monotonic()
        while time.monotonic() < min(end, since + self._still_s):
            time.sleep(0.01)
            if (now := self.used()) != value:
                value, since = now, time.monotonic()
        return value

    def by_process(self) -> dict[int, int]:
        """Bytes in use by each visible process, by pid."""
        found = self._api.nvmlDeviceGetComputeRunningProcesses(self._device)
        return {int(each.pid): int(each.usedGpuMemory or 0) for each in found}

    def facts(self) -> dict[str, Any]:
        """The driver, the device and their settings."""
        found: dict[str, Any] = {
            "name": str(self._api.nvmlDeviceGetName(self._device)),
            "driver": str(self._api.nvmlSystemGetDriverVersion()),
        }
        for name in SETTINGS:
            try:
                found[name] = getattr(self._api, f"nvmlDeviceGet{name}")(self._device)
            except self._api.NVMLError as error:
                found[name] = f"unknown: {error}"
        return found


class Part:
    """The inputs of a part, and its findings: `figures`, and `claims`, which are what the design
    relies on and whether it holds here. Close it: its peers and its use of NVML end with it."""

    def __init__(
        self,
        *,
        device: str,
        directory: str,
        limit_s: float,
        bytes_max: int,
        kills_max: int,
        still_s: float,
    ) -> None:
        self.device, self.directory = device, directory
        self.bytes_max, self.kills_max, self.still_s = bytes_max, kills_max, still_s
        self.peers = contextlib.ExitStack()
        self.figures: dict[str, Any] = {}
        self.claims: dict[str, bool] = {}
        self._end = time.monotonic() + limit_s
        self._nvml: Nvml | None = None

    def close(self) -> None:
        self.peers.close()
        if self._nvml is not None:
            self._nvml.close()  # a part may need the device closed by everybody

    @property
    def nvml(self) -> Nvml:
        """Opened when it is first asked for."""
        self._nvml = self._nvml or Nvml(self.device, self.still_s)
        return self._nvml

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def note(self, **figures: Any) -> None:
        """Add to this part's findings."""
        self.figures |= figures

    def claim(self, **claims: bool) -> None:
        """Say what the design relies on, and whether it holds here."""
        self.claims |= claims

    def peer(self, *, context: bool = False, witness: str | None = None) -> Peer:
        """A process with the device open; it ends with this part."""
        peer = Peer(self.device, witness)
        self.peers.callback(peer.close)
        peer("open", context=context)
        return peer

    def fits(self, size_bytes: int) -> bool:
        """Whether the device can spare that much."""
        return size_bytes <= min(self.bytes_max, self.nvml.free() - SPARE_BYTES)


def mib(size_bytes: int) -> float:
    return round(size_bytes / MIB, 1)


def find_devices(wanted: Sequence[str], root: str) -> tuple[list[str], str]:
    """The UUIDs of the devices to check, or none and the reason; this process does not open the
    driver for it. `root` is the repository."""
    words = [sys.executable, "-c", PROGRAM, *wanted]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        return [], done.stderr.strip().rpartition("\n")[2]
    return done.stdout.split(), ""
