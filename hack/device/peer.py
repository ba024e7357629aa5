"""The process that opens CUDA for a device check and does what it is told, one request at a time.

Started by `remote.Peer`: `python -m hack.device.peer FD DEVICE WITNESS`. A request is one JSON
object `{"do": name, …}` with descriptors; `do_<name>` serves it. An answer says `value` or `error`,
and `calls`: what each driver call took, which is where every figure of a cost comes from. Memory is
the project's own `CudaMemory`; the driver is called directly only where the question is about it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from gms.client import Keeper, Reader, Writer, open_session
from gms.vmm.cuda import CudaAllocation, CudaMemory, CudaReservation
from hack.device import kernels
from understudy.errors import UnderstudyError
from understudy.service.fd_limit import raise_fd_limit
from understudy.service.parent import arm_from_environment
from understudy.wire.fds import OwnedFd

FDS_MAX = 250  # in one message: Linux takes at most 253
REQUEST_BYTES_MAX = 64 << 10
PAGE = 4096  # what is written and read at both ends of a mapping
IDENTITY = {"model": "device-check", "shards": {"a": "1"}}


class Recorder:
    """Stands in front of `Driver.call` and notes how long each call took."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.us: dict[str, list[float]] = {}

    def __call__(self, name: str, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._call(name, *args)
        finally:
            self.us.setdefault(name, []).append((time.perf_counter() - began) * 1e6)

    def take(self) -> dict[str, dict[str, float]]:
        """What was noted since the last time, by the name of the call."""
        taken, self.us = self.us, {}
        return {
            name: {
                "n": len(us),
                "median_us": round(statistics.median(us), 1),
                "max_us": round(max(us), 1),
                "sum_ms": round(sum(us) / 1e3, 3),
            }
            for name, us in taken.items()
        }


class Obeying:
    """What this process holds, and a method for each request."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.slabs: list[CudaAllocation] = []
        self.ranges: list[CudaReservation] = []
        self.outgoing: list[OwnedFd] = []
        self.kept: list[int] = []

    # -- the device

    def do_open(self, context: bool) -> None:
        self.memory = CudaMemory(self.device, context=context)
        self.call = Recorder(self.memory.driver.call)
        self.memory.driver.call = self.call  # type: ignore[method-assign]  # times everybody's

    def do_facts(self) -> dict[str, Any]:
        api = self.memory.driver.api
        best = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        prop = self.memory._prop
        return {
            **self.memory.facts(),
            "recommended_granularity_bytes": int(
                self.call("MemGetAllocationGranularity", prop, best)
            ),
            "capacity_bytes": self.memory.capacity_bytes,
            "allocation_bytes_max": self.memory.allocation_bytes_max,
        }

    def do_state(self) -> dict[str, Any]:
        """Is a context current, is the primary one alive, how many files of the device are open?"""
        driver = self.memory.driver
        _, _, is_active = driver.api.cuDevicePrimaryCtxGetState(driver.ordinal)
        links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
        files = [os.readlink(link) for link in links if os.path.islink(link)]
        return {
            "has_context": driver.has_context or bool(is_active),
            "device_fds": sum(file.startswith("/dev/nvidia") for file in files),
        }

    # -- physical memory

    def do_create(self, size_bytes: int, count: int = 1) -> None:
        for _ in range(count):
            self.slabs.append(self.memory.create(size_bytes, "check"))

    def do_create_when_free(self, size_bytes: int, count: int, timeout_s: float) -> dict[str, Any]:
        """`count` blocks, each tried until it succeeds; when the last one did (monotonic)."""
        end, refusals, slowest_s = time.monotonic() + timeout_s, 0, 0.0
        while count and time.monotonic() < end:
            began = time.monotonic()
            try:
                self.do_create(size_bytes)
                count -= 1
            except UnderstudyError as error:
                if error.code != "gms.device_full":
                    raise
                refusals, slowest_s = refusals + 1, max(slowest_s, time.monotonic() - began)
                time.sleep(0.001)
        at = None if count else time.monotonic()
        return {"at": at, "refusals": refusals, "slowest_refusal_ms": round(slowest_s * 1e3, 2)}

    def do_lend(self) -> None:
        self.outgoing = [slab.export(writable=False) for slab in self.slabs]

    def do_export(self, retained: bool) -> None:
        """Made anew by the driver, of the handle or of one found again by its mapped address."""
        handle = self.slabs[0].handle
        if retained:
            handle = self.call("MemRetainAllocationHandle", self.ranges[0].address)
        fd = self.call("MemExportToShareableHandle", handle, self.memory._fd_type, 0)
        self.outgoing = [OwnedFd(int(fd))]

    def do_adopt(self, fds: Sequence[int], size_bytes: int) -> None:
        self.slabs += [self.memory.adopt(OwnedFd(fd), size_bytes) for fd in fds]

    def do_adopt_foreign(self, what: str, size_bytes: int) -> None:
        """Offer the driver a descriptor that is no memory of a device."""
        if what == "memfd":
            fd = os.memfd_create("foreign")
            os.ftruncate(fd, size_bytes)
        elif what == "pipe":
            fd, other = os.pipe()
            os.close(other)
        else:
            fd = os.open(os.devnull, os.O_RDWR)
        self.memory.adopt(OwnedFd(fd), size_bytes).release()

    def do_check(self) -> None:
        for slab in self.slabs:
            slab.check()

    def do_release(self) -> None:
        while self.slabs:
            self.slabs.pop().release()

    # -- mappings

    def do_map(self, writable: bool, each: bool = False) -> None:
        """All in one range, or each in a range of its own."""
        for slabs in [[slab] for slab in self.slabs] if each else [self.slabs]:
            self.ranges.append(self.memory.reserve(sum(slab.size_bytes for slab in slabs)))
            self.ranges[-1].map(0, slabs, writable=writable)

    def do_unmap(self) -> None:
        while self.ranges:
            self.ranges.pop().free()

    def do_unmap_at_once(self) -> None:
        """Several mappings by one call, which the project does not rely on."""
        at = self.ranges.pop()
        self.call("MemUnmap", at.address, at.size_bytes)
        self.call("MemAddressFree", at.address, at.size_bytes)

    def do_map_part(self, size_bytes: int, offset_bytes: int) -> None:
        addresses = self.memory.reserve(size_bytes)
        try:
            handle = self.slabs[0].handle
            self.call("MemMap", addresses.address, size_bytes, offset_bytes, handle, 0)
            self.call("MemUnmap", addresses.address, size_bytes)
        finally:
            addresses.free()

    def do_set_access(self, writable: bool) -> None:
        for each in self.ranges:
            if writable:
                access = [self.memory.access(writable=True)]
                self.call("MemSetAccess", each.address, each.size_bytes, access, 1)
            else:
                each.make_read_only()

    # -- bytes

    def do_write(self, byte: int, how: str = "copy") -> None:
        """Both ends of every range: by a copy of the project's, a memset, or a kernel."""
        for each in self.ranges:
            for at in (0, each.size_bytes - PAGE):
                if how == "copy":
                    each.write(at, bytes([byte]) * PAGE)
                elif how == "memset":
                    self.memory.driver.use_context()
                    self.call("MemsetD32", each.address + at, byte * 0x01010101, PAGE // 4)
                    self.call("CtxSynchronize")
                else:
                    kernels.store(self.memory.driver, each.address + at, byte * 0x01010101)

    def do_read(self) -> list[int]:
        """Every byte value that is at the two ends of a range."""
        seen: set[int] = set()
        for each in self.ranges:
            seen |= {*each.read(0, PAGE), *each.read(each.size_bytes - PAGE, PAGE)}
        return sorted(seen)

    def do_spin(self, seconds: float) -> None:
        kernels.spin(self.memory.driver, seconds)

    def do_alias(self, span_bytes: int, piece_bytes: int) -> dict[str, Any]:
        return kernels.alias(self.memory, span_bytes, piece_bytes)

    def do_copy_speed(self, repeats: int) -> dict[str, float]:
        return kernels.copy_speed(self.memory, self.ranges[0], repeats)

    # -- the memory service

    def do_load(self, directory: str, tensors: int, tensor_bytes: int, slab_bytes: int) -> None:
        session = self._session(directory, "rw")
        assert isinstance(session, Writer)
        session.plan(tensors * tensor_bytes, tensor_bytes, slab_bytes)
        for number in range(tensors):
            session.place(f"t{number}", tensor_bytes, (tensor_bytes,), "uint8")
            if number in (0, tensors - 1):
                session.write(f"t{number}", b"\7" * PAGE)
        self.session: Reader = session.commit(IDENTITY)

    def do_attach(self, directory: str) -> dict[str, Any]:
        began = time.perf_counter()
        session = self._session(directory, "ro")
        took_ms = (time.perf_counter() - began) * 1e3
        assert isinstance(session, Reader)
        self.session = session
        return {"attach_ms": round(took_ms, 2), "slabs": len(session.slab_sizes)}

    def do_look(self) -> list[int]:
        """Byte values in the first and the last tensor, at its start."""
        tensors = self.session.tensors
        last = max(tensors.values(), key=lambda record: record.offset)
        places = self.session._attachment.range
        return sorted({*places.read(0, PAGE), *places.read(last.offset, PAGE)})

    def do_keep(self) -> None:
        self.keeper = Keeper(self.session, may_digest=lambda: False)
        self.keeper.start()

    def do_kept(self) -> str:
        return self.keeper.state

    def do_detach(self) -> None:
        self.session.close()

    def _session(self, directory: str, mode: str) -> Reader | Writer:
        return open_session(
            directory,
            self.device,
            engine=f"check-{os.getpid()}",
            incarnation=str(os.getpid()),
            mode=mode,
            identity=IDENTITY,
            wait_s=30,
            memory=self.memory,
        )

    # -- the process

    def do_keep_high(self, fds: Sequence[int]) -> None:
        """Keep a descriptor under a number above every one that CUDA has opened."""
        highest = max(int(n) for n in os.listdir("/proc/self/fd"))
        self.kept.append(os.dup2(fds[0], highest + 1, inheritable=False))
        os.close(fds[0])


def serve(sock: socket.socket, obeying: Obeying) -> None:
    """Obey until the other end closes."""
    while True:
        words, fds, _, _ = socket.recv_fds(sock, REQUEST_BYTES_MAX, FDS_MAX)
        if not words:
            return
        request = json.loads(words) | ({"fds": fds} if fds else {})
        answer: dict[str, Any] = {}
        try:
            answer["value"] = getattr(obeying, f"do_{request.pop('do')}")(**request)
        except UnderstudyError as error:
            answer["error"] = f"{error.code}: {error.message}"
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answer["calls"] = obeying.call.take() if hasattr(obeying, "call") else {}
        lent = [fd.fileno() for fd in obeying.outgoing]
        socket.send_fds(sock, [json.dumps(answer).encode()], lent)
        while obeying.outgoing:
            obeying.outgoing.pop().close()


def main() -> None:
    arm_from_environment()
    if sys.argv[3] == "witness":
        fcntl.flock(0, fcntl.LOCK_SH)  # before anything of the device is opened
    raise_fd_limit()
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        serve(sock, Obeying(sys.argv[2]))


if __name__ == "__main__":
    main()
