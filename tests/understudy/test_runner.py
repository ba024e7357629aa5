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
from plumbing.service.procfs import parent
from tests.helpers import auntil, free_port, open_fds
from understudy.pod import runner as runner_module
from understudy.pod.output import LINE_MAX_BYTES, ContainerLog
from understudy.pod.runner import PodRunner, backoff_s, run_pod
from understudy.pod.table import INIT, Container, HttpProbe

# Answers 503 to the first probes and 200 to the later ones, and writes its order of events down.
WEB = """
import http.server, os, sys
name, port, refusals, journal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
def note(text):
    with open(journal, "a") as file:
        file.write(f"{name} {text}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        ok = Handler.asked > refusals
        body = b'{"reason": "never_standby_yet", "message": "loading weights"}'
        if Handler.asked == refusals + 1:
            note("passed")  # before the answer, which starts the next container
        self.send_response(200 if ok else 503)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
note("began")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

# Answers every path with the status in a file, or 200 while that is not there.
SERVER = """
    import http.server, os, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status = 200
            if os.path.exists(sys.argv[2]):
                status = int(open(sys.argv[2]).read() or 200)
            self.send_response(status)
            self.end_headers()
        def log_message(self, *args): pass
    print("serving")
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

ARMED = (
    "from plumbing.service.process import arm_from_environment as arm; import signal; "
    "arm(); print('armed'); signal.pause()"
)


def python(name: str, code: str, *args: str, **more) -> Container:
    command = (sys.executable, "-u", "-c", textwrap.dedent(code), *args)
    return Container(name, command, **more)


def startup(url: str, seconds: int = 60) -> HttpProbe:
    return HttpProbe(url, 1, seconds)


def web(name: str, journal, refusals: int = 0, **more) -> Container:
    port = free_port()
    probe = startup(f"http://127.0.0.1:{port}/startup")
    words = (name, str(port), str(refusals), str(journal))
    return python(name, WEB, *words, startup=probe, **more)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


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


def test_start_waits_for_each_probe_before_the_next_container(tmp_path):
    """Goal: order of starting. Method: the first one refuses its first probes."""
    journal = tmp_path / "journal"

    async def main():
        async with running(tmp_path, web("one", journal, refusals=3), web("two", journal)):
            pass

    asyncio.run(main())
    order = ["one began", "one passed", "two began", "two passed"]
    assert journal.read_text().split("\n")[:4] == order


@pytest.mark.slow
def test_start_that_takes_long_says_why_and_ends_at_its_deadline(tmp_path, monkeypatch):
    """Goal: a visible reason. Method: a probe that stays 503 and says why, in a word and in a
    sentence; it is answered here, so that a container that starts slowly is not the reason."""
    monkeypatch.setattr(runner_module, "WAIT_SHOWN_AFTER_S", 0.0)
    lines: list[str] = []

    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 503 No\r\n\r\n{"reason": "w", "message": "loading weights"}')
        writer.close()

    async def main():
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/startup"
            slow = python("slow", "import signal; signal.pause()", startup=startup(url, 1))
            with pytest.raises(WaitTimeoutError, match=r"slow did not start.*503"):
                async with running(tmp_path, slow, say=lines.append):
                    pass

    asyncio.run(main())
    assert "waiting for slow: loading weights" in lines


def test_start_of_a_container_that_exits_fails_with_its_own_sentence(tmp_path):
    """Goal: a bad flag is told at once. Method: a process that says why and exits with code 2; one
    that says nothing; a path where there is no program."""
    probe = startup(f"http://127.0.0.1:{free_port()}/")
    code = "print('error: no model at /nowhere'); print('bye'); raise SystemExit(2)"
    bad = python("bad", code, startup=probe)
    mute = python("mute", "raise SystemExit(3)", startup=probe)
    ghost = Container("ghost", ("/no/such/program",), startup=probe)

    async def main():
        for container, words, exit_code in (
            (bad, r"code 2.*: no model at /nowhere", 2),
            (mute, "code 3 while starting: no output", 1),
            (ghost, "/no/such/program cannot be started", 1),
        ):
            with pytest.raises(UnderstudyError, match=words) as caught:
                async with running(tmp_path, container):
                    pass
            assert (caught.value.code, caught.value.exit_code) == ("pod.start_failed", exit_code)

    asyncio.run(main())


