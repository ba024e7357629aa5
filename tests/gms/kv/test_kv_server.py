"""KV memory that outlives engines and servers: real processes, signals and descriptors, on host
memory; where the driver has a say, also on CUDA through the stand-in for it. And memory that an
operator frees, or an engine that rests, also without the service."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from gms import messages as msg
from gms.server.supervisor import GmsSupervisor
from plumbing.errors import RemoteError
from plumbing.pod.paths import gms_journal, gms_socket
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from tests.gms.bench import GmsProcess
from tests.gms.kinds import host_only
from tests.gms.kv.kv_bench import ERA, INDEX_BYTES, MIB, SIZE_BYTES, Borrow, drop_kv
from tests.helpers import auntil, open_fds, until


def test_content_outlives_its_engine_and_the_next_one_finds_it(gms: GmsProcess, borrow: Borrow):
    """Goal: memory and index survive SIGKILL, no memory is there before the first claim. Method:
    write with one engine, kill it, read with the next."""
    assert (gms.status()["kv"]["state"], gms.status()["kv"]["pool_bytes"]) == ("empty", 0)
    first = borrow(1)
    lent = first.expect("lent")
    assert lent["is_fresh"]
    first.do("write blocks")
    first.kill()
    second = borrow(2)
    assert second.expect("lent") == {**lent, "is_fresh": False}
    assert second.do("read") == {"is": "content", "memory": "blocks", "index": "blocks"}
    status = gms.status()["kv"]
    assert status["holder"]["token"] == 2
    assert (status["pools_made_total"], status["pools_lent_total"]) == (1, 2)


def test_engine_serves_through_the_death_of_the_server_and_hands_the_pool_back(
    gms: GmsProcess, borrow: Borrow
):
    """Goal: neither content nor token is lost with the server. Method: kill it under a holder,
    which writes on; after the restart a stale engine is refused, and the next one reads it all."""
    first = borrow(5)
    pool = first.expect("lent")["pool"]
    first.do("write before")
    gms.kill()
    first.do("write after")
    gms.start()
    assert first.do("held")["pool"] == pool
    status = gms.status()["kv"]
    assert (status["state"], status["recoveries_total"]) == ("lent", 1)
    assert borrow(4).expect("refused")["code"] == "gms.kv_stale_token"
    first.kill()
    second = borrow(6)
    assert second.expect("lent")["pool"] == pool
    assert second.do("read")["memory"] == "after"


@host_only
def test_engine_whose_pool_file_was_removed_keeps_its_memory(gms: GmsProcess, borrow: Borrow):
    """Goal: a server that cannot know a pool does not disturb who uses it. Method: remove the file
    under its holder and restart the server."""
    first = borrow(1)
    pool = first.expect("lent")["pool"]
    gms.kill()
    os.unlink(f"{gms.directory}/gms_{gms.device}_kv_{pool}.pool")
    gms.start()
    assert first.do("until detached")["is"] == "state"
    first.do("write on")
    assert first.do("read")["memory"] == "on"
    assert first.do("close")["is"] == "closed"


def refused_for_want_of_room(borrow: Borrow, token: int) -> str:
    """Its reason, by a wait that is long enough for the driver's thread to be asked."""
    for wait_s in (0.3, 3, 30):
        refused = borrow(token, size_bytes=30 * MIB, wait_s=wait_s).expect("refused")
        if refused["reason"] != "gms.kv_making":
            break
    assert refused["code"] == "gms.device_full"
    return str(refused["message"].partition(": ")[2])


def test_memory_that_is_not_there_is_not_promised(gms: GmsProcess, borrow: Borrow):
    """Goal: weights and KV memory share the device. Method: what never fits, what fits only without
    the weights, and weights that fit only without it."""
    reader = gms.load(40 * MIB)
    refused = borrow(1, size_bytes=65 * MIB).expect("refused")
    assert refused["code"] == "gms.kv_too_large"
    said = refused_for_want_of_room(borrow, 2)
    assert "of the 64.0 MiB of" in said
    waiting = borrow(3, size_bytes=30 * MIB)
    waiting.waits(saying="of the 64.0 MiB of")
    reader.close()
    gms.drop()  # also if the server has not seen that end yet
    waiting.expect("lent")
    assert gms.status()["kv"]["full_waits_total"] >= 1
    with gms.writer() as writer:
        writer.plan(40 * MIB)
        with pytest.raises(RemoteError, match=r"KV memory 30.0 MiB .`gms drop-kv` frees it"):
            writer.place("t", 40 * MIB, (40 * MIB,), "uint8")
    waiting.kill()
    until(lambda: drop_kv(gms) == (0, "freed"), "the KV memory")
    with gms.load(40 * MIB):
        assert refused_for_want_of_room(borrow, 4) == said


