"""A lock server whose machine is short of descriptors: nothing is freed or lost, and everything is
done by itself once there is room. By its own clients it is never short (`room_for_connections`)."""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
from types import SimpleNamespace

import pytest

from lockserver.core import events as ev
from lockserver.server.server import LockServer, LockSettings, room_for_connections
from lockserver.server.service_socket import ServiceSocket
from plumbing.errors import InvariantError, UsageError
from tests.helpers import auntil, free_port, room_for
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess

NOTHING = 3  # below every descriptor that a server opens


def may_open(server: ServerProcess, below: int) -> None:
    """No descriptor of `server` may be opened at this number or above; it keeps those it has."""
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (min(below, hard), hard))


@pytest.mark.parametrize("died_meanwhile", [False, True], ids=["holder lives", "holder dies"])
def test_standby_that_asks_without_a_descriptor_left_is_queued_later(
    pod_dir, start_server, start_engine, died_meanwhile
):
    """Goal: a shortage costs a healthy standby nothing but time, and no kill during or after it is
    more than a normal failover. Method: a connected standby asks when the server can open nothing:
    it is told to ask again, and no lock is freed; when there is room, it is queued and, if the
    holder is gone, granted."""
    server = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            standby.launch()
            await auntil(lambda: server.status()["supervisors_total"] == 2, "its connection")
            may_open(server, NOTHING)
            standby.want("active")
            await auntil(lambda: "lock.witness_unseen" in standby.refused, "its refusal")
            if died_meanwhile:
                holder.signal(signal.SIGKILL, tree=True)
                await auntil(holder.is_gone, "the end of the holder")
                await auntil(lambda: "lock.unreachable" in server.log(), "the shortage to be told")
                assert "lock.free" not in server.log()
            may_open(server, 1024)
            if not died_meanwhile:
                await auntil(lambda: server.lock()["waiters"], "it to be queued")
                holder.signal(signal.SIGKILL, tree=True)
            assert await standby.granted() == 2
            await auntil(lambda: server.status()["problem"] is None, "the shortage to be over")

    asyncio.run(scenario())
    assert "Traceback" not in server.log()


@pytest.mark.parametrize(("limit", "room"), [(4096, 1152), (256, 53), (128, 21), (64, None)])
def test_connections_are_as_many_as_descriptors_allow(limit, room):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        if room is not None:
            assert room_for_connections() == room
            return
        with pytest.raises(UsageError, match="64 files, which is too few") as caught:
            room_for_connections()
        assert caught.value.code == "lock.too_few_descriptors"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_effect_that_fails_unforeseen_ends_the_process_and_is_not_logged_away(pod_dir):
    """Goal: what a shortage cannot explain is our own fault, and never half an answer. Method: an
    effect whose system call fails, with another one behind it."""

    def fail(supervisor: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    async def scenario() -> None:
        server = LockServer(LockSettings(pod_dir))
        server.processes = SimpleNamespace(forget=fail)
        with pytest.raises(InvariantError, match="Forget failed"):
            server._perform([ev.Forget("0" * 16), ev.Forget("1" * 16)])

    asyncio.run(scenario())


def test_service_address_that_cannot_be_bound_or_lent_for_now_is_taken_from_nobody():
    """Goal: a shortage is waited out, and is not called a stranger on the port. Method: bind and
    copy with no descriptor left, then with one."""
    service = ServiceSocket(f"127.0.0.1:{free_port()}")
    with room_for(0):
        service.watch(now_ms=0)
        assert "open files" in str(service.problem)
    assert service.is_away
    assert not service.is_taken
    service.watch(now_ms=1000)
    assert (service.is_away, service.problem) == (False, None)
    with room_for(0):
        assert service.copy() is None
        assert "open files" in str(service.problem)
    copy = service.copy()
    assert copy is not None
    copy.close()
    service.close()
