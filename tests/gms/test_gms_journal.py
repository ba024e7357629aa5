"""The journal of one device: what it says after its file was damaged."""

from __future__ import annotations

import contextlib
from pathlib import Path

from gms.core.events import JournalRecord
from gms.manifest import LayoutHash
from gms.server import journal

RECORD = JournalRecord("a" * 32, 8192, LayoutHash("h"), "i", "d" * 64)


def opened(path: Path) -> contextlib.closing[journal.CommitJournal]:
    return contextlib.closing(journal.CommitJournal(str(path)))


def test_a_lost_journal_is_lost_until_something_is_written(tmp_path: Path):
    """Goal: a second death before any survivor spoke forgets nothing. Method: damage the file, open
    it three times, write, open again; and the same with nothing to be committed."""
    for said in (RECORD, None):
        path = tmp_path / f"journal-{said is None}"
        with opened(path) as first:
            first.write(RECORD)
        path.write_bytes(b"torn" + path.read_bytes()[4:])
        for _ in range(3):
            with opened(path) as again:
                assert again.loaded == journal.LOST
        assert [p.name for p in tmp_path.glob(f"{path.name}.unreadable*")] == [
            f"{path.name}.unreadable-1"
        ], "kept aside once: the new file can be read"
        with opened(path) as last:
            last.write(said)
        with opened(path) as after:
            assert after.loaded == journal.LoadedJournal(said)
