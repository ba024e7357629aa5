"""KV memory on a disk without a free byte, or without a free name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gms import epoch_file
from gms.client import KvClaim, borrow_pool
from plumbing.errors import RemoteError, is_disk_fault
from tests.gms.bench import DEVICE, GmsProcess
from tests.gms.kv.kv_bench import ERA, INDEX_BYTES, SIZE_BYTES
from tests.small_disk import SmallDisk, needs_root, small_disk

pytestmark = needs_root


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "small", "size=64k,nr_inodes=64") as disk:
        yield disk


@pytest.fixture
def gms(disk: SmallDisk) -> Iterator[GmsProcess]:
    server = GmsProcess(str(disk.path)).start()
    yield server
    server.stop()


def claim(token: int) -> KvClaim:
    return KvClaim(f"engine-{token}", f"i-{token}", token, ERA, SIZE_BYTES, INDEX_BYTES)


def test_pool_is_made_lent_counted_and_discarded_without_a_free_byte(
    gms: GmsProcess, disk: SmallDisk
):
    disk.fill()
    with borrow_pool(gms.directory, DEVICE, claim(1), deadline_s=20) as lease:
        assert lease.is_fresh
        assert epoch_file.kv_bytes(gms.directory, DEVICE) == SIZE_BYTES
        pool = lease.pool
    with borrow_pool(gms.directory, DEVICE, claim(2), deadline_s=20) as lease:
        assert lease.pool == pool
        lease.discard("the test says so")
    with borrow_pool(gms.directory, DEVICE, claim(3), deadline_s=20) as lease:
        assert lease.pool != pool


def test_without_a_free_name_the_disk_is_blamed_until_there_is_room(
    gms: GmsProcess, disk: SmallDisk
):
    disk.fill_names()
    with pytest.raises(RemoteError) as refused:
        borrow_pool(gms.directory, DEVICE, claim(1), deadline_s=20)
    assert refused.value.code == "gms.pool_file"
    assert is_disk_fault(refused.value)
    disk.clear()
    borrow_pool(gms.directory, DEVICE, claim(1), deadline_s=20).close()
