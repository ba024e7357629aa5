"""The processes of `gms serve` beside a device's server that keep its weights' host copy.

The copy's server is one like that of any device, of host memory; its keeper (`gms.copies.keeper`)
has no socket, so all that is known of it is whether it runs. Neither is ever given up: weights are
served without a copy.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

from plumbing.errors import explain_shortage
from plumbing.pod.child_process import ChildProcess
from plumbing.service.events import EventLog
from plumbing.service.process import parent_environment

RETRY_S = 2.0  # its start costs a third of a second of one core, and nobody waits for it


class CopierProcess:
    """The keeper of one device's host copy, restarted whenever it ends."""

    def __init__(
        self,
        device: str,
        command: Callable[[str], Sequence[str]],
        environment: Callable[[str], Mapping[str, str]],
        log: EventLog,
    ) -> None:
        self.device = device
        self.process: ChildProcess | None = None
        self._command, self._environment, self._log = command, environment, log
        self._said = ""

    async def run(self) -> None:
        """Keep it running until this task is cancelled."""
        while True:
            environ = {**os.environ, **self._environment(self.device), **parent_environment()}
            try:
                self.process = ChildProcess(self._command(self.device), environ)
            except OSError as error:
                self._note(f"cannot be started: {explain_shortage(error.errno)}")
            else:
                self._note(f"ended with {await self.process.wait()}")
            await asyncio.sleep(RETRY_S)

    def _note(self, what: str) -> None:
        said = f"what keeps the host copy of {self.device} {what}; restarting it"
        if said != self._said:  # once while it lasts
            self._said = said
            about = {"device_uuid": self.device}
            self._log.record("gms.child_exit", said, "warning", about)
