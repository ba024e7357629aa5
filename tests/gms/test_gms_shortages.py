"""A shortage of descriptors or processes: a device's server that cannot be started or is not heard,
and one that runs without a descriptor left.

Method: a real server whose RLIMIT_NOFILE is lowered below every free number, over connections that
exist; then it is raised again. Who asked gets an error with a code and the limit to raise, nobody
else notices, nothing is lost, and with room everything goes on by itself. Where a limit cannot be
had (root has no limit of processes), the kernel's answer is injected.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from gms import messages as msg
from gms.client import Reader
from gms.server import supervisor as child_module
from gms.server.supervisor import GmsSupervisor
from plumbing.errors import GivenUpError, RemoteError, UnderstudyError
from plumbing.service import init
from plumbing.service.init import FAILED_STARTS_MAX
from plumbing.wire.blocking import BlockingClient
from tests.gms.bench import GmsProcess
from tests.helpers import auntil, descriptors_below, open_fds, room_for, run_command, until


def one_device(directory: str, *words: str) -> GmsSupervisor:
    """A supervisor of HOST-0 in this process, for servers started with `words`."""
    flags = ["--dir", directory, "--device", "HOST-0", "--memory", "host"]
    command = words or (sys.executable, "-m", "gms.cli", "serve-device", *flags)
    return GmsSupervisor(
        directory,
        {"HOST-0": ["HOST-0"]},
        lambda device: command,
        http_host="127.0.0.1",
        http_port=0,
    )


@pytest.mark.parametrize(
    ("words", "kind", "count", "code"),
    [
        (("{}/python",), "gms.cannot_start", FAILED_STARTS_MAX, GivenUpError.exit_code),
        (("sh", "-c", "exit 3"), "gms.child_exit", FAILED_STARTS_MAX, GivenUpError.exit_code),
        (("sh", "-c", "exit 2"), "gms.child_exit", 1, 2),
    ],
)
def test_program_that_cannot_run_ends_the_supervisor(
    directory: str,
    words: tuple[str, ...],
    kind: str,
    count: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """Tried as often as a start may fail, then the exit code; with bad flags once."""
    monkeypatch.setattr(init, "BACKOFF_S_MAX", 0.001)
    supervisor = one_device(directory, *(word.format(directory) for word in words))
    assert asyncio.run(supervisor.run()) == code
    told = [event for event in supervisor.log.kept_since(0) if event.type == kind]
    assert len(told) == count
    assert "giving up" in told[-1].message


async def test_shortage_of_processes_is_waited_out_and_told_once(
    directory: str, monkeypatch: pytest.MonkeyPatch
):
    """fork fails with EAGAIN, more often than a start may fail; then it does not: the device is
    served, and of all the attempts there is one event."""
    monkeypatch.setattr(init, "BACKOFF_S_MAX", 0.001)
    popen, attempts, is_over = subprocess.Popen, 0, False

    def fails(*args: Any, **more: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts <= 2 * FAILED_STARTS_MAX or not is_over:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return popen(*args, **more)

    monkeypatch.setattr(subprocess, "Popen", fails)
    supervisor = one_device(directory)
    running = asyncio.create_task(supervisor.run())
    await auntil(lambda: supervisor.children[0].problem, "the problem to show")
    assert "no process or thread" in str(supervisor.status()["devices"][0]["problem"])
    is_over = True
    await auntil(lambda: supervisor.children[0].served[0].is_responsive, "a server to answer")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    told = [event for event in supervisor.log.kept_since(0) if event.type == "gms.cannot_start"]
    assert len(told) == 1
    assert supervisor.children[0].problem is None


def test_service_that_may_open_too_few_files_says_so(directory: str):
    """The limit is known at the start: one sentence with the fix."""
    program = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 64)); import gms.cli as g"
    done = run_command([sys.executable, "-c", f"{program}; g.main()", "serve", "--dir", directory])
    assert done.returncode == 2
    assert "may open 64 files" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------- a server that is not heard


async def test_server_that_never_answers_is_killed(directory: str, monkeypatch: pytest.MonkeyPatch):
    """A process that sleeps: killed for its silence, and another is started."""
    monkeypatch.setattr(child_module, "HANG_MS", 300.0)
    supervisor = one_device(directory, "sleep", "60")
    running = asyncio.create_task(supervisor.run())
    child = supervisor.children[0]
    await auntil(lambda: child.restarter.restarts, "it to be killed")
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    told = [event.message for event in supervisor.log.kept_since(0)]
    assert any("stopped answering" in text for text in told)


# ---------------------------------------------------------------------- a server that runs


def status(client: BlockingClient) -> dict[str, Any]:
    """Over a connection that exists."""
    reply = client.request(msg.StatusMsg()).message
    assert isinstance(reply, msg.StatusReplyMsg)
    return reply.document


def is_whole(gms: GmsProcess, reader: Reader) -> bool:
    """The reader's epoch is served to a newcomer, and nothing is wrong."""
    with gms.reader(engine="engine-8", incarnation="i-8") as newcomer:
        assert newcomer.epoch == reader.epoch
        assert newcomer.read("t") == reader.read("t")
    return gms.status()["problem"] is None


def test_attaching_reader_is_told_what_is_short_and_others_are_served(gms: GmsProcess):
    """No copy of a slab can be made for it: its connection ends with the limit, no other does."""
    with gms.load() as reader, gms.client() as watching, gms.client() as late:
        for client in (watching, late):
            status(client)
        with descriptors_below(3, gms.pid):
            with pytest.raises(RemoteError, match="limit of 3 open files; raise") as caught:
                late.request(msg.AttachMsg("e", "i", "ro"))
            assert caught.value.code == "gms.server_exhausted"
            until(lambda: len(status(watching)["sessions"]) == 1, "its session to end")
        until(lambda: is_whole(gms, reader), "the server to be whole")


def test_attach_without_descriptors_leaks_nothing(gms: GmsProcess):
    """Whichever descriptor is the last that it gets: an error, and with enough it succeeds."""
    with gms.load() as reader:
        before = set(open_fds())
        for count in itertools.count():
            with contextlib.suppress(UnderstudyError, OSError), room_for(count):
                gms.reader().close()
                break
            assert set(open_fds()) <= before
        assert count > 3
        until(lambda: is_whole(gms, reader), "the server to be whole")
