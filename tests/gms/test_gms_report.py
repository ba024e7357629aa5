"""What `gms status`, `inspect` and `drop` print, for real servers in real trouble.

On host memory only: the words are the same for every kind.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from gms import status as statuses
from gms import upkeep as operate
from plumbing.errors import DegradedError
from tests.gms.bench import ClientProcess, GmsProcess
from tests.gms.kinds import host_only
from tests.helpers import until


def words(gms: GmsProcess) -> str:
    return statuses.render(statuses.collect(gms.directory))


def drop(gms: GmsProcess) -> None:
    operate.drop(gms.directory, gms.device, epoch=None, even_if_mapped=True)


@host_only
def test_recovering_memory_names_pids_and_their_engines(gms: GmsProcess):
    """A reader that is stopped while its server dies: `status` and `drop` name its pid, and its
    engine by the state file."""
    gms.load().close()
    client = ClientProcess(gms.directory, "ro")
    try:
        client.expect("reader")
        os.kill(client.pid, signal.SIGSTOP)
        gms.kill()
        gms.start()
        until(lambda: gms.status()["unowned"][0]["holders"], "the pid of who holds it")
        state = Path(gms.directory, "engine_engine-9.json")
        state.write_text("no JSON")
        assert f", mapped by pid {client.pid}" in words(gms)
        about = {"id": "engine-9", "pid": 1}
        state.write_text(json.dumps({"engine": about, "backend": {"pids": {"model": client.pid}}}))
        assert f"is orphaned, 4.0 KiB, mapped by pid {client.pid} (engine-9)" in words(gms)
        with pytest.raises(DegradedError, match=rf"pid {client.pid} \(engine-9\)"):
            drop(gms)
    finally:
        os.kill(client.pid, signal.SIGCONT)
        client.kill()
