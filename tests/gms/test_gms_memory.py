"""Memory itself: host allocations, commit in place, and no writes after it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import structs

from gms import epoch_file
from gms.client.attach import placeholder
from gms.client.weights import SLABS_WANTED
from gms.manifest import SLABS_MAX
from gms.vmm.host import HostAllocation, HostMemory
from plumbing.errors import RemoteError, UnderstudyError
from plumbing.wire.fds import OwnedFd
from tests.gms.bench import IDENTITY, GmsProcess
from tests.gms.kinds import host_only
from tests.helpers import open_fds

PAGE = HostMemory.granularity_bytes
libc = ctypes.CDLL(None, use_errno=True)


def refused_with(call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "it worked"


@host_only
def test_after_a_commit_no_process_can_write(gms: GmsProcess):
    """Try every way to write to committed memory: descriptors old and new, mappings, truncation."""
    with gms.writer() as writer:
        address = writer.place("t", PAGE, (PAGE,), "uint8")
        writer.write("t", b"good")
        kept = os.dup(writer.attachment.slabs[0].fileno())  # a writable copy that is kept back
        assert fcntl.fcntl(kept, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        reader = writer.commit(IDENTITY)
    try:
        assert reader.address("t") == address, "the commit did not move anything"
        assert bytes(reader.view("t")[:4]) == b"good"
        with pytest.raises(TypeError):
            reader.view("t")[0] = 1
        with gms.reader() as other:
            for fd in (*reader.slab_fds(), *other.slab_fds()):
                assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
            fd = other.slab_fds()[0]
            assert refused_with(os.pwrite, fd, b"bad", 0) == "EBADF"
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            for writable in (kept, again):
                assert refused_with(os.pwrite, writable, b"bad", 0) == "EPERM"
                assert refused_with(os.ftruncate, writable, 0) == "EPERM"
                assert refused_with(mmap.mmap, writable, PAGE) == "EPERM"
                assert refused_with(fcntl.fcntl, writable, fcntl.F_ADD_SEALS, 0) == "EPERM"
                os.close(writable)
            for mapped in (reader.address("t"), other.address("t")):
                assert libc.mprotect(ctypes.c_void_p(mapped), PAGE, 3) == -1
                assert ctypes.get_errno() == errno.EACCES
            assert bytes(other.view("t")[:4]) == b"good"
    finally:
        reader.close()


@host_only
def test_commit_is_refused_while_a_process_can_still_write(gms: GmsProcess):
    """A second writable mapping of a slab: the commit fails and says why, nothing is published."""
    with gms.writer() as writer:
        writer.place("t", PAGE, (PAGE,), "uint8")
        second = mmap.mmap(writer.attachment.slabs[0].fileno(), PAGE)
        with second, pytest.raises(RemoteError, match=r"gms\.still_writable"):
            writer.commit(IDENTITY)
    assert gms.status()["commits_total"] == 0


def test_only_sealed_memory_of_its_size_passes_the_check(tmp_path: Path):
    """What a survivor hands back is looked at: sealed is good; open, wrong, a file, or another
    slab of the same size is not."""
    memory = HostMemory()
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(PAGE)
        plain = HostAllocation(OwnedFd(os.dup(file.fileno())), PAGE)
    writable, sealed = memory.create(PAGE, "writable"), memory.create(PAGE, "sealed")
    sealed.seal()
    sealed.check("sealed")
    larger = HostAllocation(sealed.export(writable=False), 2 * PAGE)
    for bad, why in ((plain, "can be sealed"), (writable, "not sealed"), (larger, "has 4096")):
        with pytest.raises(UnderstudyError, match=why) as caught:
            bad.check("sealed")
        assert caught.value.code == "gms.bad_slab"
    with pytest.raises(UnderstudyError, match="should be other and is sealed"):
        sealed.check("other")
    for each in (plain, writable, sealed, larger):
        each.release()


@host_only
def test_tensor_larger_than_a_slab_may_be_spans_slabs(gms: GmsProcess):
    """A cap of two pages: three tensors, one of five pages; readers find it in one piece."""
    memory = HostMemory(allocation_bytes_max=2 * PAGE + 1)
    content = bytes(range(256)) * (5 * PAGE // 256)
    with gms.writer(memory=memory) as writer:
        for name, data in (("a", b"first"), ("b", content), ("c", b"last")):
            writer.place(name, len(data), (len(data),), "uint8")
            writer.write(name, data)
        with writer.commit(IDENTITY) as committed, gms.reader() as reader:
            assert reader.slab_sizes == (2 * PAGE, 2 * PAGE, 2 * PAGE)
            for name, data in (("a", b"first"), ("b", content), ("c", b"last")):
                assert reader.read(name) == committed.read(name) == data
            assert reader.view("b") == content


@host_only
def test_many_tensors_take_few_slabs_though_nothing_was_free_when_the_load_began(gms: GmsProcess):
    """As where another epoch or KV memory is being freed. One slab for each would be too many."""
    count = 2 * SLABS_MAX
    with gms.writer() as writer:
        writer._grant = structs.replace(writer._grant, free_bytes=0)
        writer.plan(count * PAGE)
        for index in range(count):
            writer.place(str(index), PAGE, (PAGE,), "uint8")
        with writer.commit(IDENTITY) as reader:
            assert len(reader.slab_sizes) <= SLABS_MAX
            assert reader.size_bytes <= count * PAGE + count * PAGE // SLABS_WANTED


def test_epoch_file_is_held_until_the_last_process_releases_it(directory: str):
    """Shared flocks keep it; after the last one it is removed, and a late process is refused."""
    path = f"{directory}/e"
    epoch_file.create(path)
    before = open_fds()
    first, second = joined(path), joined(path)
    first.close()
    assert epoch_file.is_held(path)
    assert not epoch_file.remove_if_free(path)
    second.close()
    assert not epoch_file.is_held(path)
    assert epoch_file.remove_if_free(path)
    assert not os.path.exists(path)
    with pytest.raises(UnderstudyError, match=r"gms\.stale_epoch"):
        joined(path)
    assert open_fds() == before


def joined(path: str) -> OwnedFd:
    return epoch_file.join(path, placeholder())


def test_flock_takes_the_low_number_of_its_placeholder(directory: str):
    """A dying process closes its highest descriptors first: the flock has to be below the slabs."""
    path = f"{directory}/e"
    epoch_file.create(path)
    low = placeholder()
    number = low.fileno()
    slab = OwnedFd(os.memfd_create("slab"))
    with epoch_file.join(path, low) as held, slab:
        assert held.fileno() == number < slab.fileno()
        assert epoch_file.is_held(path)
        assert not os.get_inheritable(number)


def test_joiner_that_opened_the_file_before_it_was_removed_is_stale(directory: str):
    """Open, then lose the race to the server's removal, then lock: the lock proves nothing."""
    path = f"{directory}/e"
    epoch_file.create(path)
    server = os.open(path, os.O_RDWR)
    fcntl.flock(server, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(joined, path)
        os.unlink(path)
        os.close(server)
        with pytest.raises(UnderstudyError, match=r"gms\.stale_epoch"):
            joining.result(30)