def test_killed_container_is_started_again_and_leaks_no_descriptor(tmp_path):
    """Goal: what dies comes back. Method: SIGKILL to a real process, then look for a new pid."""

    async def main():
        before = len(open_fds())
        async with running(tmp_path, python("worker", "import signal; signal.pause()")) as runner:
            await auntil(runner.pids, "the worker")
            for count in (1, 2):
                first = runner.pids()["worker"]
                os.kill(first, signal.SIGKILL)
                await auntil(
                    lambda old=first: runner.pids().get("worker", old) != old, "a new process"
                )
                assert runner.restarts() == {"worker": count}
        await auntil(lambda: len(open_fds()) <= before, "descriptors to be closed")

    asyncio.run(main())
    assert "died of signal 9; restarting now" in (tmp_path / "worker.log").read_text()


DEAF = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf")
    while True:
        signal.pause()
"""


def test_stop_kills_containers_that_ignore_sigterm_within_one_grace_period(tmp_path, monkeypatch):
    """Goal: stopping always ends, and the grace period is the pod's. Method: two processes deaf to
    SIGTERM: the first that stops uses up the period, so the other one gets only the least."""
    monkeypatch.setattr(runner_module, "LAST_GRACE_S", 0.125)

    async def main():
        lines = []
        deaf = [python(name, DEAF, grace_s=0.5) for name in ("one", "two")]
        runner = PodRunner(deaf, tmp_path / "log", lines.append)
        await runner.start()
        await auntil(lambda: {"one | deaf", "two | deaf"} <= {*lines}, "both processes")
        pids = [*runner.pids().values()]
        await runner.stop()
        assert all(map(is_gone, pids))
        assert [line for line in lines if "SIGKILL" in line] == [
            "two | (runner) still running after 0.5 s: SIGKILL",
            "one | (runner) still running after 0.125 s: SIGKILL",
        ]

    asyncio.run(main())


def test_second_signal_kills_at_once(tmp_path):
    """Goal: impatience is respected. Method: a deaf process, a long grace, two signals."""

    async def main():
        lines, signals = [], asyncio.Queue()
        runner = PodRunner([python("deaf", DEAF, grace_s=3600)], tmp_path / "log", lines.append)

        async def body():
            await auntil(lambda: "deaf | deaf" in lines, "the process")
            signals.put_nowait(signal.SIGINT)
            signals.put_nowait(signal.SIGINT)
            await asyncio.Event().wait()

        assert await run_pod(runner, body, signals.get, lines.append) is None
        assert not runner.pids()
        assert any("SIGINT: stopping the pod" in line for line in lines)
        assert any("SIGINT: killed the pod" in line for line in lines)
        assert runner.killed_by == signal.SIGINT

    asyncio.run(main())


def server(status: Path, **liveness: float) -> Container:
    """A server with a startup probe, and with one of liveness by its numbers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    more = {"liveness": HttpProbe(url, **liveness)} if liveness else {}
    return python(
        *("server", SERVER, str(port), str(status)),
        startup=HttpProbe(url, 1, 5, grace_s=0.1),
        backoff_max_s=0,
        **more,
    )


