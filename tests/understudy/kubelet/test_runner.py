"""The runner with real processes: start order, restarts, stopping, its own death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from plumbing.errors import UnderstudyError, WaitTimeoutError
from tests.helpers import auntil, free_port, open_fds, until
from understudy.kubelet import runner as runner_module
from understudy.kubelet.containers import Container, Restart, quick_startup
from understudy.kubelet.runner import PodRunner, run_pod

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
        body = b'{"reason": "loading weights"}'
        if Handler.asked == refusals + 1:
            note("passed")  # before the answer, which starts the next container
        self.send_response(200 if ok else 503)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
note("began")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def python(name: str, code: str, *args: str, **more) -> Container:
    command = (sys.executable, "-u", "-c", textwrap.dedent(code), *args)
    return Container(name, command, **more)


def web(name: str, journal, refusals: int = 0, deadline_s: float = 30.0) -> Container:
    port = free_port()
    startup = quick_startup(f"http://127.0.0.1:{port}/startup", deadline_s)
    return python(name, WEB, name, str(port), str(refusals), str(journal), startup=startup)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def run(coroutine):
    return asyncio.run(coroutine)


def test_start_waits_for_each_probe_before_the_next_container(tmp_path):
    """Goal: order of starting. Method: the first one refuses its first probes."""
    journal = tmp_path / "journal"

    async def main():
        runner = PodRunner([web("one", journal, refusals=3), web("two", journal)], tmp_path / "log")
        await runner.start()
        await runner.stop()

    run(main())
    assert journal.read_text().split("\n")[:4] == [
        "one began",
        "one passed",
        "two began",
        "two passed",
    ]


@pytest.mark.slow
def test_start_past_its_deadline_names_container_and_reason(tmp_path):
    """Goal: a visible reason. Method: a probe that stays 503 and says why; it is answered here, so
    that a container that starts slowly is not the reason."""

    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 503 No\r\n\r\n{"reason": "loading weights"}')
        writer.close()

    async def main():
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/startup"
            slow = python("slow", "import signal; signal.pause()", startup=quick_startup(url, 1.5))
            runner = PodRunner([slow], tmp_path / "log")
            words = r"slow did not start.*503: loading weights"
            try:
                with pytest.raises(WaitTimeoutError, match=words):
                    await runner.start()
            finally:
                await runner.stop()

    run(main())


def test_start_that_takes_long_says_in_a_sentence_what_it_waits_for(tmp_path, monkeypatch):
    """Goal: progress for people. Method: a probe that has both a word for machines and a sentence;
    what is said while it does not pass."""
    monkeypatch.setattr(runner_module, "WAIT_SHOWN_AFTER_S", 0.0)
    sentence = '{"reason": "never_standby_yet", "message": "loading the model"}'
    code = WEB.replace('{"reason": "loading weights"}', sentence)
    port = free_port()
    startup = quick_startup(f"http://127.0.0.1:{port}/startup", 60)
    words = ("slow", str(port), "100000", str(tmp_path / "journal"))
    lines: list[str] = []

    async def main():
        runner = PodRunner(
            [python("slow", code, *words, startup=startup)], tmp_path / "log", lines.append
        )
        starting = asyncio.create_task(runner.start())
        try:
            await auntil(lambda: "waiting for slow: loading the model" in lines, "the sentence")
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await runner.stop()

    run(main())
    assert not any("never_standby_yet" in line or "503" in line for line in lines)


def test_start_of_a_container_that_exits_fails_with_its_own_sentence(tmp_path):
    """Goal: a bad flag is told at once. Method: a process that says why and exits with code 2."""

    async def main():
        bad = python(
            "bad",
            "print('error: no model at /nowhere'); print('bye'); raise SystemExit(2)",
            startup=quick_startup(f"http://127.0.0.1:{free_port()}/", 60),
        )
        runner = PodRunner([bad], tmp_path / "log")
        with pytest.raises(UnderstudyError, match=r"code 2.*: no model at /nowhere") as caught:
            await runner.start()
        assert (caught.value.code, caught.value.exit_code) == ("pod.start_failed", 2)
        assert not runner.pids()
        await runner.stop()

    run(main())


def test_start_of_a_container_that_says_nothing_says_so(tmp_path):
    """Goal: our own note of its end is not taken for its word. Method: a process without one."""

    async def main():
        startup = quick_startup(f"http://127.0.0.1:{free_port()}/", 60)
        runner = PodRunner(
            [python("bad", "raise SystemExit(3)", startup=startup)], tmp_path / "log"
        )
        with pytest.raises(UnderstudyError, match="code 3 while starting: no output"):
            await runner.start()
        await runner.stop()

    run(main())


def test_start_of_a_command_that_does_not_exist_fails_with_a_sentence(tmp_path):
    """Goal: no stack trace. Method: a path where there is no program."""

    async def main():
        ghost = Container(
            "ghost", ("/no/such/program",), startup=quick_startup("http://127.0.0.1:1/", 9)
        )
        runner = PodRunner([ghost], tmp_path / "log")
        with pytest.raises(UnderstudyError, match="/no/such/program cannot be started"):
            await runner.start()
        await runner.stop()

    run(main())


def test_killed_container_is_started_again_at_once(tmp_path):
    """Goal: what dies comes back. Method: SIGKILL to a real process, then look for a new pid."""

    async def main():
        runner = PodRunner([python("worker", "import signal; signal.pause()")], tmp_path / "log")
        await runner.start()
        await auntil(runner.pids, "the worker")
        first = runner.pids()["worker"]
        os.kill(first, signal.SIGKILL)
        await auntil(lambda: runner.pids().get("worker", first) != first, "a new process")
        assert runner.restarts() == {"worker": 1}
        await runner.stop()
        assert not runner.pids()

    run(main())
    assert "died of signal 9; restarting now" in (tmp_path / "log/worker.log").read_text()


def test_replaced_container_ends_in_good_order_before_the_next_one_begins(tmp_path):
    """Goal: another configuration without another pod. Method: a container that notes its end, and
    one of the same name; then the pod is stopped, and the new one is what ends."""
    journal = tmp_path / "journal"
    code = """
        import signal, sys
        def note(text):
            with open(sys.argv[1], "a") as file:
                file.write(f"{sys.argv[2]} {text}\\n")
        def end(*_):
            note("ends")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        note("begins")
        while True:
            signal.pause()
    """

    def noted(count):
        return journal.exists() and len(journal.read_text().splitlines()) == count

    async def main():
        runner = PodRunner([python("worker", code, str(journal), "old")], tmp_path / "log")
        await runner.start()
        await auntil(lambda: noted(1), "the old one")
        assert runner.container("worker").command[-1] == "old"
        await runner.replace(python("worker", code, str(journal), "new"))
        await auntil(lambda: noted(3), "the new one")
        assert runner.container("worker").command[-1] == "new"
        assert runner.restarts() == {"worker": 0}
        await runner.stop()
        assert not runner.pids()

    run(main())
    assert journal.read_text().splitlines() == ["old begins", "old ends", "new begins", "new ends"]


def test_container_that_ended_well_stays_ended_with_on_failure(tmp_path):
    """Goal: the restart policy is obeyed. Method: exit 0 under `on_failure`."""

    async def main():
        done = python("done", "print('ok')", restart=Restart.ON_FAILURE)
        runner = PodRunner([done], tmp_path / "log")
        await runner.start()
        log = tmp_path / "log/done.log"
        await auntil(lambda: log.exists() and "not restarted" in log.read_text(), "the note")
        assert runner.restarts() == {"done": 0}
        await runner.stop()

    run(main())


def test_stop_goes_in_reverse_order(tmp_path):
    """Goal: what was started first ends last. Method: each process notes its SIGTERM."""
    journal = tmp_path / "journal"
    code = """
        import signal, sys
        def end(*_):
            open(sys.argv[2], "a").write(sys.argv[1] + "\\n")
            raise SystemExit(0)
        signal.signal(signal.SIGTERM, end)
        print("armed")
        while True:
            signal.pause()
    """

    async def main():
        lines = []
        names = ["lock", "memory", "engine"]
        containers = [python(name, code, name, str(journal)) for name in names]
        runner = PodRunner(containers, tmp_path / "log", lines.append)
        await runner.start()
        await auntil(lambda: sum("armed" in line for line in lines) == 3, "three processes")
        await runner.stop()

    run(main())
    assert journal.read_text().split() == ["engine", "memory", "lock"]


def test_stop_kills_a_container_that_ignores_sigterm(tmp_path):
    """Goal: stopping always ends. Method: a process deaf to SIGTERM and a short grace."""
    code = """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf")
        while True:
            signal.pause()
    """

    async def main():
        lines = []
        runner = PodRunner([python("deaf", code, grace_s=0.2)], tmp_path / "log", lines.append)
        await runner.start()
        await auntil(lambda: "deaf | deaf" in lines, "the process")
        pid = runner.pids()["deaf"]
        await runner.stop()
        assert is_gone(pid)
        assert any("SIGKILL" in line for line in lines)

    run(main())


def test_second_signal_kills_at_once(tmp_path):
    """Goal: impatience is respected. Method: a deaf process, a long grace, two signals."""
    code = """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf")
        while True:
            signal.pause()
    """

    async def main():
        lines, signals = [], asyncio.Queue()
        runner = PodRunner([python("deaf", code, grace_s=3600)], tmp_path / "log", lines.append)

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

    run(main())


def test_signal_to_a_runner_without_containers_stops_no_pod(tmp_path):
    """Goal: Ctrl-C in a drill of a running pod says that the pod goes on."""

    async def main():
        lines, signals = [], asyncio.Queue()
        runner = PodRunner([], tmp_path / "log", lines.append)
        signals.put_nowait(signal.SIGINT)
        assert await run_pod(runner, asyncio.Event().wait, signals.get, lines.append) is None
        assert lines == ["SIGINT: stopping; the pod keeps running"]
        assert runner.killed_by is None

    run(main())


def test_body_that_fails_stops_the_pod_and_keeps_its_error(tmp_path):
    """Goal: no process is left behind by a failed drill. Method: a body that raises."""

    async def main():
        runner = PodRunner([python("worker", "import signal; signal.pause()")], tmp_path / "log")

        async def body():
            raise UnderstudyError("drill.stuck", "no standby")

        with pytest.raises(UnderstudyError, match="no standby"):
            await run_pod(runner, body, asyncio.Event().wait)
        assert not runner.pids()

    run(main())


def check_that_it_dies_with_its_runner(tmp_path, child, said, has_pid_namespace):
    """SIGKILL to a real runner with a container that runs `child`, once that has said `said`."""
    code = f"""
        import asyncio, pathlib, sys
        from understudy.kubelet.containers import Container
        from understudy.kubelet.runner import PodRunner
        async def main():
            command = (sys.executable, "-u", "-c", {child!r})
            container = Container("child", command, has_pid_namespace={has_pid_namespace})
            runner = PodRunner([container], pathlib.Path(sys.argv[1]), print)
            await runner.start()
            async with asyncio.timeout(30):
                while not runner.pids():
                    await asyncio.sleep(0.01)
            print(runner.pids()["child"])
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    command = [sys.executable, "-u", "-c", textwrap.dedent(code), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2)]
        assert f"child | {said}" in lines
        pid = next(int(line) for line in lines if line.isdigit())
        process.kill()
    until(lambda: is_gone(pid), "the child to die with its runner")


def test_children_die_when_the_runner_is_killed(tmp_path):
    """Goal: no orphans. Method: SIGKILL to a real runner whose child arms itself."""
    child = "from plumbing.service.process import arm_from_environment as arm; import signal; "
    child += "arm(); print('armed'); signal.pause()"
    check_that_it_dies_with_its_runner(tmp_path, child, "armed", has_pid_namespace=False)


def test_runner_leaks_no_descriptor_over_restarts(tmp_path):
    """Goal: the pipes are closed. Method: count descriptors over many short lives."""

    async def main():
        runner = PodRunner([python("short", "print('x')")], tmp_path / "log")
        before = len(open_fds())
        await runner.start()
        await auntil(lambda: runner.restarts()["short"] >= 2, "two restarts")
        await runner.stop()
        await auntil(lambda: len(open_fds()) <= before, "descriptors to be closed")

    run(main())
