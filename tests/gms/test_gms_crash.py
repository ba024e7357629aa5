"""The server dies: what readers see, what its successor finds and for how long it waits."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable

import pytest

from gms import names
from gms.core.events import JournalRecord
from gms.manifest import LayoutHash
from gms.server import journal
from plumbing.errors import UnderstudyError, UnreachableError
from tests.gms.bench import DEVICE, ClientProcess, GmsProcess
from tests.helpers import until

Start = Callable[..., ClientProcess]


def has_ended(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def test_reader_sees_the_servers_death_and_keeps_its_memory(gms: GmsProcess):
    """SIGKILL the server: the session's descriptor becomes readable, the bytes stay mapped."""
    with gms.load() as reader:
        assert not has_ended(reader.fileno())
        gms.kill()
        until(lambda: has_ended(reader.fileno()), "the end of the session")
        assert reader.read("t") == b"\7" * 64


def test_waiting_client_notices_the_servers_death(gms: GmsProcess, client: Start):
    """SIGKILL the server under a client that queues: an error at once, not at its deadline."""
    with gms.writer():
        waiter = client(engine="engine-1")
        waiter.expect("waiting")
        gms.kill()
        assert waiter.expect("refused")["code"] == "wire.closed"


def test_restarted_server_is_recovering_until_no_process_maps_the_epoch(
    gms: GmsProcess, client: Start
):
    """Kill and restart under a reader: no session is granted, status names it; then empty."""
    gms.load().close()
    survivor = client("ro", engine="engine-0")
    survivor.expect("reader")
    gms.kill()
    gms.start()
    status = until(
        lambda: (s := gms.status())["unowned"][0]["holders"] and s, "the survivor to be named"
    )
    assert status["state"] == "recovering"
    assert status["unowned"][0]["holders"] == [survivor.pid]
    assert status["releasing_bytes"] > 0
    newcomer = client("rw_or_ro", engine="engine-1")
    assert "previous server" in newcomer.expect("waiting")["reason"]
    with pytest.raises(UnderstudyError, match=r"gms\.wait_timeout"):
        gms.reader(wait_s=0.05)
    assert survivor.do("read")["first"] == 7, "its mapping is untouched"
    survivor.kill()
    newcomer.expect("writer")
    assert gms.status()["state"] == "staging"
    assert journal.peek(names.journal_path(gms.directory, gms.device)) is None


def test_restarted_server_waits_for_a_writer_of_the_old_one(gms: GmsProcess, client: Start):
    """A writer that outlives its server still maps staging memory: no second copy until it ends."""
    writer = client(engine="engine-0")
    writer.expect("writer")
    writer.do("place 4")
    gms.kill()
    gms.start()
    assert gms.status()["state"] == "recovering"
    newcomer = client(engine="engine-1")
    newcomer.expect("waiting")
    writer.kill()
    newcomer.expect("writer")


def test_restarted_server_without_survivors_is_empty_at_once(gms: GmsProcess):
    """Nobody maps the journalled epoch: its file and its place in the journal are gone."""
    gms.load().close()
    gms.kill()
    gms.start()
    until(lambda: gms.status()["state"] == "empty", "the old epoch to be found free")
    assert names.epochs_on_disk(gms.directory, gms.device) == []
    gms.load().close()


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": 1}', b'{"schema": 9}', b"\xff" * 9])
def test_broken_journal_is_kept_aside_and_the_server_starts(directory: str, content: bytes):
    """A truncated or foreign journal: start empty, keep the file."""
    path = names.journal_path(directory, DEVICE)
    with open(path, "wb") as stream:
        stream.write(content)
    server = GmsProcess(directory).start()
    try:
        assert server.status()["state"] == "empty"
        with open(f"{path}.unreadable-1", "rb") as stream:
            assert stream.read() == content
    finally:
        server.stop()


def test_broken_journal_does_not_hide_a_survivor(gms: GmsProcess, client: Start):
    """The journal is lost, a reader lives: its epoch's file alone keeps newcomers waiting."""
    gms.load().close()
    survivor = client("ro")
    survivor.expect("reader")
    gms.kill()
    with open(names.journal_path(gms.directory, gms.device), "w") as stream:
        stream.write("not json")
    gms.start()
    assert gms.status()["state"] == "recovering"
    survivor.kill()
    until(lambda: gms.status()["state"] == "empty", "the epoch to be free")


@pytest.mark.slow
def test_commit_waits_for_a_journal_that_cannot_be_written(gms: GmsProcess, client: Start):
    """The journal's place is blocked: status says so, and the commit goes through once it is not.

    A full disk cannot do this to a preallocated file; a directory that took its name can.
    """
    path = names.journal_path(gms.directory, gms.device)
    os.unlink(path)
    os.mkdir(path)
    writer = client()
    writer.expect("writer")
    writer.do("place 1")
    assert writer.process.stdin is not None
    writer.process.stdin.write(b"commit\n")
    writer.process.stdin.flush()
    problem = until(lambda: gms.status()["problem"], "the problem to be reported")
    assert path in problem
    assert gms.status()["state"] == "staging"
    os.rmdir(path)
    assert writer.line()["is"] == "committed"
    assert gms.status()["problem"] is None
    record = journal.peek(path)
    assert record is not None
    assert record.epoch == gms.status()["epoch"]


def test_journal_returns_what_was_written(directory: str):
    """Write, read, clear; `peek` of a broken one leaves it alone; one lost slot is said."""
    path = names.journal_path(directory, DEVICE)
    assert journal.peek(path) is None
    record = JournalRecord("a" * 32, 8192, LayoutHash("h"), "i", "d" * 64)
    with contextlib.closing(journal.CommitJournal(path)) as written:
        assert written.loaded == journal.LoadedJournal()
        written.write(record)
    with contextlib.closing(journal.CommitJournal(path)) as again:
        assert again.loaded == journal.LoadedJournal(record)
        again.write(None)
        assert journal.peek(path) is None
    with open(path, "r+b") as stream:
        stream.write(b"torn")
    with contextlib.closing(journal.CommitJournal(path)) as broken:
        assert broken.loaded == journal.LoadedJournal(is_lost=True)
    assert os.path.exists(f"{path}.unreadable-1")


def test_journal_of_another_server_is_not_shared(directory: str):
    """Two servers cannot write one journal."""
    path = names.journal_path(directory, DEVICE)
    with (
        contextlib.closing(journal.CommitJournal(path)),
        pytest.raises(UnderstudyError, match="in_use"),
    ):
        journal.CommitJournal(path)


def test_no_server_is_one_sentence(directory: str):
    """Attach without a server: unreachable, with a hint."""
    with pytest.raises(UnreachableError, match="is its process running"):
        GmsProcess(directory).reader()
