"""What is printed while nobody reads, while somebody does, and after he has left."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from plumbing.service.config import resolve
from understudy.cli.settings import UP_OPTIONS, local_pod
from understudy.pod.output import terminal
from understudy.pod.ports import Ports


def test_reader_who_does_not_read_or_has_left_stops_nobody():
    """Goal: no line waits for him, and `up | head -1` goes on. Method: a pipe that is not read
    while more is said than it and the queue hold; then its reading end is closed."""
    reading, writing = os.pipe()
    with terminal(writing, lines_max=1000) as say:
        for number in range(100_000):
            say(f"line {number}")
        read = b""
        while read.count(b"\n") < 1000:  # what is said is written by a thread
            assert select.select([reading], [], [], 30.0)[0]
            read += os.read(reading, 1 << 16)
        lines = read.decode().splitlines()
        assert lines[:1000] == [f"line {number}" for number in range(1000)]
        os.close(reading)
        say("for nobody")
    os.close(writing)


@pytest.mark.parametrize(("user", "told"), [({}, "text"), ({"LOG_FORMAT": "json"}, None)])
def test_logs_of_a_pod_are_text_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: dict[str, str], told: str | None
):
    """Goal: people read what `up` prints. Method: the environment of every container of a pod that
    is started at a terminal; a user's own format wins."""
    monkeypatch.delenv("LOG_FORMAT", raising=False)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    pod = local_pod(resolve(UP_OPTIONS, {"model": str(tmp_path)}, {}), (), Ports())
    assert {each.env.get("LOG_FORMAT") for each in pod.containers()} == {told}
