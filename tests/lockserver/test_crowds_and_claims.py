"""Misbehaving clients: too many, too quiet, too late, or duplicate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys

import pytest

from lockserver.core.supervisors import SUPERVISORS_MAX
from plumbing.errors import RemoteError, UnreachableError
from plumbing.wire.blocking import BlockingClient
from tests.helpers import auntil, until
from tests.lockserver.by_hand import Hand
from tests.lockserver.engines import Engine, EngineProcess
from tests.lockserver.processes import ServerProcess

WAITERS = 1000
# Memory allowed for a thousand waiters: 24 KiB each is twice what was measured.


@contextlib.contextmanager
def crowd(directory: str, count: int):
    """`count` waiters in one process, and what became of them."""
    command = [sys.executable, "-m", "tests.lockserver.crowd", directory, str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def in_line(server: ServerProcess) -> int:
    return server.lock()["waiters_total"]


def code_of(hand: Hand, **claims) -> str:
    with hand.connect() as client:
        client.notify(hand.want(**claims))
        with pytest.raises(RemoteError) as refused:
            hand.granted(client)
    return refused.value.code


@pytest.mark.slow
def test_thousand_waiters_cost_the_holder_nothing(pod_dir, start_server, start_engine):
    """Goal: a crowd is slower to serve, and nothing worse. Method: a holder and a thousand waiters;
    the holder dies and the first waiter is granted the lock; the crowd dies, and an engine is
    granted it."""
    server = start_server("--silent-ms", "60000")  # these waiters send no heartbeats
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    with crowd(pod_dir, WAITERS) as found:
        assert found == {"waiting": WAITERS, "refused": {}}
        assert in_line(server) == WAITERS
        assert server.lock()["holder"]["token"] == 1
        holder.close()
        until(lambda: server.status()["token"] == 2, "the next grant")
        assert server.lock()["holder"]["engine"] == "crowd-0"
        assert in_line(server) == WAITERS - 1
        start_engine("engine-1")
        until(lambda: in_line(server) == WAITERS, "one more to wait")
    until(lambda: server.lock()["holder"]["engine"] == "engine-1", "the engine to be granted")
    document = server.status()
    assert (in_line(server), document["supervisors_total"]) == (0, 1)


@pytest.mark.slow
def test_only_waiters_beyond_the_limit_are_refused(pod_dir, start_server, start_engine):
    """Goal: reaching a limit is one clear error, and the limit only affects the process that
    reached it. Method: exceed the limit from one process, which is refused; an engine in another
    process is still accepted, before and after."""
    server = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    with crowd(pod_dir, SUPERVISORS_MAX + 10) as found:
        assert found["refused"].keys() <= {"wire.too_many_connections", "lock.too_many_waiters"}
        assert found["waiting"] == SUPERVISORS_MAX - 1  # the holder counts too
        with Hand(pod_dir, "late") as late:
            assert code_of(late) == "lock.too_many_waiters"
        assert server.lock()["holder"]["token"] == 1
    until(lambda: in_line(server) == 0, "the crowd to be gone")
    with Hand(pod_dir, "late") as late, late.connect() as client:
        client.notify(late.want())
        until(lambda: in_line(server) == 1, "the newcomer to wait")


@pytest.mark.slow
def test_client_that_connects_and_sends_nothing_is_refused_without_side_effects(
    pod_dir, start_server, start_engine
):
    """Goal: silent clients have a deadline and no place in the queue. Method: open silent
    connections beside a holder; each is closed with a code, and a waiter that arrived later is
    granted the lock."""
    server = start_server("--silent-ms", "60000")  # these waiters send no heartbeats
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    with Hand(pod_dir, "engine-1") as hand, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(hand.connect()) for _ in range(20)]
        client = stack.enter_context(hand.connect())
        client.notify(hand.want())
        until(lambda: in_line(server) == 1, "the one that spoke to wait")
        for each in silent:
            with pytest.raises(RemoteError, match=r"wire\.first_frame_deadline"):
                each.receive(30)
            with pytest.raises(UnreachableError):
                each.receive(30)
        assert server.lock()["holder"]["token"] == 1
        holder.close()
        assert hand.granted(client) == 2


@pytest.mark.slow
def test_want_with_an_old_token_or_one_never_granted_is_refused(pod_dir, start_server):
    """Goal: a token alone grants nothing. Method: claims by an incarnation that lost the lock and
    by one that never had it, before and after a restart, with small and huge tokens; and one by the
    holder itself, which is sent its own token."""
    server = start_server()
    with Hand(pod_dir, "engine-0") as old, old.connect() as client:
        client.notify(old.want())
        assert old.granted(client) == 1
        client.notify(old.want(locks=("loader",)))  # gives active up; its process lives on
        assert old.granted(client) == 2
        old.end()
    with Hand(pod_dir, "engine-1") as holder, holder.connect() as client:
        client.notify(holder.want())
        assert holder.granted(client) == 3
        with Hand(pod_dir, "engine-2") as stranger:
            for token in (1, 3, 4, 2**62):
                assert code_of(stranger, tokens={"active": token}) == "lock.stale_claim"
        assert code_of(old, tokens={"active": 1}) == "lock.stale_claim"
        client.notify(holder.want(tokens={"active": 99}))
        assert holder.granted(client) == 3
        server.kill()
        server.start()
        with Hand(pod_dir, "engine-3") as stranger:
            assert code_of(stranger, tokens={"active": 3}) == "lock.stale_claim"
        assert server.lock()["state"] == "recovering"
        with holder.connect() as again:
            again.notify(holder.want(tokens={"active": 1}))
            assert holder.granted(again) == 3


def is_over(client: BlockingClient) -> bool:
    try:
        client.receive(30)
    except UnreachableError:
        return True
    return False


def test_reconnect_that_overtakes_the_old_connections_end_keeps_lock_and_place(
    pod_dir, start_server
):
    """Goal: the newest connection represents the supervisor. Method: holder and waiter reconnect
    before their old connections close; the old ones send one more message and then close late."""
    server = start_server("--silent-ms", "60000")  # these waiters send no heartbeats
    with (
        Hand(pod_dir, "engine-0") as holder,
        Hand(pod_dir, "engine-1") as first,
        Hand(pod_dir, "engine-2") as second,
        contextlib.ExitStack() as stack,
    ):
        old = {}
        for hand in (holder, first, second):
            old[hand] = stack.enter_context(hand.connect())
            old[hand].notify(hand.want())
            old[hand].receive(30)
        new = {hand: stack.enter_context(hand.connect()) for hand in (first, holder)}
        for hand, client in new.items():
            client.notify(hand.want())
            client.receive(30)
        for hand in new:
            until(lambda h=hand: is_over(old[h]), "the old connection to be closed")
            old[hand].close()
        lock = server.lock()
        assert (lock["state"], lock["holder"]["token"]) == ("held", 1)
        assert [each["engine"] for each in lock["waiters"]] == ["engine-1", "engine-2"]
        holder.end()
        new[holder].notify(holder.want(incarnation=None, witness=None, locks=()))
        assert first.granted(new[first]) == 2


@pytest.mark.slow
def test_duplicate_engine_id_is_refused_until_the_first_process_ends(pod_dir, start_server):
    """Goal: two containers with one ENGINE_ID. Method: two supervisors in their own processes; the
    second is refused while the first lives, connected or not, and is accepted automatically
    afterwards."""
    server = start_server()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-0") as twin:
            twin.launch()
            twin.want("active")
            await auntil(lambda: twin.refused, "the twin to be refused")
            assert server.lock()["waiters"] == []
            server.kill()
            await asyncio.to_thread(server.start)
            await auntil(lambda: server.lock()["state"] == "held", "the first to be heard again")
            assert server.lock()["holder"]["token"] == 1
            assert twin.token() == 0
            await asyncio.to_thread(first.close)
            assert await twin.granted() == 2
            assert set(twin.refused) == {"lock.engine_id_taken"}

    with contextlib.closing(EngineProcess(pod_dir, "engine-0")) as first:
        assert first.granted() == 1
        asyncio.run(scenario())
