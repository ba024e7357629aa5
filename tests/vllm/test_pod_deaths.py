"""Deaths and stops of vLLM's processes in a pod of two engines of two ranks, under load.

One pod for all of them: a restarted engine imports vLLM four times. The load ends before that, so
that it takes only seconds. Each test waits for the restart, but for the last one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine.supervisor.tree import HELPERS
from gms.upkeep import drop_kv
from plumbing.errors import RemoteError
from plumbing.pod.paths import engine_http_socket
from tests.e2e.fence import assert_witness_fences
from tests.e2e.pods import CLIENTS, Pod, in_pod
from tests.e2e.processes import Processes
from tests.e2e.switching import switch
from tests.helpers import POLL_S, auntil
from understudy.drill.killer import Whole

DEADLINE_S = 30.0
ANSWERS = 2 * CLIENTS
# More tokens than can have been made when a worker is killed: the core waits for no client.
STREAM = {"prompt": [1, 2, 3], "max_tokens": 1000, "ignore_eos": True, "stream": True}


Strike = Callable[[Pod, Whole, Processes], Awaitable[None]]
# A supervisor that goes on, or that has waited for a CPU, finds the death and what vLLM said of it
# at once, in any order.
BOTH_SEEN = ("child_exit", "backend_fault")


@pytest.mark.parametrize(
    ("target", "number", "cause"),
    [("api", signal.SIGKILL, "child_exit"), ("core", signal.SIGSTOP, "unhealthy")],
)
@in_pod
async def test_process_that_dies_or_hangs_is_fenced_and_replaced_without_refusals(
    pod: Pod, target: str, number: int, cause: str
):
    """Goal: whichever process dies, the other engine gives the same answers, after the old one is
    gone, and without leftovers in shared memory; no token for a while is a death. Method: under
    load, SIGKILL to the process that says what vLLM says, and SIGSTOP to one that cannot die by
    itself: the supervisor kills it. The last test kills a worker."""

    async def strike(pod: Pod, before: Whole, victim: Processes) -> None:
        victim.signal(number)

    before = await taken_over(pod, target, strike)
    after = await pod.whole_after(before.token)
    assert after.standbys == (before.engine,)
    assert (await pod.engine(before.engine))["deaths"][-1]["cause"] == cause


@in_pod
async def test_vllm_tree_has_no_process_without_the_witness_that_reaches_a_device(pod: Pod):
    """Goal: below an init, the witness alone proves that vLLM's tree is dead. Method: list the
    trees of the active engine and of the standby; descriptors and maps of each process that lacks
    the witness."""
    whole = await pod.whole()
    for engine in (whole.engine, *whole.standbys):
        supervisor = (await pod.engine(engine))["engine"]["pid"]
        assert_witness_fences(supervisor, pod.tree("gms"), HELPERS)


@in_pod
async def test_signals_of_a_host_that_stops_everything_reach_no_process_of_vllm(pod: Pod):
    """Goal: the supervisor decides when streams end. Method: SIGTERM and SIGINT under load to every
    process of vLLM, of the active engine and of the standby; both are the same processes after
    it, and no request has failed."""
    before = await pod.whole()
    engines = await pod.incarnations()
    trees = [await pod.engine_tree(name) for name in (before.engine, *before.standbys)]
    async with pod.load() as load:
        await load.answers()
        for number in (signal.SIGTERM, signal.SIGINT):
            with Processes(pid for tree in trees for pid in tree) as processes:
                processes.signal(number)
            await load.answers(ANSWERS)
            load.lost_nothing(before.token)
    assert await pod.incarnations() == engines
    assert [await pod.engine_tree(name) for name in (before.engine, *before.standbys)] == trees


async def cut_a_stream(pod: Pod, before: Whole, victim: Processes) -> None:
    """Kill `victim` while the supervisor is stopped, and check what the gateway sees of it."""
    stopped = (await pod.engine(before.engine))["engine"]["pid"]
    path = engine_http_socket(str(pod.directory), before.engine)

    def kill_it() -> None:
        os.kill(stopped, signal.SIGSTOP)  # not before: its init replaces it after three seconds
        victim.signal(signal.SIGKILL)

    try:
        seen = await asyncio.to_thread(read_a_cut_stream, path, kill_it)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert seen.startswith(b"HTTP/1.1 200")
    assert b"error" not in seen
    # On a busy machine the last token may have been made before.
    if b'"finish_reason":"length"' not in seen:
        assert b"[DONE]" not in seen
        assert not seen.endswith(b"0\r\n\r\n")


def read_a_cut_stream(path: str, kill_it: Callable[[], None]) -> bytes:
    """All bytes of a stream whose engine `kill_it` kills at its first token. In a thread, since the
    loop has the load to care for, and the core goes on meanwhile."""
    body = json.dumps(STREAM).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_S)
        client.connect(path)
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        seen = b""
        while b"data: " not in seen:
            more = client.recv(65536)
            assert more, seen
            seen += more
        kill_it()
        while more := client.recv(65536):
            seen += more
    return seen


async def taken_over(pod: Pod, target: str, strike: Strike) -> Whole:
    """Strike a process of the active engine, and wait until the other one serves; the pod as it was
    before."""
    before = await pod.whole()
    backend = (await pod.engine(before.engine))["backend"]
    assert set(backend["pids"]) == {"api", "core", "worker", "worker-1"}
    tree = await pod.engine_tree(before.engine)
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in tree)
    names = set(re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))
    assert names
    with Processes(tree) as old, Processes([backend["pids"][target]]) as victim:
        async with pod.load() as load, pod.grants(old) as grants:
            await load.answers(ANSWERS)
            await strike(pod, before, victim)
            newer = await load.newer(before.token)
            await load.answers(ANSWERS)
            load.lost_nothing(before.token, newer)
        assert [each.token for each in grants.made] == [newer]
        assert grants.made[0].engine in before.standbys
        assert not grants.made[0].alive
    await auntil(lambda: not any(map(os.path.exists, names)), "shared memory to be given back")
    return before


@in_pod
async def test_switchover_loses_and_refuses_no_request(pod: Pod):
    """Goal: a planned switchover of vLLM costs no request and no engine. Method: under streams,
    have the active engine hand over, and then the other one; both are the same processes, on both
    ranks."""
    before = after = await pod.whole()
    engines = await pod.incarnations()
    trees = [await pod.engine_tree(name) for name in (before.engine, *before.standbys)]
    async with pod.load() as load:
        await load.answers(ANSWERS)
        for _ in range(2):
            active, token = after.engine, after.token
            code, document = await switch(pod)
            assert (code, document.get("engine")) == (0, *after.standbys), document
            await load.newer(token)
            await load.answers(ANSWERS)
            after = await pod.whole_after(token)
            assert after.standbys == (active,)
        load.lost_nothing()
    assert (after.engine, await pod.incarnations()) == (before.engine, engines)
    assert [await pod.engine_tree(name) for name in (before.engine, *before.standbys)] == trees


@in_pod
async def test_death_of_a_worker_completes_no_stream_and_half_of_its_blocks_is_adopted_by_none(
    pod: Pod,
):
    """Goal: the gateway never takes a stream that its engine's death broke for a whole answer. And
    an engine of which one rank's KV memory is missing begins with an empty cache on all of its
    ranks, says why, and gives the same answers. Method: SIGKILL a worker in mid-stream, under load,
    while both supervisors are stopped, so that vLLM has all the time it needs to send its error
    event and `[DONE]`; read the bytes to their end. Have the pool of one device dropped before the
    standby goes on. The last test: it leaves the pod as it is."""
    before = await taken_over(pod, "worker", cut_a_stream_and_drop_blocks)
    (name,) = before.standbys
    kv = (await pod.engine(name))["backend"]["kv"]
    assert (kv["memory"], kv["adopted_blocks"]) == ("gms", 0)
    assert "rank 1: the pool is new" in kv["note"]
    assert (await pod.engine(before.engine))["deaths"][-1]["cause"] in BOTH_SEEN


async def cut_a_stream_and_drop_blocks(pod: Pod, before: Whole, victim: Processes) -> None:
    (name,) = before.standbys
    stopped = (await pod.engine(name))["engine"]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        await cut_a_stream(pod, before, victim)
        await dropped(pod)
    finally:
        os.kill(stopped, signal.SIGCONT)


async def dropped(pod: Pod) -> None:
    """Have the KV memory of rank 1 freed once the kernel has it back."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                freed = await asyncio.to_thread(drop_kv, str(pod.directory), "HOST-1", DEADLINE_S)
            except RemoteError as error:
                if error.code not in ("gms.kv_held", "gms.kv_busy"):
                    raise
                await asyncio.sleep(POLL_S)
            else:
                assert freed["devices"][0]["result"] == "freed"
                return
