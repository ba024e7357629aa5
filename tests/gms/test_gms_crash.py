"""The server dies: what readers see, what its successor finds and for how long it waits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import pytest

from gms.core.events import JournalRecord, LoadedJournal
from gms.manifest import LayoutHash
from gms.server import journal
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import gms_journal
from tests.gms.bench import DEVICE, ClientProcess, GmsProcess
from tests.helpers import until

Start = Callable[..., ClientProcess]


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


@pytest.mark.slow
def test_commit_waits_for_a_journal_that_cannot_be_written(gms: GmsProcess, client: Start):
    """The journal's place is blocked: status says so, and the commit goes through once it is not.

    A full disk cannot do this to a preallocated file; a directory that took its name can.
    """
    path = gms_journal(gms.directory, gms.device)
    os.unlink(path)
    os.mkdir(path)
    writer = client()
    writer.expect("writer")
    writer.do("place 1")
    writer.process.stdin.write(b"commit\n")
    writer.process.stdin.flush()
    problem = until(lambda: gms.status()["problem"], "the problem to be reported")
    assert path in problem
    assert gms.status()["state"] == "staging"
    os.rmdir(path)
    assert writer.line()["is"] == "committed"
    assert gms.status()["problem"] is None
    record = journal.peek(path)
    assert record.epoch == gms.status()["epoch"]


@pytest.mark.parametrize("said", [JournalRecord("a" * 32, 8192, LayoutHash("h"), "i"), None])
def test_journal_returns_what_was_written(directory: str, said: JournalRecord | None):
    """Write, read; two servers cannot share it. One torn slot may have held the newest record: the
    journal is lost, also for the next server, until something is written."""
    path = gms_journal(directory, DEVICE)
    assert journal.peek(path) is None
    with opened(path) as written:
        assert written.loaded == LoadedJournal()
        written.write(said)
        with pytest.raises(UnderstudyError, match="in_use"):
            journal.CommitJournal(path)
    with opened(path) as again:
        assert again.loaded == LoadedJournal(said)
    with open(path, "r+b") as stream:
        stream.write(b"torn")
    for _ in range(3):
        with opened(path) as again:
            assert again.loaded == journal.LOST
    aside = [name for name in os.listdir(directory) if ".unreadable" in name]
    assert aside == [f"{os.path.basename(path)}.unreadable-1"], "kept aside once"
    with opened(path) as last:
        last.write(said)
    with opened(path) as after:
        assert after.loaded == LoadedJournal(said)


def opened(path: str) -> contextlib.closing[journal.CommitJournal]:
    return contextlib.closing(journal.CommitJournal(path))
