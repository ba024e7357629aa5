"""The lock's state file: damaged, from another version, unwritable, or on a full disk."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal

import pytest

from lockserver.state_file import FORMAT, SLOT_BYTES
from tests.helpers import auntil
from tests.lockserver.by_hand import Hand
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess

DAMAGES = ("truncate", "empty", "garbage", "newest_slot", "newer_version", "delete", "fifo")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_broken_state_file_with_living_holder_keeps_its_token_and_the_next_is_larger(
    pod_dir, start_server, damage
):
    """Goal: an unreadable file loses no lock. Method: damage it while the server is dead."""
    server = start_server()

    async def scenario() -> None:
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

    asyncio.run(scenario())


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


@pytest.mark.slow
def test_broken_state_file_with_stopped_holder_no_engine_is_granted(
    pod_dir, start_server, start_engine
):
    """Goal: the absence of a claim proves nothing. Method: stop the holder's tree, lose the file,
    restart: an unknown process holds the witness, so the lock stays unknown until that process is
    killed."""
    server = start_server()
    holder = start_engine("engine-0")
    holder.granted()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            holder.signal(signal.SIGSTOP, tree=True)
            server.kill()
            os.unlink(os.path.join(pod_dir, "lockserver.json"))
            server.start()
            await auntil(lambda: server.lock()["waiters"], "the standby to queue again")
            assert server.lock()["state"] == "recovering"
            holder.signal(signal.SIGKILL, tree=True)
            await standby.granted()

    asyncio.run(scenario())


def from_the_future(path: str) -> None:
    """Turn every record into one of a future version: valid checksums, unknown meaning."""
    with open(path, "r+b") as file:
        for slot in FORMAT.decode(file.read()):
            assert slot is not None
            sequence, text = slot
            body = json.loads(text)
            body |= {"schema": 2, "holders": list(body["holders"].values())}
            file.seek(sequence % 2 * SLOT_BYTES)
            file.write(FORMAT.encode(sequence, json.dumps(body).encode()))


@pytest.mark.slow
def test_state_file_of_a_newer_version_still_counts_its_tokens(pod_dir, start_server):
    """Goal: a downgrade reuses no token. Method: ten grants, a file of a future version, no living
    holder to claim the lock; the next grant is above all earlier ones."""
    server = start_server()

    async def scenario() -> None:
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

    asyncio.run(scenario())


@pytest.mark.slow
def test_unwritable_state_grants_nothing_reports_it_and_recovers(pod_dir, start_server):
    """Goal: nothing is granted that is not on disk, and a witness that cannot be sealed frees
    nothing; both are reported, and both clear by themselves. Method: make a running server's files
    unwritable (RLIMIT_FSIZE, as EIO or a read-only file system would) before a death, and before a
    grant; then undo it."""
    server = start_server("--silent-ms", "60000")  # this holder sends no heartbeats

    async def scenario() -> None:
        with Hand(pod_dir, "engine-0") as hand, hand.connect() as client:
            client.notify(hand.want())
            assert hand.granted(client) == 1
            async with Engine(pod_dir, "engine-1") as standby:
                await standby.stand_by()
                _may_write(server, 0)
                hand.end()
                client.notify(hand.want(incarnation=None, witness=None, locks=()))
                problem = await auntil(lambda: server.lock()["problem"], "the reason to be shown")
                assert "cannot be sealed" in problem
                assert server.lock()["state"] == "releasing"
                _may_write(server, 1)  # now sealing works, but the file cannot be written
                await auntil(
                    lambda: "grants cannot be written" in str(server.lock()["problem"]),
                    "the other reason to be shown",
                )
                assert server.status()["problem"]
                assert server.lock()["state"] == "free"
                assert standby.token() == 0
                _may_write(server, resource.RLIM_INFINITY)
                assert await standby.granted() == 2
                assert server.status()["problem"] is None

    asyncio.run(scenario())


def _may_write(server: ServerProcess, size_bytes: int) -> None:
    """Limit the length of the files that `server` writes."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
