"""Clocks never decide which engine holds the lock: a shift of an hour only changes what is
printed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess

import pytest

from tests.helpers import auntil
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess

HOUR_S = 3600
TIME_NAMESPACE = ("unshare", "--time", f"--monotonic={HOUR_S}", f"--boottime={HOUR_S}")


def why_no_time_namespace() -> str | None:
    if shutil.which("unshare") is None:
        return "needs unshare (util-linux)"
    tried = subprocess.run([*TIME_NAMESPACE, "true"], capture_output=True)
    return None if tried.returncode == 0 else "this container may not make time namespaces"


@pytest.mark.slow
@pytest.mark.skipif(why_no_time_namespace() is not None, reason=str(why_no_time_namespace()))
@pytest.mark.parametrize("is_later_first", [True, False], ids=["set_back", "set_forward"])
def test_monotonic_clock_shifted_by_an_hour_between_two_servers_changes_nothing(
    pod_dir, start_engine, is_later_first
):
    """Goal: clock values on file are only for display. Method: run a server whose monotonic clock
    is an hour ahead (a time namespace) and then one without, in either order: the living holder
    keeps its token at once, and after its death the next grant is immediate."""
    server = ServerProcess(pod_dir, "--window-ms", "3600000")
    plain = server.command
    ahead = (*TIME_NAMESPACE, *plain)
    first, second = (ahead, plain) if is_later_first else (plain, ahead)

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            server.kill()
            server.command = second
            await asyncio.to_thread(server.start)
            await auntil(lambda: server.lock()["state"] == "held", "the holder to be heard")
            await auntil(lambda: server.lock()["waiters"], "the standby to wait again")
            assert server.lock()["holder"]["token"] == 1
            server.kill()
            holder.signal(signal.SIGKILL, tree=True)
            await asyncio.to_thread(server.start)
            assert await standby.granted() == 2

    with contextlib.closing(server):
        server.command = first
        server.start()
        holder = start_engine("engine-0")
        assert holder.granted() == 1
        asyncio.run(scenario())
