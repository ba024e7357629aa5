"""A holder that is stopped while the lock server restarts."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from tests.e2e.pods import Pod, home_with, in_pod
from tests.e2e.processes import Processes, kill
from understudy.status.gather import part_of, status_of

# A restarted lock server calls a silent holder unresponsive after this; it changes nothing else.
WINDOW_MS = 300
# An engine without a heartbeat for this long is skipped and reported; four heartbeats, so that one
# that waits for a CPU is not.
SILENT_MS = 2000
# Longer than the test: clients in the backlog must be answered by an engine.
HOLD_MS = 600_000
LIMITS = {"WINDOW_MS": WINDOW_MS, "SILENT_MS": SILENT_MS, "HOLD_MS": HOLD_MS}
home = home_with(env={f"UNDERSTUDY_{name}": str(limit) for name, limit in LIMITS.items()})
STATUS_ASKED = 20  # after the window: how many times the check must see no grant


@pytest.mark.slow
@in_pod
async def test_stopped_holder_is_not_replaced_by_a_restarted_lock_server(pod: Pod):
    """Goal: no split brain. Method: SIGSTOP the whole tree of the active engine under load, SIGKILL
    the lock server; wait past its window; SIGCONT: the holder continues under its token."""
    before = await pod.whole()
    incarnation = (await pod.engine(before.engine))["engine"]["incarnation"]
    # One number per grant, of any lock.
    granted = (await status_of(part_of(pod.directory, "lockserver")))["token"]
    tree = pod.tree(before.engine)
    with Processes(tree) as holder:
        async with pod.load() as load:
            await load.answers()
            holder.signal(signal.SIGSTOP)
            restarts = pod.runner.restarts()["lockserver"]
            kill(pod.pid("lockserver"))
            await pod.restarted("lockserver", restarts)
            async with pod.grants(holder) as grants:
                await check_no_grant(pod, granted, tree)
                holder.signal(signal.SIGCONT)
                await load.answers()
                after = await pod.whole()
            assert not grants.made
            assert (after.engine, after.token) == (before.engine, before.token)
            assert (await status_of(part_of(pod.directory, "lockserver")))["token"] == granted
            load.lost_nothing(before.token)
            assert (await pod.engine(before.engine))["engine"]["incarnation"] == incarnation


async def check_no_grant(pod: Pod, granted: int, tree: list[int]) -> None:
    """Past the window: `recovering`, unresponsive, with the pids to kill and the same token, with
    another engine in the queue."""

    lock: Mapping[str, Any] = {}
    while not (lock and lock["holder"]["unresponsive"] and lock["waiters"]):
        lock = await pod.lock()
    assert lock["state"] == "recovering"
    backend = set(tree[1:])
    assert {each["pid"] for each in lock["waiting_for"]} == backend
    assert all(f"pid {pid} (" in lock["problem"] for pid in backend)
    for _ in range(STATUS_ASKED):
        document = await status_of(part_of(pod.directory, "lockserver"))
        assert document["token"] == granted
        assert document["locks"]["active"]["state"] == "recovering"
        assert [each["engine"] for each in document["locks"]["active"]["waiters"]]
