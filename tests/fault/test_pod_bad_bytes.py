"""Bad bytes sent to every Unix socket of a serving pod: they harm only their sender."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import msgpack
import pytest

from engine import messages as engine_messages
from gms.client import messages as gms_messages
from lockserver.client import messages as lock_messages
from plumbing.errors import RemoteError
from plumbing.pod.observers import ask
from plumbing.wire.frames import HEADER, MAGIC, VERSION, FrameDecoder, encode_frame
from plumbing.wire.limits import MANIFEST_FRAME_BYTES_MAX
from plumbing.wire.messages import Catalogue, FaultMsg, Message
from tests.e2e.pods import Pod, in_pod
from tests.e2e.processes import Processes, kill, same_fds, settled_fds
from tests.fault.conftest import SILENT_MS
from tests.helpers import auntil
from understudy.status.gather import lockserver_part, status_of

ANSWER_S = 30.0  # longer than every deadline of the wire
SILENT = 20  # connections per socket that never send a whole message
STATUS = msgpack.packb({"type": "status", "id": 7})


@dataclass(frozen=True)
class Bad:
    """Bytes, how many descriptors come with them, and the code of the error they must get."""

    what: str
    code: str
    data: bytes
    fds: int = 0


def header(fds: int = 0) -> bytes:
    return HEADER.pack(MAGIC, VERSION, fds, 0, 0)


def framed(fds: int = 0, **body: object) -> bytes:
    return encode_frame(msgpack.packb(body), fds)


FRAMES = (
    Bad("another protocol", "wire.bad_magic", b"GET / HTTP/1.1\r\n\r\n"),
    Bad("random payload", "wire.bad_payload", encode_frame(b"\xc1" * 100, 0)),
    Bad("no request id", "wire.bad_request_id", framed(type="status")),
    Bad("an unknown field", "wire.bad_field", framed(type="status", id=1, loud=True)),
    Bad("announced descriptors that never came", "wire.missing_fds", header(fds=3)),
    Bad("unannounced descriptors", "wire.surplus_fds", encode_frame(STATUS, 0), fds=5),
    Bad("descriptors where none belong", "wire.fd_count", encode_frame(STATUS, 250), fds=250),
    Bad("half a frame, then silence", "wire.first_frame_deadline", encode_frame(STATUS, 0)[:-3]),
    Bad(
        "a frame and a half, then silence",
        "wire.frame_deadline",
        encode_frame(STATUS, 0) + header()[:5],
    ),
    Bad("nothing at all", "wire.first_frame_deadline", b""),
)


def sockets_of(pod: Pod) -> Iterator[tuple[str, Catalogue]]:
    yield str(pod.directory / "lockserver.sock"), lock_messages.CATALOGUE
    yield str(pod.directory / "gms_HOST-0_weights.sock"), gms_messages.CATALOGUE
    for engine in ("engine-0", "engine-1"):
        yield str(pod.directory / f"engine_{engine}.sock"), engine_messages.CONTROL


@pytest.mark.slow
@in_pod
async def test_bad_bytes_affect_only_their_sender(pod: Pod):
    """Goal: the sender gets an error code, no other client is affected, no descriptor leaks.
    Method: every kind at every socket at once, while clients stream; count the descriptors of all
    processes."""
    before = await pod.whole()
    tokens = [part["engine"]["incarnation"] for part in (await pod.view())["engines"]]
    processes = pod.processes()
    fds = await settled_fds(processes)
    async with pod.load() as load:
        await load.answers()
        await asyncio.to_thread(throw_at_all, pod)
        await load.answers()
        assert not load.lost()
        assert not load.refused()
        assert load.tokens() == {before.token}
    after = await pod.whole()
    assert after == before
    assert [part["engine"]["incarnation"] for part in (await pod.view())["engines"]] == tokens
    assert pod.processes() == processes
    await same_fds(fds)


def throw_at_all(pod: Pod) -> None:
    """Connect all, send all, then read: the silent ones all wait for the same deadline."""
    with ExitStack() as stack:
        pairs = os.pipe()
        for fd in pairs:
            stack.callback(os.close, fd)
        thrown = []
        for path, catalogue in sockets_of(pod):
            for bad in FRAMES:
                sock = stack.enter_context(connected(path))
                if bad.data:
                    socket.send_fds(sock, [bad.data], [pairs[0]] * bad.fds)
                thrown.append((path, catalogue, bad, sock))
            for _ in range(SILENT):
                stack.enter_context(connected(path)).sendall(header()[:2])
        for path, catalogue, bad, sock in thrown:
            assert code_from(sock, catalogue) == bad.code, f"{bad.what} at {path}"


def connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(ANSWER_S)
    sock.connect(path)
    return sock


def code_from(sock: socket.socket, catalogue: Catalogue) -> str:
    """Read to the end of the connection; the code of the last frame, which must be an error."""
    decoder = FrameDecoder(MANIFEST_FRAME_BYTES_MAX)
    frames = []
    with contextlib.suppress(ConnectionResetError):  # it closed with bytes of ours unread
        while data := sock.recv(65536):
            frames += decoder.receive(data, [])
    message, _ = catalogue.decode(frames[-1].payload, 0)
    assert isinstance(message, FaultMsg)
    assert message.message
    return message.code


@in_pod
async def test_forged_messages_affect_only_their_sender(pod: Pod):
    """Goal: well-formed messages cannot take what belongs to others. Method: claims by a foreign
    client at every socket, each answered with its code; the pod continues to serve under its
    token."""
    before = await pod.whole()
    active = (await pod.engine(before.engine))["engine"]
    lock, memory, *engines = [path for path, _ in sockets_of(pod)]
    claim = {
        "supervisor": "0" * 16,
        "engine": before.engine,
        "incarnation": active["incarnation"],
        "locks": ("active",),
        "tokens": {"active": before.token},
    }
    stranger = {**claim, "engine": "engine-9", "incarnation": "engine-9-" + "0" * 16}
    want, gms = lock_messages.WantMsg, gms_messages
    control = engine_messages
    cases = [
        (lock, want(**claim), "lock.engine_id_taken"),
        (lock, want(**{**stranger, "incarnation": "engine-9-../../" + "0" * 9}), "lock.bad_want"),
        (lock, want(**stranger), "lock.stale_claim"),
        (lock, lock_messages.BeatMsg(1), "lock.want_first"),
        (
            memory,
            gms.AttachMsg("e", "i", "rw", identity={}, wait_ms=0),
            "gms.already_committed",
        ),
        (memory, gms.AttachMsg("e", "i", "ro", identity={"a": 1}), "gms.identity_mismatch"),
        (memory, gms.AllocateMsg(4096), "gms.not_attached"),
        *((path, control.KillMsg("init"), "engine.unknown_target") for path in engines),
    ]
    async with pod.load() as load:
        for path, message, code in cases:
            with pytest.raises(RemoteError) as caught:
                await ask(path, catalogue_of(message), message)
            assert caught.value.code == code
        await load.answers()
        assert not load.lost()
        assert load.tokens() == {before.token}
    assert await pod.whole() == before


def catalogue_of(message: Message) -> Catalogue:
    package = type(message).__module__.split(".")[0]
    return {
        "lockserver": lock_messages.CATALOGUE,
        "gms": gms_messages.CATALOGUE,
        "engine": engine_messages.CONTROL,
    }[package]


STATUS_ASKED = 20  # after the window: how many times the check must see no grant


@pytest.mark.slow
@in_pod
async def test_stopped_holder_is_not_replaced_by_a_restarted_lock_server(pod: Pod):
    """Goal: no split brain. Method: SIGSTOP the whole tree of the active engine under load, SIGKILL
    the lock server; wait past its window; SIGCONT: the holder continues under its token."""
    before = await pod.whole()
    incarnation = (await pod.engine(before.engine))["engine"]["incarnation"]
    granted = (await status_of(lockserver_part(pod.directory)))[
        "token"
    ]  # one number per grant, of any lock
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
            assert (await status_of(lockserver_part(pod.directory)))["token"] == granted
            assert load.tokens() == {before.token}
            assert not load.lost()
            assert not load.refused()
            assert (await pod.engine(before.engine))["engine"]["incarnation"] == incarnation


async def check_no_grant(pod: Pod, granted: int, tree: list[int]) -> None:
    """Past the window: `recovering`, unresponsive, with the pids to kill and the same token, with
    another engine in the queue."""

    async def overdue():
        lock = (await status_of(lockserver_part(pod.directory))).get("locks", {}).get("active", {})
        return lock if lock and lock["holder"]["unresponsive"] and lock["waiters"] else None

    while (lock := await overdue()) is None:
        pass
    assert lock["state"] == "recovering"
    backend = set(tree[1:])
    assert {each["pid"] for each in lock["waiting_for"]} == backend
    assert all(f"pid {pid} (" in lock["problem"] for pid in backend)
    for _ in range(STATUS_ASKED):
        document = await status_of(lockserver_part(pod.directory))
        assert document["token"] == granted
        assert document["locks"]["active"]["state"] == "recovering"
        assert [each["engine"] for each in document["locks"]["active"]["waiters"]]


@pytest.mark.slow
@in_pod
async def test_stopped_lock_server_costs_nothing(pod: Pod):
    """Goal: engines continue to serve while the lock server hangs, and no engine is replaced for
    its silence when the server resumes. Method: SIGSTOP it under load for longer than its silence
    limit, SIGCONT."""
    before = await pod.whole()
    async with pod.load() as load:
        await load.answers()
        with Processes([pod.pid("lockserver")]) as server:
            async with pod.grants(server) as grants:
                server.signal(signal.SIGSTOP)
                patience_end = time.monotonic() + 1.5 * SILENT_MS / 1000
                await auntil(lambda: time.monotonic() > patience_end, "its patience to end")
                await load.answers()
                server.signal(signal.SIGCONT)
                after = await pod.whole()
                await load.answers()
            assert not grants.made
        assert after == before
        lock = (await status_of(lockserver_part(pod.directory)))["locks"]["active"]
        assert (lock["state"], lock["problem"]) == ("held", None)
        assert load.tokens() == {before.token}
        assert not load.lost()
        assert not load.refused()


@pytest.mark.slow
@in_pod
async def test_relaunched_engine_waits_for_a_stopped_memory_service(pod: Pod):
    """Goal: a relaunched engine waits instead of dying repeatedly, and the others continue to
    serve. Method: SIGSTOP gms's supervisor, SIGKILL its server and the standby's backend; SIGCONT
    once the backend has tried to connect in vain, and check that requests were answered
    throughout."""
    before, numbers = await pod.whole(), await launches(pod)
    (standby,) = before.standbys
    log = pod.directory / "log" / f"{standby}.log"
    told = log.read_text().count("waiting up to")
    async with pod.load() as load:
        with Processes([pod.pid("gms")]) as supervisor:
            supervisor.signal(signal.SIGSTOP)
            kill(pod.gms_server())
            kill((await pod.engine(standby))["backend"]["pids"]["model"])
            await auntil(lambda: log.read_text().count("waiting up to") > told, "a knock in vain")
            await load.answers()
            assert (await pod.view())["active"] == before.engine
            supervisor.signal(signal.SIGCONT)
        assert await pod.whole() == before
        assert await launches(pod) == {**numbers, standby: numbers[standby] + 1}
        await load.answers()
        assert load.tokens() == {before.token}
        assert not load.lost()
    assert (await pod.memory())["commits_total"] == 0  # the active engine's memory is mapped


async def launches(pod: Pod) -> dict[str, int]:
    """The number of each engine's current launch."""
    engines = [part["engine"] for part in (await pod.view())["engines"]]
    return {engine["id"]: engine["number"] for engine in engines}
