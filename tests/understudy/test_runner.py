"""The runner with real processes: order, probes, restarts, logs, its own death."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.service.procfs import is_alive, parent
from tests.helpers import auntil, free_port, open_fds
from understudy.pod import runner as runner_module
from understudy.pod.output import LINE_MAX_BYTES, ContainerLog
from understudy.pod.runner import PodRunner, run_pod
from understudy.pod.table import INIT, Container, HttpProbe

# Answers 503 to the first probes and 200 to the later ones, and writes its order of events down.
WEB = """
import http.server, sys
name, port, refusals, journal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
def note(text):
    with open(journal, "a") as file:
        file.write(f"{name} {text}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        if Handler.asked == refusals + 1:
            note("passed")  # before the answer, which starts the next container
        self.send_response(200 if Handler.asked > refusals else 503)
        self.end_headers()
    def log_message(self, *args): pass
note("began")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ARMED = """
from plumbing.service.process import arm_from_environment
import signal
arm_from_environment()
print("armed")
signal.pause()
"""
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf")
while True:
    signal.pause()
"""
# At SIGTERM it makes a file, waits for another, and writes its name down.
ENDS = """
import os, signal, sys, time
journal, name, mine, awaited = sys.argv[1:]
def end(*_):
    open(mine, "w")
    while not os.path.exists(awaited):
        time.sleep(0.01)
    open(journal, "a").write(name + "\\n")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, end)
print("armed")
while True:
    signal.pause()
