"""A process that dies in the middle of a copy to host memory, with the real `keep-copy` and
`make-copy`: the weights are as before, nothing is left, and there is a whole copy in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gms import names
from gms.client import Reader, messages, open_session
from plumbing.service import procfs
from plumbing.service.process import parent_environment
from tests.copy_stop import CopyStop
from tests.gms.bench import GmsProcess, kept
from tests.gms.kinds import host_only
from tests.gms.test_gms_offload import patterned
from tests.helpers import until


@contextmanager
def keep_copy(gms: GmsProcess, stop: CopyStop) -> Iterator[subprocess.Popen[bytes]]:
    """`gms keep-copy`, as `gms serve` starts it; killed at the end, and with it what it started."""
    flags = ["--dir", gms.directory, "--device", gms.device]
    environ = {**os.environ, **parent_environment(), **stop.environment}
    words = [sys.executable, "-m", "gms.cli", "keep-copy", *flags]
    with subprocess.Popen(words, env=environ, stderr=subprocess.DEVNULL) as keeper:
        try:
            yield keeper
        finally:
            keeper.kill()


def copy_of(gms: GmsProcess) -> Reader:
    host = names.offload_device(gms.device)
    copy = open_session(gms.directory, host, messages.AttachMsg("a test", "a test", "ro"))
    assert isinstance(copy, Reader)
    return copy


@host_only
@pytest.mark.parametrize("victim", ["maker", "keeper", "host", "device"])
def test_death_in_the_middle_of_a_copy_costs_the_copy_at_most(
    gms: GmsProcess, host: GmsProcess, tmp_path: Path, victim: str
):
    """Goal: half a copy is never kept nor believed. Method: `make-copy` is stopped half-way; it,
    its keeper, or one of both servers is killed, and it goes on if it lives. What it has copied is
    gone, or whole; a keeper makes a whole one, with the bytes of the weights, which are untouched.
    """
    stop = CopyStop(tmp_path / "stop")
    with patterned(gms) as reader, kept(reader):
        digest = reader.digest()
        stop.arm()
        with keep_copy(gms, stop) as keeper:
            maker = until(stop.stopped, "a copy to be half made")
            assert host.status()["state"] == "staging"
            kill: dict[str, Callable[[], object]] = {
                "maker": lambda: os.kill(maker, signal.SIGKILL),
                "keeper": keeper.kill,
                "host": host.kill,
                "device": gms.kill,
            }
            kill[victim]()
            if victim in ("host", "device"):
                (host if victim == "host" else gms).start()
            if victim != "keeper":  # which its maker has not survived
                os.kill(maker, signal.SIGCONT)
            until(lambda: not procfs.is_alive(maker), "its maker to end")
            until(lambda: host.status()["state"] != "staging", "half a copy to be gone")
            assert victim != "device" or host.status()["state"] == "committed"
        with keep_copy(gms, stop):
            until(lambda: host.status()["state"] == "committed", "a whole copy")
        with copy_of(gms) as copy:
            assert copy.digest() == reader.digest() == digest
        said = host.status()
        assert (said["committed_bytes"], said["unowned"]) == (reader.size_bytes, [])
        assert said["commits_total"] == 1
