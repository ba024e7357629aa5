"""A server that is killed at any moment, and one that finds its state damaged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

import pytest

from lockserver.state_file import FORMAT
from tests.helpers import auntil, until
from tests.lockserver.engines import Engine

KILLS = 12


def owners(engines: Iterable[Engine]) -> dict[int, set[str]]:
    """By token, the engine it was granted to, as received by any engine."""
    found: dict[int, set[str]] = {}
    for engine in engines:
        for lock, incarnation, token in engine.heard:
            assert lock == "active"
            found.setdefault(token, set()).add(incarnation)
    return found


def served(engines: Iterable[Engine]) -> list[str]:
    """The engines that were told that they hold the lock."""
    return [engine.client.engine for engine in engines if engine.token()]


@pytest.mark.slow
async def test_server_killed_repeatedly_holder_keeps_its_token_and_waiters_get_their_turn(
    pod_dir, start_server
):
    """Goal: no number of restarts costs an engine the lock or its turn. Method: with a holder and
    three waiters, kill the server repeatedly, when none, one, … or all of them have reconnected.
    Then each gives up the lock, and each of the others is granted it once, with a larger token."""
    server = start_server()
    async with contextlib.AsyncExitStack() as stack:
        engines = [Engine(pod_dir, f"engine-{number}") for number in range(4)]
        holder, *waiters = engines
        await stack.enter_async_context(holder)
        token = await holder.hold()
        for waiter in waiters:
            await stack.enter_async_context(waiter)
            await waiter.stand_by()
        for kill in range(KILLS):
            before = sum(engine.connects for engine in engines)
            server.kill()
            await asyncio.to_thread(server.start)
            await auntil(
                lambda b=before, k=kill: sum(e.connects for e in engines) >= b + k % 5,
                "as many as that to be back",
            )
        await auntil(lambda: len(server.lock()["waiters"]) == 3, "all of them to wait again")
        assert server.lock()["holder"]["token"] == token == holder.token()
        assert served(engines) == ["engine-0"]
        await _all_in_turn(holder, waiters)
        tokens = owners(engines)
        assert len(tokens) == 4
        assert all(len(who) == 1 for who in tokens.values())


async def _all_in_turn(holder: Engine, waiters: list[Engine]) -> None:
    while waiters:
        last = holder.token()
        holder.reap()
        holder.relent()
        holder = await auntil(
            lambda: next((each for each in waiters if each.token()), None), "the next grant"
        )
        waiters.remove(holder)
        assert holder.token() > last
        assert served(waiters) == []


# A server that is killed at one system call of its start.
DOOMED_START = """
import os, signal, sys
from lockserver import cli
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, sys.argv[1], die)
cli.main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", ["link", "posix_fallocate", "pwrite", "fsync", "rename"])
def test_server_killed_while_it_replaces_a_damaged_state_loses_no_token_and_no_holder(
    pod_dir, start_server, start_engine, step
):
    """Goal: recovery of a lost state may be interrupted at any point. Method: damage one slot; kill
    a server at each step of setting the file aside and creating it anew, and once more; then start
    one that survives. The holder's claim is believed, and the next token is above all earlier
    ones."""
    server = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    server.kill()
    with open(os.path.join(pod_dir, "lockserver.json"), "r+b") as file:
        file.write(b"\xff" * 8)
    start = [sys.executable, "-c", DOOMED_START, step, "serve", "--dir", pod_dir]
    for _ in range(2):
        ran = subprocess.run([*start, "--http-port", "0"], capture_output=True, timeout=60)
        assert ran.returncode == -signal.SIGKILL, ran.stderr
    server.start()
    until(lambda: server.lock()["state"] == "held", "the claim to be believed")
    assert server.lock()["holder"]["token"] == 1
    holder.close()
    assert start_engine("engine-1").granted() >= 3


DAMAGES = ("truncate", "empty", "garbage", "newest_slot", "newer_version", "delete", "fifo")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
async def test_broken_state_file_with_living_holder_keeps_its_token_and_the_next_is_larger(
    pod_dir, start_server, damage
):
    """Goal: an unreadable file loses no lock. Method: damage it while the server is dead."""
    server = start_server()
    async with Engine(pod_dir, "engine-0") as holder, Engine(pod_dir, "engine-1") as standby:
        token = await holder.hold()
        await standby.stand_by()
        server.kill()
        _damage(os.path.join(pod_dir, "lockserver.json"), damage)
        server.start()
        await auntil(lambda: server.lock()["state"] == "held", "the claim to be believed")
        assert server.lock()["holder"]["token"] == token
        assert standby.token() == 0
        kept = [name for name in os.listdir(pod_dir) if ".unreadable-" in name]
        assert bool(kept) == (damage != "delete")
        holder.reap()
        holder.relent()
        assert await standby.granted() >= token + 2


def _damage(path: str, damage: str) -> None:
    if damage == "delete":
        os.unlink(path)
    elif damage == "fifo":
        os.unlink(path)
        os.mkfifo(path, 0o600)
    elif damage in ("truncate", "empty"):
        os.truncate(path, 5000 if damage == "truncate" else 0)
    elif damage == "newer_version":
        from_the_future(path)
    else:
        with open(path, "r+b") as file:
            # The first grant has sequence 2 and is in the first slot.
            file.seek(100 if damage == "newest_slot" else 0)
            file.write(b"\xff" * (8 if damage == "newest_slot" else 8192))


def from_the_future(path: str) -> None:
    """Turn every record into one of a future version: valid checksums, unknown meaning."""
    with open(path, "r+b") as file:
        for slot in FORMAT.decode(file.read()):
            assert slot is not None
            sequence, text = slot
            body = json.loads(text)
            body |= {"schema": 2, "holders": list(body["holders"].values())}
            file.seek(sequence % 2 * FORMAT.slot_bytes)
            file.write(FORMAT.encode(sequence, json.dumps(body).encode()))


@pytest.mark.slow
async def test_state_file_of_a_newer_version_still_counts_its_tokens(pod_dir, start_server):
    """Goal: a downgrade reuses no token. Method: ten grants, a file of a future version, no living
    holder to claim the lock; the next grant is above all earlier ones."""
    server = start_server()
    async with Engine(pod_dir, "engine-0") as engine:
        for token in range(1, 11):
            assert await engine.hold() == token
            engine.reap()
            engine.relent()
    server.kill()
    from_the_future(os.path.join(pod_dir, "lockserver.json"))
    server.start()
    async with Engine(pod_dir, "engine-1") as engine:
        assert await engine.hold() == 12
