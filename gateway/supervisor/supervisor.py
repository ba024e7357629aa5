"""`gateway serve`: the parent, which holds the socket and keeps a child that serves and a spare."""

from __future__ import annotations

from gateway.supervisor.settings import GatewaySettings


class GatewaySupervisor:
    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings

    async def run(self) -> int:
        raise NotImplementedError
