"""Memory itself: host allocations, commit in place, and no writes after it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gms import epoch_file
from gms.client import memory_for, open_session
from gms.server.server import DeviceServer
from gms.vmm.host import HostAllocation, HostMemory
from plumbing.errors import InvariantError, RemoteError, UnderstudyError
from plumbing.wire.fds import OwnedFd
from tests.gms.bench import IDENTITY, MIB, ClientProcess, GmsProcess
from tests.gms.kinds import host_only
from tests.helpers import auntil, open_fds
from tests.standin import build

Start = Callable[..., ClientProcess]
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
        kept = os.dup(writer._attachment.slabs[0].fileno())  # a writable copy that is kept back
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


def test_writing_to_a_view_after_the_commit_ends_the_process(gms: GmsProcess, client: Start):
    """A writer that keeps a writable view and uses it after its commit dies of SIGSEGV; on a real
    device, whose memory the process itself cannot address, of the driver's error."""
    writer = client()
    writer.expect("writer")
    writer.do("place 1")
    writer.do("commit")
    writer.do("write")
    ended = writer.process.wait()
    is_real = gms.kind == "cuda" and build.REAL_GPU is not None
    assert ended == -signal.SIGSEGV or (is_real and ended == 1)


@host_only
def test_commit_is_refused_while_a_process_can_still_write(gms: GmsProcess):
    """A second writable mapping of a slab: the commit fails and says why, nothing is published."""
    with gms.writer() as writer:
        writer.place("t", PAGE, (PAGE,), "uint8")
        with mmap.mmap(writer._attachment.slabs[0].fileno(), PAGE):
            with pytest.raises(RemoteError) as caught:
                writer.commit(IDENTITY)
            assert caught.value.code == "gms.still_writable"
    assert gms.status()["commits_total"] == 0


def test_unmapped_memory_keeps_its_addresses_and_frees_nothing_of_others():
    """Map, unmap, map again: the same address; a reservation and an allocation have one undo."""
    memory = HostMemory()
    before = open_fds()
    allocation = memory.create(2 * PAGE, "t")
    reservation = memory.reserve(2 * PAGE)
    address = reservation.address
    reservation.map(0, [allocation], writable=True)
    reservation.write(PAGE, b"x")
    reservation.unmap()
    reservation.unmap()
    with pytest.raises(InvariantError):
        reservation.read(PAGE, 1)
    reservation.map(0, [allocation], writable=False)
    assert reservation.address == address
    assert reservation.read(PAGE, 1) == b"x"
    for undo in (reservation.free, reservation.free, allocation.release, allocation.release):
        undo()
    assert open_fds() == before


def test_allocations_lie_side_by_side_and_are_mapped_all_or_none():
    """Two in one range: bytes across their border; what does not fit or follow maps nothing."""
    memory = HostMemory()
    first, second, closed = (memory.create(PAGE, name) for name in ("a", "b", "c"))
    closed.release()
    reservation = memory.reserve(3 * PAGE)
    with pytest.raises(InvariantError, match="do not follow"):
        reservation.map(PAGE, [first], writable=True)
    reservation.map(0, [first], writable=True)
    for bad in ([second, closed], [second, first, first]):
        with pytest.raises((InvariantError, ValueError)):
            reservation.map(PAGE, bad, writable=True)
        with pytest.raises(InvariantError, match="not mapped"):
            reservation.view(PAGE, 1)
    with pytest.raises(InvariantError, match="as a whole"):
        reservation.map(PAGE, [second], writable=False)
    reservation.map(PAGE, [second], writable=True)
    reservation.write(PAGE - 2, b"span")
    reservation.make_read_only()
    assert reservation.read(PAGE - 2, 4) == b"span"
    with pytest.raises(InvariantError, match="read-only"):
        reservation.write(0, b"x")
    for each in (first, second):
        assert not each.is_writable
        each.release()
    assert reservation.view(2 * PAGE, 0) == b""
    reservation.free()


def test_memory_is_cleared_where_it_is_mapped():
    """Bytes all over two pages of three: zero afterwards, and nothing to clear is no error."""
    memory = HostMemory()
    allocation, reservation = memory.create(2 * PAGE, "t"), memory.reserve(3 * PAGE)
    reservation.clear()
    reservation.map(0, [allocation], writable=True)
    reservation.write(0, b"x" * 2 * PAGE)
    reservation.clear()
    assert reservation.read(0, 2 * PAGE) == bytes(2 * PAGE)
    reservation.free()
    allocation.release()


