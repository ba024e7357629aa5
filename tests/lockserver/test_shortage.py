"""A lock server at its limit of descriptors: nobody is refused for it, nothing is dropped, status
names what is not done, and everything is done by itself once there is room."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
from types import SimpleNamespace

import pytest

from lockserver.core import events as ev
from lockserver.core.names import WitnessFile
from lockserver.messages import GrantedMsg, StatusMsg
from lockserver.server.prober import WitnessDesk
from lockserver.server.server import LockPerformer
from lockserver.server.service_socket import ServiceSocket
from plumbing.errors import InvariantError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import Reserve, close_all
from tests.helpers import auntil, free_port, free_witness, open_fds, room_for, until
from tests.lockserver.by_hand import ANSWER_S, Hand
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess, settled_fds
from understudy.status.view import pod_view

PATIENT = ("--silent-ms", "60000")  # engines by hand send no heartbeats
NOTHING = 3  # below every descriptor of the reserve: not even that is of use


def may_open(server: ServerProcess, below: int) -> None:
    """No descriptor of `server` may be opened at this number or above; it keeps those it has."""
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (min(below, hard), hard))


def fill(server: ServerProcess) -> None:
    """Set the limit of `server` to what it has open: the reserve is all that is left."""
    settled_fds(server.pid)
    used = open_fds(server.pid)
    may_open(server, next(n for n in range(len(used) + 1) if n not in used))


def spares(server: ServerProcess) -> int:
    names = open_fds(server.pid).items()
    return sum(name == os.devnull for number, name in names if number > 2)


def document(client: BlockingClient):
    return client.request(StatusMsg()).message.document


def heard(client: BlockingClient, kind: type):
    """The next message of `kind`; others are skipped."""
    while True:
        reply = client.receive(ANSWER_S)
        close_all(reply.fds)
        if isinstance(reply.message, kind):
            return reply.message


def undone(client: BlockingClient) -> list[str]:
    waits = document(client)["locks"]["active"]["waits"]
    return [wait["message"] for wait in waits if wait["reason"] == "no_descriptors"]


def with_service() -> tuple[str, ...]:
    return "--service", f"active=127.0.0.1:{free_port()}", *PATIENT


@pytest.mark.parametrize("died_meanwhile", [False, True], ids=["holder lives", "holder dies"])
def test_standby_that_asks_without_a_descriptor_left_is_queued_later(
    pod_dir, start_server, start_engine, died_meanwhile
):
    """Goal: a shortage costs a healthy standby nothing but time, and no kill during or after it is
    more than a normal failover. Method: a connected standby asks when the server can open nothing:
    it hears who is active, is neither refused nor queued, and status says why and that no failover
    is possible; when there is room, it is queued and, if the holder is gone, granted."""
    server = start_server(*with_service())
    whole = spares(server)
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    with Hand(pod_dir, "engine-1") as hand, hand.connect() as client, hand.connect() as watch:
        document(client)
        document(watch)
        may_open(server, NOTHING)
        client.notify(hand.want())
        assert heard(client, GrantedMsg).token == 1  # the effect behind the one that failed
        until(lambda: document(watch)["problem"], "the shortage to be reported")
        shown = document(watch)
        assert "limit of 3 open files" in shown["problem"]
        assert shown["locks"]["active"]["waiters"] == []
        (look,) = undone(watch)
        assert "check the witness of engine-1" in look
        assert "no_descriptors" not in {w["reason"] for w in shown["locks"]["loader"]["waits"]}
        engines = [{"engine": {"id": "engine-0", "state": "active"}}]
        engines.append({"engine": {"id": "engine-1", "state": "standby"}})
        view = pod_view(pod_dir, shown, [], engines)
        assert (view["failover_ready"], view["state"]) == (False, "degraded")
        if died_meanwhile:
            holder.signal(signal.SIGKILL, tree=True)
            until(holder.is_gone, "the end of the holder")
            releasing = until(lambda: _releasing(watch), "the loss to be noticed")
            assert "witness_lost" not in {each["reason"] for each in releasing["waits"]}
        may_open(server, 1024)
        if not died_meanwhile:
            until(lambda: document(watch)["locks"]["active"]["waiters"], "it to be queued")
            holder.signal(signal.SIGKILL, tree=True)
        assert hand.granted(client) == 2
        until(lambda: document(watch)["problem"] is None, "the shortage to be over")
        assert not undone(watch)
    assert "Traceback" not in server.log()
    until(lambda: spares(server) == whole, "the reserve to be whole")


def _releasing(client: BlockingClient):
    lock = document(client)["locks"]["active"]
    return lock if lock["state"] == "releasing" else None


def test_takeover_and_newcomer_at_the_limit_work_with_the_reserve(
    pod_dir, start_server, start_engine
):
    """Goal: strangers that take every free descriptor take no failover away. Method: lower the
    limit to what is open; a standby that connects then is accepted and lent the socket, and is
    granted when the holder is killed, all at the limit; with room again the reserve is whole."""
    server = start_server(*with_service())
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    whole = spares(server)
    fill(server)

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            await auntil(lambda: standby.services, "the socket to be lent")
            problem = await auntil(lambda: server.status()["problem"], "the reserve's use to show")
            assert "open files" in problem
            holder.signal(signal.SIGKILL, tree=True)
            assert await standby.granted() == 2
            assert not standby.refused
            may_open(server, 1024)
            await auntil(lambda: spares(server) == whole, "the reserve to be whole")
            await auntil(lambda: server.status()["problem"] is None, "the shortage to be over")

    asyncio.run(scenario())
    assert "Traceback" not in server.log()


# ------------------------------------------------------------------ the parts


def test_witness_desk_removes_later_what_it_could_not_look_at(tmp_path):
    """Goal: an ended incarnation's witness does not stay for ever. Method: discard it without a
    descriptor, then let time pass with one."""
    path = free_witness(str(tmp_path), "engine-0-00112233445566aa")
    found = os.stat(path)
    file = WitnessFile(os.path.basename(path), found.st_dev, found.st_ino)
    desk = WitnessDesk(str(tmp_path), Reserve(0))
    with room_for(0):
        desk.discard([file])
        assert desk.tick() == []
        assert desk.is_behind
    assert os.path.exists(path)
    desk.tick()
    assert not os.path.exists(path)
    assert not desk.is_behind


def test_effect_that_fails_unforeseen_ends_the_process_and_is_not_logged_away():
    """Goal: what a shortage cannot explain is our own fault, and never half an answer. Method: an
    effect whose system call fails, with another one behind it."""

    def fail(supervisor: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    parts = SimpleNamespace(processes=SimpleNamespace(forget=fail))
    performer = LockPerformer(parts, None, lambda event: None)
    with pytest.raises(InvariantError, match="Forget failed"):
        performer.perform([ev.Forget("0" * 16), ev.Forget("1" * 16)])


def test_service_address_that_cannot_be_bound_for_now_is_retried_and_taken_from_nobody():
    """Goal: a shortage at a restart is waited out, and is not called a stranger on the port.
    Method: bind with no descriptor left, in time and at the start, then with one."""

    async def scenario() -> None:
        service = ServiceSocket("active", f"127.0.0.1:{free_port()}")
        with room_for(0):
            service.watch(now_ms=0)
            assert "open files" in str(service.problem)
        assert service.is_away
        assert not service.is_taken
        service.watch(now_ms=1000)
        assert not service.is_away
        assert service.problem is None
        service.close()

    asyncio.run(scenario())
