"""Which grants a client believes: tokens compare within an era only."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lockserver import state_file
from lockserver.client.client import LockClient
from lockserver.messages import CATALOGUE, NO_ERA, GrantedMsg
from plumbing.wire.connection import Handler
from plumbing.wire.server import Server
from tests.helpers import auntil, free_port
from tests.lockserver.engines import Engine, HearingClient, running
from tests.lockserver.gateways import Gateway

A = "a" * 16


def grant(token: int, era: str, lock: str = "active") -> GrantedMsg:
    return GrantedMsg(lock, "engine-0", "engine-0-00112233445566aa", token, era)


class OldServer(Handler):
    """It answers each first message with a newer grant, and then with an older one."""

    def __init__(self) -> None:
        self.answers = [grant(7, A), grant(6, A), grant(8, A)]

    def received(self, conn: Any, message: Any, request_id: int, fds: Any) -> None:
        for each in self.answers:
            conn.send(each)
        self.answers = []


@pytest.mark.parametrize("kind", ["supervisor", "gateway"])
async def test_client_reports_an_old_token_as_a_refusal_and_never_as_a_grant(pod_dir, kind):
    """Goal: neither an engine nor a gateway follows an old copy of the state, and both say so.
    Method: a server that goes back by one token between two newer grants."""
    path = os.path.join(pod_dir, "lockserver.sock")
    server = Server(path, CATALOGUE, OldServer(), service="stub")
    await server.start()
    supervisor, gateway = HearingClient(path, engine="engine-1"), Gateway(pod_dir)
    client: LockClient | Gateway = gateway if kind == "gateway" else supervisor

    def heard() -> list[int]:
        return [token for *_, token in supervisor.heard("granted")] or [
            token for _, token, _ in gateway.grants
        ]

    async with running(client):
        await auntil(lambda: heard()[-1:] == [8], "the last grant")
    await server.close()
    assert heard() == [7, 8]
    assert [*supervisor.heard("refused"), *gateway.refusals] == ["lock.old_token"]


def damage(path: str) -> None:
    """Make both slots unreadable."""
    with open(path, "r+b") as file:
        for slot in range(2):
            file.seek(slot * state_file.FORMAT.slot_bytes + 30)
            file.write(b"damage")


async def test_server_that_lost_everything_begins_an_era_that_engine_and_gateway_believe(
    pod_dir, start_server
):
    """Goal: nobody refuses a lock server whose tokens begin again. Method: let tokens grow to 5;
    kill the server and the holder, damage both slots; the standby, which has heard of token 5, is
    granted a smaller one, and the gateway told it."""
    address = f"active=127.0.0.1:{free_port()}"
    server = start_server("--service", address)
    async with Gateway(pod_dir) as gateway, Engine(pod_dir, "engine-1") as standby:
        async with Engine(pod_dir, "engine-0") as holder:
            for _ in range(5):
                token = await holder.hold()
                holder.reap()
                holder.relent()
            await holder.hold()
            await standby.stand_by()
            await auntil(lambda: gateway.grants[-1:], "the grant to be told")
            era = server.status()["era"]
            server.kill()
        damage(os.path.join(pod_dir, state_file.NAME))
        server.start()
        await standby.granted()
        assert standby.token() < token
        now = ("engine-1", standby.token(), server.status()["era"])
        await auntil(lambda: gateway.grants[-1] == now, "the gateway to be told")
        assert now[2] != era
        assert standby.client.era_of(standby.token()) == now[2]
        assert standby.client.era_of(token) == NO_ERA
        assert standby.refused == gateway.refusals == []
