"""Goal: an engine whose weights are offloaded maps none of them, and answers as before once it is
woken. Method: real processes under the stub supervisor, with real servers of memory and copies."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.messages import (
    PlaceWeightsMsg,
    WeightsPlacedMsg,
)
from gms import names
from gms.host_copy import CopyKeeper, make_copy
from tests.engine.reference_process.active import activate, complete
from tests.engine.reference_process.rig import (
    Supervisor,
    listening,
    memory_service,
    supervisor,
)
from tests.engine.reference_process.test_rest import BUDGET_MS, rest

SLAB = "memfd:understudy-"  # in the name of each slab, before its epoch
# Digests are computed on threads of the lowest priority, which a busy machine may starve.
DIGEST_S = 120.0
AWAY, BACK = PlaceWeightsMsg(True, BUDGET_MS), PlaceWeightsMsg(False, BUDGET_MS)


class Pod:
    """The devices' servers and those of their copies, with what keeps the copies."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory, self.names = str(directory), [f"HOST-{n}" for n in range(ranks)]
        self.devices: list[Any] = []
        self.hosts: list[Any] = []
        self.keepers = [CopyKeeper(self.directory, each, self._maker(each)) for each in self.names]

    def _maker(self, device: str) -> Any:
        return lambda: int(not make_copy(self.directory, device))

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            for device in self.names:
                at = Path(self.directory)
                self.devices.append(
                    await stack.enter_async_context(memory_service(at, device=device))
                )
                host = names.offload_device(device)
                self.hosts.append(await stack.enter_async_context(memory_service(at, device=host)))
            try:
                yield self
            finally:
                for keeper in self.keepers:
                    await asyncio.to_thread(keeper.close)

    async def copied(self) -> None:
        """Until every device has a digested copy."""
        async with asyncio.timeout(DIGEST_S):
            for keeper, host in zip(self.keepers, self.hosts, strict=True):
                while True:
                    await asyncio.to_thread(keeper.look)
                    if host.status()["digest"] not in (None, "pending"):
                        break
                    await asyncio.sleep(0.01)

    def states(self) -> list[str]:
        return [device.status()["state"] for device in self.devices]


async def offload(stub: Supervisor) -> WeightsPlacedMsg:
    """Ask until the memory is free, as a supervisor does."""
    async with asyncio.timeout(DIGEST_S):
        while True:
            placed = await stub.ask(AWAY)
            assert isinstance(placed, WeightsPlacedMsg), placed
            if placed.is_away and not placed.note:
                return placed
            await asyncio.sleep(0.02)


def slabs_mapped(stub: Supervisor, pod: Pod) -> list[str]:
    """The slabs of the devices' weights that the backend's processes map; copies are others."""
    copies = [f"{SLAB}{host.status()['epoch'][:8]}" for host in pod.hosts]
    found = []
    for pid in stub.registered.values():
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found += [line for line in lines if SLAB in line and not any(c in line for c in copies)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_offloaded_engine_maps_no_weights_and_answers_as_before(
    tmp_path: Path, model: Path, ranks: int
):
    """Goal: nothing stays on the device, and every bit comes back. Method: awake, at rest,
    offloaded; then warm by an order, offloaded again, and awake by a wake."""
    arguments = ("--model", str(model), "--tensor-parallel", str(ranks))

    async def main() -> None:
        sock, url = listening()
        async with Pod(tmp_path, ranks).running() as pod, supervisor(tmp_path, *arguments) as stub:
            with sock:
                assert (await stub.prepared()).can_offload
                await activate(stub, sock, 1)
                async with aiohttp.ClientSession() as client:
                    _, expected = await complete(client, url)
                await rest(stub, keep_kv=False)
                await pod.copied()
                assert slabs_mapped(stub, pod)
                for order in (BACK, None):
                    placed = await offload(stub)
                    assert placed.freed_bytes > 0
                    assert pod.states() == ["offloaded"] * ranks
                    assert slabs_mapped(stub, pod) == []
                    if order is not None:
                        assert await stub.ask(order) == WeightsPlacedMsg(False)
                        assert pod.states() == ["committed"] * ranks
                        assert slabs_mapped(stub, pod)
                await activate(stub, sock, 1)
                assert pod.states() == ["committed"] * ranks
                async with aiohttp.ClientSession() as client:
                    _, answer = await complete(client, url)
                assert answer["choices"] == expected["choices"]

    asyncio.run(main())