"""


def python(name: str, code: str, *args: object, **more) -> Container:
    command = (sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, args))
    return Container(name, command, **more)


def web(name: str, journal: Path, refusals: int = 0) -> Container:
    port = free_port()
    probe = HttpProbe(f"http://127.0.0.1:{port}/startup", 1, 60)
    return python(name, WEB, name, port, refusals, journal, startup=probe)


@asynccontextmanager
async def running(place: Path, *containers: Container, say=lambda line: None):
    """A runner of these containers, whose logs are in `place`; stopped at the end."""
    runner = PodRunner(containers, place, say)
    try:
        await runner.start()
        yield runner
    finally:
        await runner.stop()
    assert not runner.pids()


async def test_start_waits_for_each_probe_before_the_next_container(tmp_path):
    """Goal: order of starting. Method: the first one refuses its first probes."""
    journal = tmp_path / "journal"
    async with running(tmp_path, web("one", journal, refusals=3), web("two", journal)):
        pass
    order = ["one began", "one passed", "two began", "two passed"]
    assert journal.read_text().split("\n")[:4] == order


@pytest.mark.slow
async def test_start_that_takes_long_says_why_and_ends_at_its_deadline(tmp_path, monkeypatch):
    """Goal: a visible reason. Method: a probe that stays 503 and says why, in a word and in a
    sentence; it is answered here, so that a container that starts slowly is not the reason."""
    monkeypatch.setattr(runner_module, "WAIT_SHOWN_AFTER_S", 0.0)
    lines: list[str] = []

    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 503 No\r\n\r\n{"reason": "w", "message": "loading weights"}')
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/startup"
        slow = python("slow", "import signal; signal.pause()", startup=HttpProbe(url, 1, 1))
        with pytest.raises(WaitTimeoutError, match=r"slow did not start.*loading weights"):
            async with running(tmp_path, slow, say=lines.append):
                pass
    assert "waiting for slow: loading weights" in lines


@pytest.mark.parametrize(
    ("command", "words", "exit_code"),
    [
        (
            (sys.executable, "-c", "print('error: no model'); print('bye'); exit(2)"),
            "code 2.*: no model",
            2,
        ),
        ((sys.executable, "-c", "exit(3)"), "code 3 while starting: no output", 1),
        (("/no/such/program",), "/no/such/program cannot be started", 1),
    ],
)
async def test_start_of_a_container_that_exits_fails_with_its_own_sentence(
    tmp_path, command, words, exit_code
):
    probe = HttpProbe(f"http://127.0.0.1:{free_port()}/", 1, 60)
    with pytest.raises(UnderstudyError, match=words) as caught:
        async with running(tmp_path, Container("bad", command, startup=probe)):
            pass
    assert (caught.value.code, caught.value.exit_code) == ("pod.start_failed", exit_code)


async def test_program_is_restarted_by_its_init_and_the_init_by_the_runner(tmp_path):
    """Method: SIGKILL to the program, whose init lives on; then twice to the init, with which its
    program dies; only that is a restart of the container, and no descriptor is left."""
    lines, before = list[str](), len(open_fds())
    worker = python("worker", ARMED, init=INIT, pause_s=0.25)
    async with running(tmp_path / "log", worker, say=lines.append) as runner:

        async def program(number: int) -> int:
            await auntil(lambda: lines.count("worker | armed") == number, "its start")
            return runner.pids()["worker"]

        first = await program(1)
        init = parent(first)
        assert init is not None
        os.kill(first, signal.SIGKILL)
        second = await program(2)
        assert runner.restarts() == {"worker": 0}
        assert parent(second) == init
        os.kill(init, signal.SIGKILL)
        assert parent(await program(3)) not in (init, None)
        assert runner.restarts() == {"worker": 1}
        await auntil(lambda: not is_alive(second), "the program to die with its init")
        os.kill(parent(runner.pids()["worker"]) or 0, signal.SIGKILL)
        await program(4)
    await auntil(lambda: len(open_fds()) <= before, "descriptors to be closed")
    log = (tmp_path / "log/worker.log").read_text()
    assert log.index("died of signal 9; restarting now") < log.index("restarting in 250 ms")


async def test_part_that_gave_up_after_its_start_is_an_error(tmp_path):
    """Goal: `up` does not wait for a pod whose engines can never serve."""
    async with running(tmp_path / "log", python("engine", "raise SystemExit(69)")) as runner:
        await auntil(lambda: runner.restarts()["engine"], "its end")
        with pytest.raises(UnderstudyError) as caught:
            runner.check()
    assert caught.value.code == "pod.start_failed"


async def test_stop_kills_containers_that_ignore_sigterm_within_one_grace_period(
    tmp_path, monkeypatch
):
    """Goal: stopping always ends, and the grace period is the pod's. Method: two processes deaf to
    SIGTERM: the first that stops uses up the period, so the other one gets only the least."""
    monkeypatch.setattr(runner_module, "LAST_GRACE_S", 0.125)
    lines = []
    deaf = [python(name, DEAF, grace_s=0.5) for name in ("one", "two")]
    async with running(tmp_path / "log", *deaf, say=lines.append):
        await auntil(lambda: {"one | deaf", "two | deaf"} <= {*lines}, "both processes")
    assert [line for line in lines if "SIGKILL" in line] == [
        "two | (runner) still running after 0.5 s: SIGKILL",
        "one | (runner) still running after 0.125 s: SIGKILL",
    ]


async def test_second_signal_kills_at_once(tmp_path):
    """Goal: impatience is respected. Method: a deaf process, a long grace, two signals."""
    lines: list[str] = []
    runner = PodRunner([python("deaf", DEAF, grace_s=3600)], tmp_path / "log", lines.append)

    async def body():
        await auntil(lambda: "deaf | deaf" in lines, "the process")
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    assert await run_pod(runner, body, lines.append) is None
    assert not runner.pids()
    assert any("SIGINT: stopping the pod" in line for line in lines)
    assert any("SIGINT: killed the pod" in line for line in lines)
    assert runner.killed_by == signal.SIGINT


async def test_engines_are_stopped_together_and_before_what_they_need(tmp_path: Path):
    """Goal: an engine that drains needs its lock server. Method: two that end only once both are
    told to, and two servers that note their own ends."""
    journal, one, two = (tmp_path / name for name in ("journal", "one", "two"))
    containers = [
        python("first", ENDS, journal, "first", tmp_path / "1", tmp_path / "1"),
        python("second", ENDS, journal, "second", tmp_path / "2", tmp_path / "2"),
        python("one", ENDS, journal, "engine", one, two, is_engine=True),
        python("two", ENDS, journal, "engine", two, one, is_engine=True),
    ]
    lines: list[str] = []
    async with running(tmp_path / "log", *containers, say=lines.append):
        await auntil(lambda: sum("armed" in line for line in lines) == 4, "four processes")
    assert journal.read_text().split() == ["engine", "engine", "second", "first"]


async def test_log_rotates_once_at_its_limit_and_cuts_endless_lines(tmp_path):
    """Goal: bounded disk and memory. Method: write past both limits through a real pipe."""
    said = []
    log = ContainerLog("big", tmp_path / "big.log", said.append, max_bytes=3 * LINE_MAX_BYTES)
    writing = log.open_pipe()
    os.set_blocking(writing, False)
    sent = 0
    while sent < 8 * LINE_MAX_BYTES:
        try:
            sent += os.write(writing, b"x" * 4096)
        except BlockingIOError:
            await asyncio.sleep(0)
    os.close(writing)
    await auntil(lambda: sum(map(len, said)) >= sent, "everything read")
    log.close()
    kept = (tmp_path / "big.log").stat().st_size, (tmp_path / "big.log.1").stat().st_size
    assert all(size <= 4 * LINE_MAX_BYTES for size in kept)
