"""A lock server that runs and does not answer, and one that has too much to look at."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from lockserver.core.names import new_incarnation
from lockserver.status import silent_server
from plumbing.errors import UnreachableError, WaitTimeoutError
from plumbing.pod.paths import lockserver_guard
from tests.helpers import auntil, free_witness, until
from tests.lockserver.engines import Engine, spawn_backend
from tests.lockserver.processes import run_command_of

REFUSED = UnreachableError("wire.unreachable", "refused")
TIMED_OUT = WaitTimeoutError("wire.timeout", "timed out")


def ask(directory: str) -> tuple[int, str, str]:
    ran = run_command_of(directory, "status")
    return ran.returncode, " ".join(ran.stdout.split()), ran.stderr.strip()


@pytest.mark.slow
def test_status_of_a_stopped_server_names_it_and_how_to_resume_it(pod_dir, start_server):
    """Goal: nobody is told to start a second server, which could not start. Method: SIGSTOP, then
    the command with the state file and without."""
    server = start_server()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        code, shown, error = ask(pod_dir)
        assert code == 3
        assert f"pid {server.pid} (" in error
        assert ", stopped), holds" in error
        assert lockserver_guard(pod_dir) in error
        assert f"kill -CONT {server.pid}" in error
        assert error.endswith("[lock.not_answering]")
        assert "offline view" in shown
        assert f"kill -CONT {server.pid}" in shown
        assert "lockserver serve" not in shown + error
        os.rename(os.path.join(pod_dir, "lockserver.json"), os.path.join(pod_dir, "kept"))
        code, shown, error = ask(pod_dir)
        assert (code, shown) == (3, "")
        assert error.endswith("[lock.not_answering]")
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_silent_server_is_whoever_has_the_guard_open(tmp_path):
    """Goal: a pid in a file is not believed, a process that has it open is. Method: no guard; one
    of a dead server; one that a process has open, named in it and not."""
    directory = str(tmp_path)
    path = lockserver_guard(directory)
    assert silent_server(directory, REFUSED) is None
    with open(path, "w") as file:
        file.write("pid 1".ljust(32))
    assert silent_server(directory, REFUSED) is None
    with open(path) as guard, subprocess.Popen(["sleep", "600"], stdin=guard) as holder:
        try:
            # The name changes a moment after the exec that Popen waits for.
            until(lambda: psutil.Process(holder.pid).name() == "sleep", "its name to change")
            for said in (f"pid {holder.pid}", "pid 1", "nonsense"):
                with open(path, "w") as file:
                    file.write(said.ljust(32))
                found = silent_server(directory, REFUSED)
                assert found is not None
                assert f"pid {holder.pid} (sleep), holds {path}" in found[0]
                assert f"kill -9 {holder.pid}" in found[1]
            holder.send_signal(signal.SIGSTOP)
            until(lambda: "stopped" in silent_server(directory, REFUSED)[0], "it to stop")
        finally:
            holder.kill()


def test_silent_server_that_is_not_visible_is_known_by_its_open_door(tmp_path):
    """Goal: from another container, an accepted connection is enough. Method: no guard, and a
    request that was accepted and not answered."""
    found = silent_server(str(tmp_path), TIMED_OUT)
    assert found is not None
    assert "not visible from here" in found[0]
    assert "container" in found[1]


LEFTOVERS = 3000


@pytest.mark.slow
async def test_lost_state_with_thousands_of_leftover_witnesses_does_not_starve_the_loop(
    pod_dir, start_server
):
    """Goal: scanning a crowded directory leaves the server time for other work. Method: as many
    leftovers as a long series of crashes leaves, no state file, and one witness held by a stopped
    engine: status is answered and engines queue; when it dies, the next one is granted the lock."""
    for number in range(LEFTOVERS):
        Path(pod_dir, f"witness_old_{number:016x}").touch()
    with spawn_backend(free_witness(pod_dir, new_incarnation("engine-0"))) as stranger:
        server = start_server()
        assert server.lock()["state"] == "recovering"
        async with Engine(pod_dir, "engine-1") as engine:
            engine.launch()
            engine.want("active")
            await auntil(lambda: server.lock()["waiters"], "it to wait")
            assert server.lock()["state"] == "recovering"
            assert not server.lock()["waiters"][0]["silent"]
            stranger.kill()
            assert await engine.granted() == 2
