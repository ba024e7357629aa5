"""The witness alone fences a tree: whatever does not hold it can touch no device."""

from __future__ import annotations

from engine.supervisor.tree import HELPERS
from tests.e2e.fence import assert_witness_fences
from tests.e2e.pods import Pod, in_pod


@in_pod
async def test_reference_tree_has_no_process_without_the_witness_that_reaches_a_device(pod: Pod):
    """Goal: below an init, a supervisor's pidfd proves one process only, so the witness must cover
    every process that could write. Method: list the active tree and the standby's; descriptors and
    maps of each process that lacks the witness."""
    whole = await pod.whole()
    gms = pod.tree("gms")
    for engine in (whole.engine, *whole.standbys):
        supervisor = (await pod.engine(engine))["engine"]["pid"]
        assert_witness_fences(supervisor, gms, HELPERS)
