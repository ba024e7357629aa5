"""The page with what an engine has queued: after any death it names nothing that was scheduled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plumbing.pod.queue_page import PAGE_BYTES, SLOTS, QueuePage, QueueReader, attempt_name

OURS, OTHERS = 0x1234_5678_9ABC_DEF0, 7

# Two attempts are queued, and one of them is scheduled; SIGKILL within a change, or after it.
PROGRAM = """
import os, signal, sys
from plumbing.pod.queue_page import QueuePage, attempt_name
page, process = QueuePage(sys.argv[1]), int(sys.argv[2])
page.add(attempt_name(process, 1))
page.add(attempt_name(process, 2))
with page.changing():
    if sys.argv[3] == "within":
        os.kill(os.getpid(), signal.SIGKILL)
    page.remove(attempt_name(process, 2))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "engine_e-0.queue")


def queued(path: str, process: int = OURS) -> set[int]:
    reader = QueueReader(path)
    try:
        return set(reader.queued(process))
    finally:
        reader.close()


def test_page_names_what_is_queued_to_the_process_that_sent_it(path: str):
    """Method: attempts of two gateway processes; one of each is scheduled, one has no name."""
    page = QueuePage(path)
    for number in (1, 2, 3):
        page.add(attempt_name(OURS, number))
        page.add(attempt_name(OTHERS, 10 * number))
    page.add(b"")
    page.remove(attempt_name(OURS, 2))
    page.remove(attempt_name(OTHERS, 30))
    page.remove(attempt_name(OURS, 99))
    assert (queued(path), queued(path, OTHERS)) == ({1, 3}, {10, 20})


def test_attempt_with_several_parts_is_never_on_the_page(path: str):
    """Goal: one of its parts may run. Method: add it three times."""
    page = QueuePage(path)
    page.add(attempt_name(OURS, 1))
    assert queued(path) == {1}
    for _ in range(2):
        page.add(attempt_name(OURS, 1))
        assert queued(path) == set()


def test_newest_are_on_the_page_if_more_are_queued_than_fit(path: str):
    page = QueuePage(path)
    for number in range(1, SLOTS + 4):
        page.add(attempt_name(OURS, number))
    assert queued(path) == set(range(4, SLOTS + 4))
    page.remove(attempt_name(OURS, 1))  # its place is another's now
    assert queued(path) == set(range(4, SLOTS + 4))
    assert os.stat(path).st_size == PAGE_BYTES


@pytest.mark.parametrize(("moment", "expected"), [("within", set()), ("after", {1})])
def test_death_within_a_change_clears_nobody(path: str, moment: str, expected: set[int]):
    command = [sys.executable, "-c", PROGRAM, path, str(OURS), moment]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    assert queued(path) == expected


def test_reader_keeps_the_page_of_the_incarnation_that_died(path: str):
    """Goal: the next incarnation changes nothing of it. Method: open one, make another."""
    QueuePage(path).add(attempt_name(OURS, 1))
    reader = QueueReader(path)
    QueuePage(path).add(attempt_name(OURS, 2))
    assert (set(reader.queued(OURS)), queued(path)) == ({1}, {2})
    reader.close()


@pytest.mark.parametrize("content", [b"", b"x" * PAGE_BYTES, bytes(PAGE_BYTES - 1)])
def test_file_that_is_no_page_clears_nobody(path: str, content: bytes):
    Path(path).write_bytes(content)
    assert queued(path) == set()


def test_without_a_file_what_is_queued_is_only_not_shown(tmp_path: Path):
    page = QueuePage(str(tmp_path / "missing" / "page"))
    page.add(attempt_name(OURS, 1))
    page.remove(attempt_name(OURS, 1))
