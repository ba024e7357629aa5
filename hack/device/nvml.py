"""The device seen from outside, through NVML: memory in use, settings, the driver's complaints.

Opening it keeps the device open, so the parts that ask what happens while nobody does open it late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
STILL_S, SETTLE_S = 0.3, 5.0  # memory of a dead process comes back over some tenths of a second
XID_WAIT_MS = 500

SETTINGS = ("PersistenceMode", "ComputeMode", "MigMode", "EccMode")


class Nvml:
    """NVML, for the device called `uuid`."""

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._api = pynvml
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def used(self) -> int:
        """Bytes in use, by anybody."""
        return int(self._api.nvmlDeviceGetMemoryInfo(self._device).used)

    def free(self) -> int:
        """Bytes that nobody has."""
        return int(self._api.nvmlDeviceGetMemoryInfo(self._device).free)

    def settled(self) -> int:
        """Bytes in use, once they have stood still for a while."""
        end = time.monotonic() + SETTLE_S
        value, since = self.used(), time.monotonic()
        while time.monotonic() < min(end, since + STILL_S):
            time.sleep(0.01)
            now = self.used()
            if now != value:
                value, since = now, time.monotonic()
        return value

    def facts(self) -> dict[str, Any]:
        """What the driver and the device are, and how they are set."""
        return {
            "name": str(self._api.nvmlDeviceGetName(self._device)),
            "driver": str(self._api.nvmlSystemGetDriverVersion()),
            "memory_mib": int(self._api.nvmlDeviceGetMemoryInfo(self._device).total) // MIB,
            "used_mib": self.used() // MIB,
            **{name: self._setting(name) for name in SETTINGS},
        }

    def watch_xids(self) -> Callable[[], list[int] | str]:
        """From now on; the returned function says which came (a fault of a process is one)."""
        api = self._api
        try:
            events = api.nvmlEventSetCreate()
            api.nvmlDeviceRegisterEvents(self._device, api.nvmlEventTypeXidCriticalError, events)
        except api.NVMLError as error:
            reason = f"skipped: {error}"
            return lambda: reason

        def seen() -> list[int]:
            found = []
            try:
                while True:
                    found.append(int(api.nvmlEventSetWait_v2(events, XID_WAIT_MS).eventData))
            except api.NVMLError:  # a timeout: that was all
                return found

        return seen

    def _setting(self, name: str) -> Any:
        try:
            return getattr(self._api, f"nvmlDeviceGet{name}")(self._device)
        except self._api.NVMLError as error:
            return f"not said: {error}"
