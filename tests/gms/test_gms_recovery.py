"""Crash without loss: the server dies and gets its memory back from its readers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from gms import messages as msg
from gms import names
from gms.manifest import SLABS_MAX
from plumbing.errors import RemoteError, UnreachableError
from plumbing.wire.fds import OwnedFd
from plumbing.wire.frames import encode_frame
from tests.gms.bench import (
    IDENTITY,
    OTHER,
    ClientProcess,
    GmsProcess,
    hand_back_of,
    inodes,
    is_committed_with,
    journalled,
    kept,
)
from tests.gms.kinds import host_only
from tests.helpers import until

Start = Callable[..., ClientProcess]


def test_restarted_server_gets_the_epoch_back_and_serves_newcomers_from_it(gms: GmsProcess):
    """SIGKILL under a kept reader: the same physical memory is committed, without a load."""
    with gms.load() as reader, kept(reader):
        epoch = reader.epoch
        gms.kill()
        gms.start()
        until(lambda: is_committed_with(gms, 1), "the epoch to be handed back")
        status = gms.status()
        assert (status["epoch"], status["recoveries_total"]) == (epoch, 1)
        with gms.reader(engine="engine-1", incarnation="i-1") as newcomer:
            assert newcomer.epoch == epoch
            assert inodes(newcomer) == inodes(reader), "physical memory is not doubled"
            assert newcomer.read("t") == reader.read("t") == b"\7" * 64


@pytest.mark.parametrize("how", ["stops in the middle", "leaves", "is bad"])
def test_survivor_that_breaks_off_keeps_no_other_waiting(gms: GmsProcess, how: str):
    """The first survivor sends a part and says no more, or leaves, or what it sends is not sealed:
    the second hands the epoch back."""
    with gms.load() as reader, gms.reader(engine="engine-1", incarnation="i-1") as second:
        gms.kill()
        gms.start()
        with gms.client() as client:
            if how == "is bad":
                with pytest.raises(RemoteError, match=r"gms\.bad_slab"):
                    client.request(hand_back_of(reader), [memfd(sum(reader.slab_sizes))])
            else:
                payload = msg.CATALOGUE.encode(hand_back_of(reader), 1)
                frame = encode_frame(payload, len(reader.slab_fds()))
                socket.send_fds(client._sock, [frame[:-1]], reader.slab_fds())
            if how == "leaves":
                client.close()
            with kept(second):
                until(lambda: is_committed_with(gms, 1), "the second to hand it back")


def memfd(size_bytes: int) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("no slab of ours"))
    os.ftruncate(fd.fileno(), size_bytes)
    return fd


def test_start_is_repeated_until_every_part_of_a_place_can_begin(directory: str):
    """The KV part fails first, when the weights' part has locked its journal already."""
    gms = GmsProcess(directory)
    path = names.region_path(directory, gms.device, names.KV, "a" * 32)
    os.symlink(path, path)  # a loop
    env = gms.environment()
    gms.process = subprocess.Popen(gms.words, stderr=subprocess.PIPE, env=env)
    try:
        assert any(b"is not served" in line for line in gms.process.stderr)
        os.unlink(path)
        until(gms.is_up, "the place to be served")
    finally:
        gms.process.stderr.close()
        gms.stop()


@host_only  # whose slabs may be small
def test_epoch_of_as_many_slabs_as_there_may_be_comes_back(gms: GmsProcess):
    """With a large manifest, too: all of it travels in one frame."""
    writer = gms.writer()
    writer.plan(SLABS_MAX * 4096, slab_bytes=4096)
    for index in range(SLABS_MAX):
        writer.place(f"{index:0500}", 4096, (4096,), "uint8")
    with writer.commit(IDENTITY) as reader:
        assert len(reader.slab_sizes) == SLABS_MAX
        gms.kill()
        gms.start()
        reader.rejoin(20)
        assert is_committed_with(gms, 1)
        with gms.reader(engine="engine-1", incarnation="i-1") as other:
            assert other.manifest == reader.manifest


