"""The kubelet's rules with real processes: probes that fail, kinds of containers, namespaces."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError, UsageError
from tests.helpers import auntil, free_port
from tests.understudy.kubelet.test_runner import (
    check_that_it_dies_with_its_runner,
    is_gone,
    python,
    run,
)
from understudy.kubelet import namespaces
from understudy.kubelet.containers import KUBELET, Container, HttpProbe, Kind, Restart
from understudy.kubelet.runner import PodRunner

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
WAIT = "import signal; print('up'); signal.pause()"

HAS_NAMESPACES = asyncio.run(namespaces.wanted("auto"))
needs_namespaces = pytest.mark.skipif(
    not HAS_NAMESPACES, reason="this machine does not let us make a PID namespace"
)


def server(status: Path, **probes: dict) -> Container:
    """A server with some probes, each by its numbers."""
    port = free_port()
    made = {name: HttpProbe(f"http://127.0.0.1:{port}/", **each) for name, each in probes.items()}
    quick = KUBELET.up_to(0)
    return python("server", SERVER, str(port), str(status), grace_s=5, pace=quick, **made)


def log_of(tmp_path: Path, name: str) -> str:
    return (tmp_path / f"log/{name}.log").read_text()


def test_process_that_hangs_is_found_by_its_liveness_probe_and_replaced(tmp_path: Path):
    """Goal: SIGSTOP is a hang. Method: a real server, stopped; it is deaf to SIGTERM, too."""
    liveness = {"period_s": 0.05, "timeout_s": 1.0, "failure_threshold": 2, "grace_s": 0.1}
    startup = {"period_s": 0.05, "failure_threshold": 1000}

    async def main():
        container = server(tmp_path / "status", startup=startup, liveness=liveness)
        runner = PodRunner([container], tmp_path / "log")
        await runner.start()
        first = runner.pids()["server"]
        os.kill(first, signal.SIGSTOP)
        await auntil(lambda: runner.restarts()["server"] >= 1, "its replacement")
        await auntil(lambda: not runner.not_up(), "the new one to be up")
        assert is_gone(first)
        await runner.stop()

    run(main())
    log = log_of(tmp_path, "server")
    assert "liveness probe failed 2 times (127.0.0.1:" in log
    assert "SIGTERM, and SIGKILL after 0.1 s" in log
    assert "died of signal 9; restarting now" in log


@pytest.mark.slow
def test_startup_that_fails_in_a_later_life_ends_the_process(tmp_path: Path):
    """Goal: the threshold counts after a restart. Method: 503 from the second life on."""
    status = tmp_path / "status"

    async def main():
        startup = {"period_s": 0.05, "failure_threshold": 100, "grace_s": 0.1}
        runner = PodRunner([server(status, startup=startup)], tmp_path / "log")
        await runner.start()
        status.write_text("503")
        os.kill(runner.pids()["server"], signal.SIGKILL)
        await auntil(lambda: runner.restarts()["server"] >= 2, "the end of its second life")
        assert runner.not_up() == ["server"]
        status.write_text("200")
        await auntil(lambda: not runner.not_up(), "a life that passes")
        await runner.stop()

    run(main())
    assert "startup probe failed 100 times (HTTP 503)" in log_of(tmp_path, "server")


def test_readiness_that_fails_ends_nobody(tmp_path: Path):
    """Goal: not ready is not dead. Method: 503 to readiness until it has failed, then 200."""
    status = tmp_path / "status"
    numbers = {"period_s": 0.02, "failure_threshold": 2}

    async def main():
        startup = {"period_s": 0.02, "failure_threshold": 1000}
        runner = PodRunner([server(status, startup=startup, readiness=numbers)], tmp_path / "log")
        await runner.start()
        health = runner._kept["server"].health
        await auntil(lambda: health.is_ready, "it to be ready")
        status.write_text("503")
        await auntil(lambda: not health.is_ready, "it not to be ready")
        status.write_text("200")
        await auntil(lambda: health.is_ready, "it to be ready again")
        assert runner.restarts() == {"server": 0}
        await runner.stop()

    run(main())


def test_init_containers_end_before_the_next_begins_and_main_ones_start_together(tmp_path: Path):
    """Goal: the kubelet's order. Method: each notes its start; two wait for each other."""
    journal = str(tmp_path / "journal")
    note = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + '\\n'); "
    together = """
        import os, signal, sys, time
        mine, other = sys.argv[2], sys.argv[3]
        open(mine, "w")
        end = time.monotonic() + 30
        while not os.path.exists(other):
            assert time.monotonic() < end
            time.sleep(0.01)
        open(sys.argv[1], "a").write("together\\n")
        print("together")
        signal.pause()
    """
    mine, other = str(tmp_path / "a"), str(tmp_path / "b")
    containers = [
        python("first", note, journal, "first", kind=Kind.INIT, restart=Restart.ON_FAILURE),
        python("second", note, journal, "second", kind=Kind.INIT, restart=Restart.ON_FAILURE),
        python("left", together, journal, mine, other, kind=Kind.MAIN),
        python("right", together, journal, other, mine, kind=Kind.MAIN),
    ]

    async def main():
        runner = PodRunner(containers, tmp_path / "log")
        await runner.start()
        path = tmp_path / "journal"
        await auntil(lambda: path.read_text().count("together") == 2, "both to have met")
        assert path.read_text().split()[:2] == ["first", "second"]
        assert runner.not_up() == []
        await runner.stop()

    run(main())


