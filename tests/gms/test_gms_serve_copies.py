"""`gms serve --host-memory` as operators run it: copies that are made, kept, shown and used."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gms import names
from gms.client import Reader, messages, open_session
from plumbing.errors import UnderstudyError
from plumbing.service import procfs
from tests.gms.bench import IDENTITY, GmsProcess, command, kept
from tests.gms.test_gms_supervisor import Serve
from tests.helpers import until


class ServeCopies(Serve):
    """With one device, and host memory for its copy."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, "host")

    def launch(self, stderr: Any) -> Any:
        self.flags = ["--memory", "host", "--host-memory", "64MiB"]
        return super().launch(stderr)


@pytest.fixture
def serve(directory: str) -> Iterator[ServeCopies]:
    running = ServeCopies(directory)
    yield running
    running.stop()


def keeper_of(serve: Serve) -> int | None:
    """The pid of what keeps the copies."""
    for pid in procfs.descendants(serve.process.pid):
        with contextlib.suppress(OSError):  # one that made a copy, and has ended
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "keep-copies" in words:
                return pid
    return None


def test_copy_is_made_kept_and_used(serve: ServeCopies):
    """Load, wait for the copy, kill its keeper and its server in turn, leave, offload,
    attach: the bytes are those of the load; status and verify show both devices."""
    serve.started()
    gms, host = GmsProcess(serve.directory), GmsProcess(serve.directory, device="OFFLOAD-0")
    with gms.load() as reader, kept(reader):
        digest = reader.digest()
        # A copy is made, and its digest computed, at a low priority: on a busy machine, later.
        until(lambda: host.status()["digest"] == digest, "a digested copy", 120)
        first = until(lambda: keeper_of(serve), "its keeper")
        until(lambda: len(host.status()["sessions"]) == 1, "its keeper to hold the copy")
        os.kill(int(first), signal.SIGKILL)
        copy = host.status()["epoch"]
        file = names.region_path(serve.directory, "OFFLOAD-0", names.WEIGHTS, copy)
        # Not its session, and not that the file is held: the first keeper's flock may outlast it
        # for a moment, and a server that dies before the next one has it takes the copy along.
        until(lambda: is_kept(serve, file, int(first)), "another keeper to hold the copy")
        last = host.status()["pid"]
        os.kill(last, signal.SIGKILL)
        until(lambda: is_back(host, copy, last), "the keeper to hand the copy back")
        code, document = command(gms, "verify")
        assert (code, document["result"]) == (0, "intact")
        assert {d["device_uuid"] for d in document["devices"]} == {"HOST-0", "OFFLOAD-0"}
    with gms.client() as asker:
        assert asker.request(messages.OffloadMsg()).message.copy == copy
    shown = until(lambda: (d := serve.devices())[0]["state"] == "offloaded" and d, "the state")
    assert [each["device_uuid"] for each in shown] == ["HOST-0", "OFFLOAD-0"]
    request = messages.AttachMsg("e", "i", "rw_or_ro", IDENTITY, wait_ms=20_000)
    session = open_session(serve.directory, "HOST-0", request)
    assert isinstance(session, Reader)
    with session:
        assert session.digest() == digest


def is_kept(serve: Serve, file: str, former: int) -> bool:
    """Whether a keeper other than `former` holds the copy's file."""
    pid, found = keeper_of(serve), os.stat(file)
    return pid not in (None, former) and procfs.holds_flock(pid, found.st_dev, found.st_ino)


def is_back(host: GmsProcess, copy: str, last: int) -> bool:
    try:
        status = host.status()
    except UnderstudyError:
        return False
    return bool(status["epoch"] == copy and status["pid"] != last)
