"""What is printed while nobody reads, while somebody does, and after he has left."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plumbing.service.config import resolve
from tests.understudy.terminals import WAIT_S
from understudy.cli.pods import local_pod
from understudy.cli.settings import UP_OPTIONS
from understudy.pod import output
from understudy.pod.output import Terminal

SAID = 100_000


def read_all(fd: int) -> list[str]:
    """Every line until the pipe's other end is closed."""
    with open(fd, encoding="utf-8") as file:
        return file.read().splitlines()


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits for a reader for as long as a busy machine may keep the writer from writing."""
    monkeypatch.setattr(output, "FLUSH_S", WAIT_S)


@pytest.mark.usefixtures("_patient")
def test_reader_who_does_not_read_stops_nobody():
    """Goal: no line waits for him, and he is told what he has missed, in its place. Method: a pipe
    that is not read until ten times what it and the terminal hold has been said."""
    reading, writing = os.pipe()
    with ThreadPoolExecutor(1) as thread:
        with Terminal(writing, lines_max=1000) as terminal:
            for number in range(SAID):
                terminal.say(f"line {number}")
            lines = thread.submit(read_all, reading)
        os.close(writing)
    number, gaps = 0, 0
    for line in lines.result():
        if line.startswith("("):
            number, gaps = number + int(line[1:].split()[0]), gaps + 1
        else:
            assert line == f"line {number}"
            number += 1
    assert number == SAID
    assert gaps


def test_reader_who_leaves_is_left_alone():
    """Goal: `up | head -1` goes on. Method: a pipe whose reading end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    with Terminal(writing) as terminal:
        for number in range(1000):
            terminal.say(f"line {number}")
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
    pod = local_pod(resolve(UP_OPTIONS, {"model": str(tmp_path)}, {}), UP_OPTIONS, ())
    assert {each.env.get("LOG_FORMAT") for each in pod.containers()} == {told}
