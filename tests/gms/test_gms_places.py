"""Places: a model's servers on a device, their names, and what the models of one device share."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from gms import epoch_file, names
from gms import messages as msg
from gms.cli import sizes_of
from gms.core.region import RegionPhase
from gms.core.upkeep import Epoch
from gms.server import server
from gms.server.server import DeviceProcess
from gms.status import devices_in
from gms.vmm.host import HostMemory
from plumbing.errors import RemoteError, UnderstudyError, UsageError
from plumbing.pod.paths import (
    KV,
    WEIGHTS,
    gms_journal,
    gms_socket,
    gms_sockets,
    write_device_names,
)
from plumbing.service.config import size_list
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message

PLACES = ("HOST-0.chat", "HOST-0.chat-2", "HOST-0.4.5-kv", "HOST-1.chat", "HOST-0")
POOL, EPOCH = "0" * 32, "1" * 32
MIB = 1 << 20


@pytest.fixture
def directory(tmp_path):
    os.chmod(tmp_path, 0o700)
    return str(tmp_path)


def make_pool(directory, place, size_bytes):
    epoch_file.create(names.region_path(directory, place, names.KV, POOL), size_bytes)


def test_files_of_one_place_are_no_other_places(directory):
    """Goal: a model whose name begins like another's has its own files. Method: all of them in one
    directory."""
    for place in PLACES:
        make_pool(directory, place, MIB)
        Path(directory, names.region_file(place, names.WEIGHTS, EPOCH)).touch()
        Path(gms_socket(directory, place)).touch()
    for place in PLACES:
        assert names.regions_on_disk(directory, place, names.KV) == [POOL]
        assert names.regions_on_disk(directory, place, names.WEIGHTS) == [EPOCH]
    assert devices_in(directory) == sorted(PLACES)
    for journal in (
        "HOST-7",
        "HOST-7.old",
        "OFFLOAD-7",
    ):  # of the last pod, whose shape was another
        Path(gms_journal(directory, journal)).touch()
    write_device_names(directory, ["HOST-0", "HOST-9"])  # a server that has no socket yet
    assert devices_in(directory) == sorted([*PLACES, "HOST-9"])
    assert set(gms_sockets(Path(directory))) == set(PLACES)


async def test_models_of_one_device_share_its_limit(directory):
    """Goal: two models are not each promised a whole device. Method: weights and KV memory of two
    places on one device, and of one on another; a pool that fits only beside one of them."""
    places = ["HOST-0.a", "HOST-0.b", "HOST-1.a"]
    process = DeviceProcess(directory, places, HostMemory(), 20 * MIB, is_bounded=True)
    await process.start()
    found = {(each.device, each.tag): each for place in process.places for each in place.parts}
    for place, weights, kv in (("HOST-0.a", 5, 0), ("HOST-0.b", 3, 2), ("HOST-1.a", 7, 7)):
        epoch = Epoch(EPOCH, RegionPhase.SERVED, [weights * MIB])
        found[place, WEIGHTS].machine.regions[EPOCH] = epoch
        if kv:
            make_pool(directory, place, kv * MIB)
    beside = {each: found[each, WEIGHTS].bytes_beside // MIB for each in places}
    assert beside == {"HOST-0.a": 5, "HOST-0.b": 7, "HOST-1.a": 7}
    room = found["HOST-0.a", KV].room()
    assert (room.weights_bytes, room.others_bytes) == (5 * MIB, 5 * MIB)
    room.check(10 * MIB)
    with pytest.raises(UnderstudyError, match=r"5\.0 MiB are other models'") as caught:
        room.check(11 * MIB)
    assert caught.value.code == "gms.device_full"
    await process.close()


def test_devices_have_one_size_or_one_each():
    devices = ["HOST-0", "HOST-1"]
    assert sizes_of(devices, None) == {}
    assert sizes_of(devices, size_list("2KiB")) == {"HOST-0": 2048, "HOST-1": 2048}
    assert sizes_of(devices, size_list("2KiB, 1KiB")) == {"HOST-0": 2048, "HOST-1": 1024}
    with pytest.raises(UsageError, match="3 sizes, and there are 2 devices"):
        sizes_of(devices, (1, 2, 3))
    for text in ("1KiB,", "1KiB,0"):
        with pytest.raises(ValueError, match="size"):
            size_list(text)


async def test_server_that_could_not_start_can_be_started(
    directory: str, monkeypatch: pytest.MonkeyPatch
):
    """A call fails: nothing of the attempt is left in the way."""
    os.close(
        os.open(names.region_path(directory, "HOST-0", KV, "a" * 32), os.O_CREAT | os.O_WRONLY)
    )
    place = server.a_place(directory, "HOST-0", HostMemory(), MIB)
    with monkeypatch.context() as patch:
        patch.setattr(epoch_file, "is_retired", Mock(side_effect=OSError("as told")))
        with pytest.raises(OSError, match="as told"):
            await place.start()
    await place.start()
    await place.close()


async def test_epoch_whose_file_cannot_be_made_is_refused(
    directory: str, monkeypatch: pytest.MonkeyPatch
):
    """Goal: a full disk costs one load, and nothing else. Method: the writer that is granted cannot
    have its file; the next one can."""
    place = server.a_place(directory, "HOST-0", HostMemory(), MIB)
    await place.start()
    request = msg.AttachMsg("engine-0", "i", "rw_or_ro", identity={}, wait_ms=5000)

    def attach() -> Message:
        with BlockingClient(gms_socket(directory, "HOST-0"), msg.CATALOGUE) as client:
            reply = client.request(request, timeout_s=10)
            while isinstance(reply.message, msg.WaitingMsg):  # the lost epoch is given up first
                reply = client.receive(10)
            return reply.message

    with monkeypatch.context() as patch:
        patch.setattr(epoch_file, "create", Mock(side_effect=OSError(28, "a full disk")))
        with pytest.raises(RemoteError, match=r"gms\.epoch_file"):
            await asyncio.to_thread(attach)
    assert isinstance(await asyncio.to_thread(attach), msg.WritingMsg)
    await place.close()
