"""The witness alone fences a tree: whatever does not hold it can touch no device."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from engine.supervisor.tree import HELPERS
from plumbing.service import procfs
from tests.e2e.fence import assert_witness_fences, bare, reach_of, sockets_of
from tests.e2e.pods import Pod, PodHome
from tests.helpers import until


def test_reference_tree_has_no_process_without_the_witness_that_reaches_a_device(home: PodHome):
    """Goal: below an init, a supervisor's pidfd proves one process only, so the witness must cover
    every process that could write. Method: list the active tree and the standby's; descriptors and
    maps of each process that lacks the witness."""

    async def scenario(pod: Pod) -> None:
        whole = await pod.whole()
        gms = pod.tree("gms")
        for engine in (whole.engine, *whole.standbys):
            supervisor = (await pod.engine(engine))["engine"]["pid"]
            assert_witness_fences(supervisor, gms, HELPERS)

    home.run(scenario)


def test_process_without_the_witness_that_has_memory_or_a_connection_is_found():
    """Goal: the check above can fail. Method: a child of this process with a memfd and one end of
    a connection, both inherited."""
    memory = os.memfd_create("slab")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inherited = (memory, theirs.fileno())
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"], pass_fds=inherited
        )
        try:
            until(lambda: procfs.name(child.pid) != "", "the child")
            assert child.pid in bare(os.getpid())
            reached = reach_of(child.pid, sockets_of([os.getpid()]))
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    os.close(memory)
    assert {each.partition(":")[0] for each in reached} == {"/memfd", "socket"}