def test_process_that_hangs_is_found_by_its_liveness_probe_and_replaced(tmp_path: Path):
    """Goal: SIGSTOP is a hang. Method: a real server, stopped; it is deaf to SIGTERM, too."""
    liveness = {"period_s": 0.05, "timeout_s": 1.0, "failure_threshold": 2, "grace_s": 0.1}

    async def main():
        container = server(tmp_path / "status", **liveness)
        async with running(tmp_path / "log", container) as runner:
            first = runner.pids()["server"]
            os.kill(first, signal.SIGSTOP)
            await auntil(lambda: runner.restarts()["server"] >= 1, "its replacement")
            await auntil(lambda: not runner.not_up(), "the new one to be up")
            assert is_gone(first)

    asyncio.run(main())
    log = (tmp_path / "log/server.log").read_text()
    assert "liveness probe failed 2 times (127.0.0.1:" in log
    assert "SIGTERM, and SIGKILL after 0.1 s" in log
    assert "died of signal 9; restarting now" in log


def test_engines_are_stopped_together_and_before_what_they_need(tmp_path: Path):
    """Goal: an engine that drains needs its lock server. Method: two that end only once both are
    told to, and two servers that note their own ends."""
    journal = tmp_path / "journal"
    ends = """
        import os, signal, sys, time
        def end(*_):
            open(sys.argv[2], "w")
            while not os.path.exists(sys.argv[3]):
                time.sleep(0.01)
            open(sys.argv[1], "a").write("main\\n")
            raise SystemExit(0)
        signal.signal(signal.SIGTERM, end)
        print("armed")
        while True:
            signal.pause()
    """
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    open(tmp_path / "here", "w").close()
    here = str(tmp_path / "here")
    sidecar = ends.replace('"main', '"sidecar')
    containers = [
        python("first", sidecar.replace("sidecar", "first"), str(journal), here, here),
        python("second", sidecar.replace("sidecar", "second"), str(journal), here, here),
        python("one", ends, str(journal), one, two, is_engine=True),
        python("two", ends, str(journal), two, one, is_engine=True),
    ]

    async def main():
        lines: list[str] = []
        runner = PodRunner(containers, tmp_path / "log", lines.append)
        await runner.start()
        await auntil(lambda: sum("armed" in line for line in lines) == 4, "four processes")
        await runner.stop()

    asyncio.run(main())
    assert journal.read_text().split() == ["main", "main", "second", "first"]


def test_backoff_first_restart_is_immediate_then_doubles_to_its_limit():
    """Goal: 0.5 to 30 s. Method: deaths at once, to the default and to a limit of a user's."""
    assert [backoff_s(n, 30) for n in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [backoff_s(n, 1) for n in range(4)] == [0, 0.5, 1, 1]
    assert backoff_s(100_000, 30) == 30  # a week of crashes overflows no float


def test_program_is_restarted_by_its_init_and_the_init_by_the_runner(tmp_path):
    """Method: SIGKILL to the program, whose init lives on; then to the init, with which its program
    dies; the count goes on."""

    async def main():
        lines: list[str] = []
        async with running(
            tmp_path / "log", python("worker", ARMED, init=INIT), say=lines.append
        ) as runner:

            async def program(restarts: int) -> int:
                await auntil(lambda: lines.count("worker | armed") == 1 + restarts, "its start")
                assert runner.restarts() == {"worker": restarts}
                return runner.pids()["worker"]

            first = await program(0)
            init = parent(first)
            assert init is not None
            os.kill(first, signal.SIGKILL)
            second = await program(1)
            assert parent(second) == init
            os.kill(init, signal.SIGKILL)
            assert parent(await program(2)) not in (init, None)
            await auntil(lambda: is_gone(second), "the program to die with its init")

    asyncio.run(main())


def test_log_rotates_once_at_its_limit_and_cuts_endless_lines(tmp_path):
    """Goal: bounded disk and memory. Method: write past both limits through a real pipe."""

    async def main():
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

    asyncio.run(main())
    kept = (tmp_path / "big.log").stat().st_size, (tmp_path / "big.log.1").stat().st_size
    assert all(size <= 4 * LINE_MAX_BYTES for size in kept)
