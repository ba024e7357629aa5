"""Goal: a pod that is cut off without a word costs its streams a pause, and nothing else.

Method: real pods, each in a network namespace of its own (`fleet_network`); iptables drops packets
in the pod's namespace, so nobody is told. Clients compare each answer with the one that they got
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.e2e.fleet_network import FAST, PROMPTS, NetworkFleet, made_namespaces, why_not
from tests.helpers import on_loop_of
from understudy.drill.clients import send
from understudy.drill.outcomes import classify
from understudy.drill.records import Outcome

AWAY_MS = 3_000.0  # longer than it takes to call a pod silent


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[NetworkFleet, asyncio.Runner]]:
    if why := why_not():
        pytest.skip(why)
    with made_namespaces() as namespaces, asyncio.Runner() as loop:
        made = NetworkFleet(tmp_path_factory.mktemp("net"), namespaces, *FAST)
        try:
            loop.run(made.start())
            yield made, loop
        finally:
            loop.run(made.runner.stop())


of_fleet = on_loop_of("fleet", "made", lambda fleet, scenario: fleet[1].run(scenario(fleet[0])))


@pytest.mark.slow
@pytest.mark.parametrize("directions", [("in", "out"), ("in",), ("out",)])
@of_fleet
async def test_streams_of_a_pod_that_is_cut_off_go_on_at_the_other_one(made, directions):
    """Method: packets are dropped both ways, on the way to the pod, on the way back; they are until
    all streams have ended, so that none can have ended there."""
    async with made.streams():
        cut = made.namespaces["pod-0"]
        cut.drop(*directions)
        try:
            await made.until(lambda pods: pods["pod-0"]["streams"] == 0, "moved")
            pods = await made.until(lambda pods: pods["pod-0"]["state"] != "ready", "silent")
            assert pods["pod-1"]["state"] == "ready"
            answer = await send(made.target, PROMPTS[0])  # a new one
            assert classify(answer, made.expected) is Outcome.OK
            assert answer.pod == "pod-1"
        except BaseException:
            cut.heal()
            raise
    cut.heal()
    await made.all_ready()


@pytest.mark.slow
@of_fleet
async def test_no_stream_ends_while_all_pods_are_cut_off_and_all_go_on_afterwards(made):
    """Rule 10: silence moves nothing to nowhere."""
    async with made.streams() as running:
        for each in made.namespaces.values():
            each.drop()
        try:
            await made.until(
                lambda pods: all(each["heard_for_ms"] >= AWAY_MS for each in pods.values()),
                "silent for longer than it takes to move a stream",
            )
            assert not any(task.done() for task in running)
        finally:
            for each in made.namespaces.values():
                each.heal()
    await made.all_ready()
