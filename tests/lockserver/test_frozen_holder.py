"""A holder that is frozen by a cgroup: it cannot run, and under cgroup v1 not even die."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.freezer import freezer_of
from tests.helpers import auntil
from tests.lockserver.engines import Engine


@pytest.mark.slow
def test_frozen_holder_is_named_and_not_replaced_before_it_is_thawed_and_dead(
    pod_dir, start_server, start_engine
):
    """Goal: who is frozen keeps the lock, however often it is killed, and status says that it must
    be thawed. Method: freeze its whole tree, wait for the report, kill the tree, thaw it."""
    server = start_server("--silent-ms", "300")
    holder = start_engine("engine-0")
    holder.granted()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            with freezer_of(holder.pids) as freezer:
                freezer.freeze()
                await auntil(
                    lambda: server.lock()["holder"]["unresponsive"], "the holder to be reported"
                )
                lock = server.lock()
                assert {each["halted"] for each in lock["waiting_for"]} == {"frozen"}
                (wait,) = [each for each in lock["waits"] if each["reason"] == "unresponsive"]
                assert wait["fix"].startswith("thaw its container or cgroup first")
                assert f"its supervisor (pid {holder.pids[0]}) is alive, frozen" in wait["evidence"]
                if freezer.is_v1:  # a cgroup v2 lets them die
                    holder.signal(signal.SIGKILL, tree=True)
                    before = server.status()["supervisors"]
                    await auntil(
                        lambda: server.status()["supervisors"] != before, "time to have passed"
                    )
                    assert not holder.is_gone()
                    assert server.lock()["state"] == "held"
                    assert standby.token() == 0
            holder.signal(signal.SIGKILL, tree=True)
            assert await standby.granted() == 2

    asyncio.run(scenario())