@host_only
def test_bad_requests_cost_their_connection_only(gms: GmsProcess, borrow: Borrow):
    """Goal: a false hand-back, or a take without the flock, changes nothing and leaks nothing."""
    first = borrow(1)
    pool = first.expect("lent")["pool"]
    offered = "offered-to-a-kv-server"

    def refusal(*messages: Message) -> str:
        with gms.client() as client:
            for message in messages[:-1]:
                client.request(message)
            count = 2 if isinstance(messages[-1], msg.HandBackMsg) else 0
            fds = [OwnedFd(os.memfd_create(offered)) for _ in range(count)]
            with pytest.raises(RemoteError) as caught:
                client.request(messages[-1], fds)
        return caught.value.code

    def hand_back(pool: str, slabs: int = 1) -> msg.HandBackMsg:
        sizes = (SIZE_BYTES,) * slabs
        held = msg.HeldPool(1, ERA, SIZE_BYTES, INDEX_BYTES)
        return msg.HandBackMsg("e", "i", pool, sizes, pool=held)

    claim = msg.BorrowPoolMsg("engine-1", "engine-1-1", 1, ERA, SIZE_BYTES, INDEX_BYTES, 1000)
    assert refusal(msg.TakeMsg()) == "gms.not_attached"
    assert refusal(hand_back("f" * 32)) == "gms.kv_pool_gone"
    assert refusal(hand_back("../" + "f" * 29)) == "gms.bad_offer"
    assert refusal(hand_back(pool, slabs=2)) == "gms.bad_offer"
    assert refusal(claim, claim) == "gms.unexpected_message"

    def leaked() -> list[str]:
        """What outlives a refused session: its socket, its process's pidfd, the memory offered. A
        count of everything would race with files that the server opens for a moment only."""
        links = list(open_fds(gms.process.pid).values())
        sessions = [link for link in links if link == "anon_inode:[pidfd]"]
        return sessions[1:] + [link for link in links if offered in link]

    until(lambda: not leaked(), "what the refused sessions brought to be closed")
    assert gms.status()["kv"]["holder"]["engine"] == "engine-1"


async def test_what_cannot_be_served_of_one_model_stops_no_other(directory: str):
    """Goal: one process serves a device, and each of its models stands alone. Method: one model's
    memory cannot be served; everything else is, and it is once it can be."""
    blocked = gms_socket(directory, "HOST-0.a")
    Path(blocked).touch()  # no socket, so it is not ours to remove
    places = ["HOST-0.a", "HOST-0.b"]
    flags = ["--dir", directory, "--device=HOST-0", *(f"--place={place}" for place in places)]
    words = (sys.executable, "-m", "gms.cli", "serve-device", *flags)
    supervisor = GmsSupervisor(
        directory, {"HOST-0": places}, lambda *_: words, http_host="127.0.0.1", http_port=0
    )
    running = asyncio.create_task(supervisor.run())
    (child,) = supervisor.children
    a, b = child.served
    await auntil(lambda: b.is_responsive, "what can be served")
    assert supervisor._startup().details == {"silent": ["HOST-0.a"], "problems": {}}
    os.unlink(blocked)
    await auntil(lambda: a.status()["kv"]["state"] == "empty", "the other model")
    assert supervisor._startup().ok
    assert child.restarter.restarts == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


# ---------------------------------------------------------------------- memory that is freed


@host_only
def test_operator_frees_idle_memory_and_is_told_who_holds_it(gms: GmsProcess, borrow: Borrow):
    """Goal: `gms drop-kv` frees what no engine uses, and says who does. Method: a holder, a child
    that outlives it, nobody, and nothing left."""
    os.close(os.open(gms_journal(gms.directory, gms.device), os.O_CREAT | os.O_WRONLY))
    assert drop_kv(gms) == (0, "already_empty")
    first = borrow(1)
    first.expect("lent")
    code, said = drop_kv(gms)
    assert (code, f"lent to engine-1 (token 1, pid {first.pid})" in said) == (1, True)
    child = first.do("fork")["pid"]
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: gms.status()["kv"]["state"] == "idle", "the end of its session")
    code, said = drop_kv(gms)
    assert (code, f"still mapped by pid {child}" in said) == (1, True)
    os.kill(child, signal.SIGKILL)
    until(lambda: drop_kv(gms) == (0, "freed"), "its memory")
    assert (gms.status()["kv"]["state"], gms.status()["kv"]["pool_bytes"]) == ("empty", 0)


@host_only
def test_memory_that_is_given_up_is_free_when_the_service_says_so(gms: GmsProcess, borrow: Borrow):
    """Goal: an engine that rests really frees its KV memory, and can have new memory at once.
    Method: two processes of one engine; the kernel's own list of what the server holds."""

    def slabs() -> set[str]:
        """By name: the server has copies for a moment, to send them."""
        links = open_fds(gms.process.pid).values()
        return {link for link in links if "understudy_kv-" in link}

    first, mate = borrow(1), borrow(1)
    for each in (first, mate):
        pool = each.expect("lent")["pool"]
    assert len(slabs()) == 2  # and the index
    mate.ask("give_up 20")
    until(lambda: gms.status()["kv"]["sessions"][1]["state"] == "leaving", "it to be heard")
    assert len(slabs()) == 2
    assert first.do("give_up 20")["is"] == "freed"
    assert slabs() == set()
    assert mate.expect("freed")
    assert (gms.status()["kv"]["state"], gms.status()["kv"]["sessions"]) == ("empty", [])
    again = borrow(1).expect("lent")
    assert again["is_fresh"]
    assert again["pool"] != pool


@host_only
def test_memory_that_is_given_up_while_the_service_is_away_is_free(gms: GmsProcess, borrow: Borrow):
    """Goal: a rest does not depend on the service. Method: kill it; give up; the next server finds
    nothing."""
    first = borrow(1)
    first.expect("lent")
    gms.kill()
    first.do("until rejoining")
    assert first.do("give_up 0.1")["is"] == "freed"
    gms.start()
    until(lambda: gms.status()["kv"]["state"] == "empty", "the file that is left to be removed")