@host_only  # a file is a file
def test_epoch_file_that_cannot_be_looked_at_is_a_problem_until_it_can(gms: GmsProcess):
    """A directory is in its place: no engine may load, and status shows why."""
    with gms.load() as reader:
        path = names.region_path(gms.directory, gms.device, names.WEIGHTS, reader.epoch)
        gms.kill()
    os.unlink(path)
    os.mkdir(path)
    gms.start()
    problem = until(lambda: gms.status()["problem"], "the problem to be told")
    assert path in problem
    assert gms.status()["state"] == "recovering"
    os.rmdir(path)
    until(lambda: gms.status()["state"] == "empty", "the epoch to be found free")
    assert gms.status()["problem"] is None


def test_stopped_survivor_keeps_newcomers_waiting_until_it_continues(
    gms: GmsProcess, client: Start
):
    """SIGSTOP the only survivor: no RW is granted, status names it; SIGCONT: recovered."""
    gms.load().close()
    survivor = client("ro", engine="engine-0")
    survivor.expect("reader")
    survivor.do("keep")
    os.kill(survivor.pid, signal.SIGSTOP)
    gms.kill()
    gms.start()
    newcomer = client("rw_or_ro", engine="engine-1")
    newcomer.expect("waiting")
    unowned = until(lambda: (u := gms.status()["unowned"])[0]["holders"] and u, "its pid")
    assert unowned[0]["holders"] == [survivor.pid]
    assert gms.status()["state"] == "recovering"
    os.kill(survivor.pid, signal.SIGCONT)
    assert newcomer.expect("reader")["epoch"] == gms.status()["epoch"]


@pytest.mark.parametrize("first", ["old", "new"])
def test_survivor_of_a_superseded_epoch_is_kept_in_any_order(gms: GmsProcess, first: str):
    """Two epochs are mapped when the server dies: the journalled one is committed, the other kept
    until its reader leaves, then freed."""
    old = gms.load()
    new = gms.reload(identity=OTHER, engine="engine-1")
    with old, new:
        gms.kill()
        gms.start()
        for reader in [old, new] if first == "old" else [new, old]:
            reader.rejoin(10)
        until(lambda: is_committed_with(gms, 2), "both to be back")
        status = gms.status()
        assert status["epoch"] == new.epoch
        assert status["superseded_bytes"] == sum(old.slab_sizes)
        assert old.read("t") == b"\7" * 64
        old.close()
        until(lambda: gms.status()["superseded_bytes"] == 0, "the old epoch to be given up")
        until(lambda: not gms.status()["unowned"], "its memory to be gone")
        assert gms.status()["epoch"] == new.epoch


def crash_in_commit(gms: GmsProcess, writer: Any, *, after_journal: bool) -> None:
    """Make the writer's next commit meet a server that dies, before or after it is on disk."""

    def request(message: Any, **more: Any) -> Any:
        if after_journal:
            writer.client.notify(message, request_id=9)
            until(lambda: journalled(gms) == writer.epoch, "the commit to be on disk")
        gms.kill()
        gms.start()
        raise UnreachableError("wire.closed", "the service died before it answered")

    writer.client.request = request


def test_writer_in_doubt_whose_commit_was_journalled_becomes_a_reader(gms: GmsProcess):
    """The server dies after the journal and before the answer: the writer hands the epoch back."""
    writer = gms.writer()
    writer.place("t", 64, (64,), "uint8")
    writer.write("t", b"\5" * 64)
    crash_in_commit(gms, writer, after_journal=True)
    with writer.commit(IDENTITY) as reader:
        assert is_committed_with(gms, 1)
        with gms.reader(engine="engine-1", incarnation="i-1") as other:
            assert other.read("t") == b"\5" * 64
            assert inodes(other) == inodes(reader)
