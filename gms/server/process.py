"""The server process of one device: the weights and the KV memory of each place on it (of each
model, in a pool), behind a socket each.

What cannot be served of one place, for example because its journal cannot be written, is tried
again and stops no other place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from gms import names
from gms.server.memory_server import MemoryServer
from gms.server.server import STALL_MS, KvServer, WeightsServer
from gms.vmm.interface import DeviceMemory
from plumbing.errors import UnderstudyError

RETRY_S = 1.0

logger = logging.getLogger(__name__)


class DeviceProcess:
    """Everything that this process serves."""

    def __init__(
        self,
        directory: str,
        places: Sequence[str],
        memory: DeviceMemory,
        capacity_bytes: int,
        *,
        is_bounded: bool,
        stall_ms: float = STALL_MS,
        restarts_total: int = 0,
    ) -> None:
        """`is_bounded`: `capacity_bytes` is the limit of weights and KV memory together."""
        self.servers: list[MemoryServer[Any, Any]] = []
        for place in places:
            self.servers.append(
                WeightsServer(
                    directory,
                    place,
                    memory,
                    capacity_bytes,
                    stall_ms=stall_ms,
                    restarts_total=restarts_total,
                    counts_kv=is_bounded,
                )
            )
            if not names.is_offload(place):
                limit_bytes = capacity_bytes if is_bounded else None
                kv = KvServer(directory, place, memory, limit_bytes, restarts_total=restarts_total)
                self.servers.append(kv)
        self._running: list[MemoryServer[Any, Any]] = []
        for server in self.servers:
            server.beside = self._running
        self._late: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve what can be served.

        Raises:
            UnderstudyError, OSError: no weights can.
        """
        failed: list[tuple[MemoryServer[Any, Any], UnderstudyError | OSError]] = []
        for server in self.servers:
            try:
                await self._start(server)
            except (UnderstudyError, OSError) as error:
                failed.append((server, error))
        if not any(server.tag == names.WEIGHTS for server in self._running):
            await self.close()
            raise failed[0][1]
        self._late = [asyncio.create_task(self._retry(*each)) for each in failed]

    async def close(self) -> None:
        """Stop serving; memory lives on where a process maps it."""
        for task in self._late:
            task.cancel()
        for server in self._running:
            await server.close()

    async def _start(self, server: MemoryServer[Any, Any]) -> None:
        await server.start()
        self._running.append(server)

    async def _retry(
        self, server: MemoryServer[Any, Any], error: UnderstudyError | OSError
    ) -> None:
        said = ""
        while True:
            if str(error) != said:
                said = str(error)
                logger.error("the %s of %s are not served: %s", server.tag, server.device, said)
            await asyncio.sleep(RETRY_S)
            try:
                await self._start(server)
            except (UnderstudyError, OSError) as again:
                error = again
            else:
                return
