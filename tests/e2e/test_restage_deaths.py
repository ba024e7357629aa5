"""A process that dies in the middle of a restage, in a pod whose engines rest without their
weights: the request that began it is answered, and the weights are what they were."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from engine import messages as m
from gms import names
from gms.client import Reader, messages, open_session
from plumbing.errors import UnderstudyError
from plumbing.pod.messages import EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.paths import engine_socket
from plumbing.wire.blocking import BlockingClient
from tests.copy_stop import CopyStop
from tests.e2e.pods import Pod, PodHome
from tests.e2e.processes import continue_all, kill
from tests.helpers import POLL_S, auntil

OFFLOADED_S = 120.0  # the digests of the weights and of their copy wait for idle CPUs
HELD_S = 30.0
SLAB = "/memfd:understudy-"
DEVICE = "HOST-0"
COPIES = names.offload_device(DEVICE)
VICTIMS = ["model", "supervisor", "device", "copies"]


class Home:
    """A pod whose host memory takes copies of the weights, and what stops a copy in it."""

    def __init__(self, base: Path, model: Path) -> None:
        self.stop = CopyStop(base / "stop")
        env = {"UNDERSTUDY_HOST_MEMORY": "64MiB", **self.stop.environment}
        self.pods = PodHome(base, model, env=env)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Home]:
    found = Home(tmp_path_factory.mktemp("pod"), model)
    try:
        yield found
    finally:
        found.pods.close()


def told(pod: Pod, engine: str, goal: Tier) -> None:
    """Tell an engine, and wait until it is there and says that nothing is in the way."""
    with BlockingClient(engine_socket(str(pod.directory), engine), m.CONTROL) as client:
        am = client.request(SetGoalMsg(goal, "a test"), timeout_s=OFFLOADED_S).message
        while not (isinstance(am, EngineReportMsg) and am.tier is goal and not am.fault):
            am = client.receive(OFFLOADED_S).message


async def offload(pod: Pod, active: str, standby: str) -> None:
    """Let both engines release their weights, until the device has none."""
    with BlockingClient(engine_socket(str(pod.directory), standby), m.CONTROL) as client:
        await asyncio.to_thread(client.request, SetGoalMsg(Tier.OFFLOADED, "a test"), timeout_s=30)
    await asyncio.to_thread(told, pod, active, Tier.OFFLOADED)
    assert (await pod.memory())["state"] == "offloaded"


async def victims_of(pod: Pod, active: str) -> dict[str, int]:
    """Every process that takes part in a restage, besides the one that copies."""
    return {
        "model": (await pod.engine(active))["backend"]["pids"]["model"],
        "supervisor": pod.pid(active),
        "device": (await pod.memory())["pid"],
        "copies": (await pod.memory(COPIES))["pid"],
    }


def digest_of(pod: Pod) -> str | None:
    """Of the bytes that are committed on the device, read by this process."""
    request = messages.AttachMsg("a-test", "a-test", "ro", wait_ms=30_000)
    with open_session(str(pod.directory), DEVICE, request) as session:
        assert isinstance(session, Reader)
        return session.digest()


def epochs_held(pids: Iterable[int]) -> set[str]:
    """Whose slabs these processes have open or mapped, as the kernel has it."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            found |= {line.split(None, 5)[-1] for line in maps.splitlines()}
        for fd in open_fds_of(pid):
            found.add(fd)
    return {name.removeprefix(SLAB).partition("-")[0] for name in found if name.startswith(SLAB)}


def open_fds_of(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{fd}")


async def epochs_known(pod: Pod) -> set[str]:
    both = [await pod.memory(), await pod.memory(COPIES)]
    return {document["epoch"][:8] for document in both if document.get("epoch")}


@pytest.mark.slow
def test_death_in_the_middle_of_a_restage_loses_no_request_and_no_byte(home: Home):
    """Method: both engines rest without their weights; a request wakes the active one, whose model
    process is stopped when half of the weights are back. It, its supervisor, or one of the servers
    of the weights and of their copy is killed, and the copy goes on if it can. The pod answers, and
    is complete again with the same bytes, and no memory but that of the weights and of one copy."""

    async def scenario(pod: Pod) -> None:
        digest = await asyncio.to_thread(digest_of, pod)
        for victim in VICTIMS:
            before = await pod.whole()
            (standby,) = before.standbys
            await offload(pod, before.engine, standby)
            victims = await victims_of(pod, before.engine)
            home.stop.arm()
            async with pod.load(1) as load:
                await auntil(home.stop.stopped, "the weights to be half back")
                assert home.stop.stopped() == victims["model"]
                kill(victims[victim])
                continue_all([victims["model"]])
                await load.answers(3)
            assert not load.refused(), victim
            assert not load.lost(), victim
            for engine in (before.engine, standby):
                await auntil(lambda name=engine: is_told(pod, name), f"{engine} to take a goal")
            await pod.whole_after(before.token - 1)
            assert await asyncio.to_thread(digest_of, pod) == digest, victim
            await nothing_else_is_held(pod)

    home.pods.run(scenario)


async def nothing_else_is_held(pod: Pod) -> None:
    async with asyncio.timeout(HELD_S):
        while True:
            if epochs_held(pod.processes()) == await epochs_known(pod):
                return
            await asyncio.sleep(POLL_S)


def is_told(pod: Pod, engine: str) -> bool:
    """Told to be awake, once it answers: it may be starting."""
    try:
        with BlockingClient(engine_socket(str(pod.directory), engine), m.CONTROL) as client:
            client.request(SetGoalMsg(Tier.AWAKE, "a test"), timeout_s=30)
    except UnderstudyError:
        return False
    return True