def test_init_container_that_fails_is_told_at_once(tmp_path: Path):
    """Goal: the sentence, and nobody after it. Method: an init container that exits with 1."""

    async def main():
        bad = python(
            "bad",
            "print('error: no such disk'); raise SystemExit(1)",
            kind=Kind.INIT,
            restart=Restart.ON_FAILURE,
        )
        runner = PodRunner([bad, python("main", WAIT, kind=Kind.MAIN)], tmp_path / "log")
        with pytest.raises(UnderstudyError, match=r"bad exited with code 1.*no such disk"):
            await runner.start()
        assert not runner.pids()
        await runner.stop()

    run(main())


def test_main_containers_are_stopped_together_and_before_their_sidecars(tmp_path: Path):
    """Goal: an engine that drains needs its lock server. Method: two that end only once both are
    told to, and a sidecar that notes its own end."""
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
        python("sidecar", sidecar, str(journal), here, here),
        python("one", ends, str(journal), one, two, kind=Kind.MAIN),
        python("two", ends, str(journal), two, one, kind=Kind.MAIN),
    ]

    async def main():
        lines: list[str] = []
        runner = PodRunner(containers, tmp_path / "log", lines.append)
        await runner.start()
        await auntil(lambda: sum("armed" in line for line in lines) == 3, "three processes")
        await runner.stop()

    run(main())
    assert journal.read_text().split() == ["main", "main", "sidecar"]


def test_private_container_does_not_see_the_runners_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: what a manifest does not say, its containers do not hear. Method: our own variables in
    the runner's environment; one of them is the container's own, one is nobody's."""
    monkeypatch.setenv("UNDERSTUDY_FILE", "deploy/overlays/cpu")
    monkeypatch.setenv("ENGINE_ID", "engine-9")
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    code = "import os; print(*sorted(k for k in os.environ if k in %r))"
    names = ["UNDERSTUDY_FILE", "ENGINE_ID", "SOMETHING_ELSE", "UNDERSTUDY_DIR"]

    async def said(**more) -> str:
        lines: list[str] = []
        seen = python("seen", code % names, env={"UNDERSTUDY_DIR": "x"}, kind=Kind.INIT, **more)
        runner = PodRunner([seen], tmp_path / "log", lines.append)
        await runner.start()
        await auntil(lambda: any("SOMETHING_ELSE" in line for line in lines), "its line")
        await runner.stop()
        return next(line for line in lines if "SOMETHING_ELSE" in line)

    once = {"restart": Restart.NEVER}
    assert run(said(**once, is_private=True)) == "seen | SOMETHING_ELSE UNDERSTUDY_DIR"
    assert "UNDERSTUDY_FILE" in run(said(**once))