def test_foreign_descriptors_are_not_taken_for_slabs():
    """A pipe, or memory of another size: refused before anything is mapped, and closed."""
    memory = HostMemory()
    before = open_fds()
    reading, writing = os.pipe()
    os.close(writing)
    small = memory.create(PAGE, "small")
    for fd in (OwnedFd(reading), small.export(writable=False)):
        with pytest.raises(UnderstudyError, match=r"gms\.bad_slab"):
            memory.adopt(fd, 2 * PAGE)
    small.release()
    assert open_fds() == before


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


def test_sealed_memory_is_never_exported_writable():
    """Asking for a writable export of sealed memory is our own fault."""
    allocation = HostMemory().create(PAGE, "t")
    allocation.seal()
    with pytest.raises(InvariantError):
        allocation.export(writable=True)
    allocation.release()


def test_epoch_file_is_held_until_the_last_process_releases_it(directory: str):
    """Shared flocks keep it; after the last one it is removed, and a late process is refused."""
    path = f"{directory}/e"
    epoch_file.create(path)
    before = open_fds()
    first, second = epoch_file.join(path), epoch_file.join(path)
    first.close()
    assert epoch_file.is_held(path)
    assert not epoch_file.remove_if_free(path)
    second.close()
    assert not epoch_file.is_held(path)
    assert epoch_file.remove_if_free(path)
    assert not os.path.exists(path)
    with pytest.raises(UnderstudyError, match=r"gms\.stale_epoch"):
        epoch_file.join(path)
    assert open_fds() == before


def test_joiner_that_opened_the_file_before_it_was_removed_is_stale(directory: str):
    """Open, then lose the race to the server's removal, then lock: the lock proves nothing."""
    path = f"{directory}/e"
    epoch_file.create(path)
    server = os.open(path, os.O_RDWR)
    fcntl.flock(server, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(epoch_file.join, path)
        os.unlink(path)
        os.close(server)
        with pytest.raises(UnderstudyError, match=r"gms\.stale_epoch"):
            joining.result(30)


def test_flock_takes_the_low_number_of_its_placeholder(directory: str):
    """A dying process closes its highest descriptors first: the flock has to be below the slabs."""
    path = f"{directory}/e"
    epoch_file.create(path)
    placeholder = OwnedFd(os.open(os.devnull, os.O_RDONLY))
    number = placeholder.fileno()
    slab = OwnedFd(os.memfd_create("slab"))
    with epoch_file.join(path, placeholder) as held, slab:
        assert held.fileno() == number < slab.fileno()
        assert epoch_file.is_held(path)
        assert not os.get_inheritable(number)


class Watched:
    """A memory, or an allocation of it, that writes down which thread makes, seals and frees."""

    def __init__(self, inner: Any, threads: dict[str, set[str]]) -> None:
        self.inner, self.threads = inner, threads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in ("create", "seal", "release"):
            return found

        def call(*args: Any) -> Any:
            self.threads.setdefault(name, set()).add(threading.current_thread().name)
            made = found(*args)
            return Watched(made, self.threads) if name == "create" else made

        return call


def test_driver_calls_and_frees_never_run_on_the_loop(directory: str, device: str):
    """Load, commit, replace: slabs are made and sealed on one thread, freed on another."""
    memory = Watched(memory_for(device), {})
    main = threading.current_thread().name

    def load(version: int) -> None:
        session = open_session(
            directory,
            device,
            engine="e",
            incarnation="i",
            mode="rw",
            identity={"v": version},
            wait_s=20,
            replace=True,
        )
        session.place("t", MIB, (MIB,), "uint8")
        session.commit({"v": version}).close()

    async def scenario() -> None:
        server = DeviceServer(directory, device, memory, 200 * MIB)
        await server.start()
        await asyncio.to_thread(load, 1)
        await asyncio.to_thread(load, 2)
        await auntil(lambda: server.status()["reclaims_total"] == 1, "the first epoch to be freed")
        assert main not in set().union(*memory.threads.values())
        assert memory.threads["release"] == {f"gms-closer-{device}"}
        assert memory.threads["seal"] == memory.threads["create"] == {f"gms-driver-{device}"}
        await server.close()

    before = open_fds()
    asyncio.run(scenario())
    assert open_fds() == before
