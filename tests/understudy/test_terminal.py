"""What is printed while nobody reads, while somebody does, and after he has left."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.understudy.test_top import WAIT_S, terminal
from understudy.up import terminal as up_terminal
from understudy.up.terminal import Terminal

SAID = 100_000


def read_all(fd: int) -> list[str]:
    """Every line until the pipe's other end is closed."""
    with open(fd, encoding="utf-8") as file:
        return file.read().splitlines()


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits for a reader for as long as a busy machine may keep the writer from writing."""
    monkeypatch.setattr(up_terminal, "FLUSH_S", WAIT_S)


@pytest.mark.usefixtures("_patient")
def test_lines_are_printed_in_order_and_all_of_them_at_the_end():
    """Goal: nothing is lost to the thread. Method: a thousand lines, and the end at once."""
    reading, writing = os.pipe()
    with Terminal(writing) as terminal:
        for number in range(1000):
            terminal.say(f"line {number} \udc80")
    os.close(writing)
    assert read_all(reading) == [f"line {number} ?" for number in range(1000)]


@pytest.mark.usefixtures("_patient")
def test_reader_who_does_not_read_stops_nobody():
    """Goal: no line waits for him, and he is told what he has missed, in its place. Method: a pipe
    that is not read until ten times what it and the terminal hold has been said."""
    reading, writing = os.pipe()
    with ThreadPoolExecutor(1) as thread:
        with Terminal(writing, pending_max_bytes=10_000) as terminal:
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


def test_logs_of_a_pod_are_text_on_a_terminal(tmp_path: Path):
    """Goal: people read what `up` prints. Method: a pod whose one container tells its log format,
    started at a terminal."""
    manifest = tmp_path / "pod.yaml"
    command = ["sh", "-c", "trap 'exit 0' TERM; echo as $LOG_FORMAT; while :; do sleep 0.1; done"]
    spec = {"containers": [{"name": "main", "image": "x", "command": command}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
    manifest.write_text(json.dumps(pod))
    with terminal("up", f"-f{manifest}", f"--dir={tmp_path / 'pod'}") as up:
        up.sees("main | as text")
        up.process.send_signal(signal.SIGINT)
        up.sees("SIGINT: stopping the pod")
        assert up.process.wait(WAIT_S) == 0


def test_second_ctrl_c_kills_the_pod_and_is_the_exit_code(tmp_path: Path):
    """Method: a container that ignores SIGTERM."""
    manifest = tmp_path / "pod.yaml"
    command = ["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"]
    spec = {"containers": [{"name": "main", "image": "x", "command": command}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
    manifest.write_text(json.dumps(pod))
    with terminal("up", f"-f{manifest}", f"--dir={tmp_path / 'pod'}") as up:
        up.sees("main | deaf")
        up.process.send_signal(signal.SIGINT)
        up.sees("SIGINT: stopping the pod")
        up.process.send_signal(signal.SIGINT)
        up.sees("SIGINT: killed the pod")
        assert up.process.wait(WAIT_S) == 130