@needs_namespaces
def test_container_in_a_namespace_is_pid_1_and_hears_sigterm(tmp_path: Path):
    """Goal: as in a real container. Method: a process says its pid and its parent's, and how it was
    ended; then one that is killed is started again, and its exit is told as its own."""
    code = """
        import os, signal
        def end(*_):
            print("heard it")
            raise SystemExit(0)
        signal.signal(signal.SIGTERM, end)
        print("pid", os.getpid(), "UNDERSTUDY_PARENT_PID" in os.environ)
        while True:
            signal.pause()
    """

    async def main() -> list[str]:
        lines: list[str] = []
        container = python("inside", code, has_pid_namespace=True)
        runner = PodRunner([container], tmp_path / "log", lines.append)
        await runner.start()
        await auntil(lambda: "inside | pid 1 False" in lines, "its pid")
        first = runner.pids()["inside"]
        assert os.getsid(first) != os.getsid(0)
        os.kill(first, signal.SIGKILL)
        await auntil(lambda: lines.count("inside | pid 1 False") == 2, "its next life")
        assert runner.pids()["inside"] != first
        await runner.stop()
        assert not runner.pids()
        return lines

    lines = run(main())
    assert "inside | (runner) died of signal 9; restarting now" in lines
    assert "inside | heard it" in lines


@needs_namespaces
def test_container_that_has_no_handler_yet_is_asked_again(tmp_path: Path):
    """Goal: Ctrl-C while a pod starts does not wait for the grace period. Method: a pid 1 that gets
    its handler only after the first SIGTERM, which the kernel dropped."""
    code = """
        import os, signal, sys
        print("up")
        while not os.path.exists(sys.argv[1]):
            pass
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        signal.pause()
    """

    async def main():
        container = python("late", code, str(tmp_path / "go"), has_pid_namespace=True, grace_s=60)
        runner = PodRunner([container], tmp_path / "log")
        await runner.start()
        log = tmp_path / "log" / "late.log"
        await auntil(lambda: log.exists() and "up" in log.read_text(), "its first word")
        stopping = asyncio.create_task(runner.stop())
        for _ in range(10):  # turns of the loop: the first signal is sent in one of the first
            await asyncio.sleep(0)
        (tmp_path / "go").touch()
        await asyncio.wait_for(stopping, 20)

    run(main())
    assert "SIGKILL" not in log_of(tmp_path, "late")


@needs_namespaces
def test_container_in_a_namespace_dies_with_its_runner(tmp_path: Path):
    """Goal: no orphans. Method: SIGKILL to a real runner, whose child could not ask for itself."""
    check_that_it_dies_with_its_runner(tmp_path, WAIT, "up", has_pid_namespace=True)


@needs_namespaces
def test_runner_that_is_pid_1_reaps_what_the_dead_leave_behind(tmp_path: Path):
    """Goal: `understudy up` as a container's first process. Method: a runner in a namespace; each
    life of its container leaves a child that ends by itself; zombies are counted."""
    leave = (
        "import os, signal; print('up') if os.fork() else os._exit(0); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    code = f"""
        import asyncio, os, pathlib, sys
        from understudy.kubelet.containers import KUBELET, Container
        from understudy.kubelet.runner import PodRunner
        from plumbing.service.procfs import children, is_alive
        async def main():
            command = (sys.executable, "-S", "-c", {leave!r})
            container = Container("child", command, pace=KUBELET.up_to(0))
            runner = PodRunner([container], pathlib.Path(sys.argv[1]))
            await runner.start()
            while runner.restarts()["child"] < 20:
                await asyncio.sleep(0.01)
            await runner.stop()
            left = [pid for pid in children(os.getpid()) if not is_alive(pid)]
            print(os.getpid(), len(left))
        asyncio.run(main())
    """
    command = namespaces.inside((sys.executable, "-c", textwrap.dedent(code), str(tmp_path)))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    pid, left = done.stdout.split()
    assert pid == "1"
    assert int(left) <= 1  # the last one may have died a moment after its parent


def test_namespaces_that_cannot_be_made_are_a_sentence(monkeypatch: pytest.MonkeyPatch):
    """Goal: yes, no and auto. Method: a program in its place that refuses, one that works,
    none."""
    choices = ("yes", "no", "auto")

    async def answers() -> list[bool | str]:
        found: list[bool | str] = []
        for choice in choices:
            try:
                found.append(await namespaces.wanted(choice))
            except UsageError as error:
                found.append(error.code)
        return found

    monkeypatch.setattr(namespaces, "MAKE", ("echo",))
    assert run(answers()) == [True, False, True]
    for broken in (("false",), ("/no/such/unshare",)):
        monkeypatch.setattr(namespaces, "MAKE", broken)
        assert run(answers()) == ["pod.no_pid_namespaces", False, False]
