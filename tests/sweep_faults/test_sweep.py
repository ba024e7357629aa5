"""A pod survives the calls that once did harm: a fixed sample of the sweep.

A case whose call was not made to fail is `not_reached`, so the sample proves the shim, too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.sweep_faults.shim import CAN_SHOW_STACKS, build
from tests.sweep_faults.sweep import Case, Outcome, Sweep, Verdict
from understudy.up.models import make_random_model

WHOLE_S = 60.0  # a busy machine; the sweep itself asks for 30 s

# Each of these once took failover away, or an engine, or a part of the pod.
SAMPLE = (
    # A supervisor could not start its backend: it stayed in `init`, without a process. Its own
    # limit ends it now, and it starts again.
    Case("relaunch", "standby-supervisor", "descriptor", "socketpair@"),
    # A backend could not open its checkpoint: it was called broken, and its supervisor ended.
    Case("relaunch", "standby-model", "descriptor", "engine/backends/shards.py:"),
    # The active engine's supervisor could not dial a restarted lock server: it died.
    Case("reconnect", "active-supervisor", "descriptor", "socket@"),
    # A device's server could not be started: the whole memory service ended.
    Case("gms-reconnect", "gms", "process", ""),
)


@pytest.mark.slow
@pytest.mark.skipif(not CAN_SHOW_STACKS, reason="this Python hides _Py_DumpTraceback")
def test_a_pod_is_whole_after_each_call_of_a_sample_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: it heals by itself, nothing more is started again, and the next death of the active
    engine leads to a takeover."""
    monkeypatch.delenv("PYTHONDEVMODE", raising=False)  # the pod runs as users run it

    async def sweep_sample() -> list[Outcome]:
        model = await make_random_model(tmp_path / "model")
        sweep = Sweep(tmp_path, model, build(tmp_path), WHOLE_S, print)
        try:
            return [await sweep.run(case) for case in SAMPLE]
        finally:
            await sweep.close()

    outcomes = asyncio.run(sweep_sample())
    again = ["the supervisor of engine-1 was started again"]
    assert [(each.case, each.verdict, each.cost) for each in outcomes] == [
        (case, Verdict.WHOLE, again if case is SAMPLE[0] else []) for case in SAMPLE
    ]
