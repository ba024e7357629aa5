"""The process that opens CUDA for a device check and serves requests, one at a time.

Started by `remote.Peer`: `python -m hack.device.peer FD DEVICE WITNESS`. A request is one JSON
object `{"do": name, …}` with descriptors; `do_<name>` serves it. An answer has `value` or `error`.
Memory is the project's own `CudaMemory`; the driver is called directly only where it is what the
question is about.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from gms.client import Writer, messages, open_session
from gms.vmm.cuda import CudaAllocation, CudaMemory, CudaReservation
from hack.device import kernels
from plumbing.errors import UnderstudyError
from plumbing.service.process import arm_from_environment, raise_fd_limit
from plumbing.wire.fds import OwnedFd

FDS_MAX = 250  # in one message: Linux takes at most 253
REQUEST_BYTES_MAX = 64 << 10
PAGE = 4096  # bytes of each read and write
IDENTITY = {"model": "device-check", "shards": {"a": "1"}}


class Requests:
    """What this process holds, and a method for each request."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.slabs: list[CudaAllocation] = []
        self.ranges: list[CudaReservation] = []
        self.outgoing: list[OwnedFd] = []

    def do_open(self, context: bool) -> dict[str, Any]:
        self.memory = CudaMemory(self.device, context=context)
        self.driver = self.memory.driver
        return {**self.memory.facts(), "capacity_bytes": self.memory.capacity_bytes}

    # -- physical memory

    def do_create(self, size_bytes: int, count: int = 1) -> None:
        for _ in range(count):
            self.slabs.append(self.memory.create(size_bytes, "check"))

    def do_lend(self) -> None:
        """Copies of the memory's descriptors, as the service lends them."""
        self.outgoing = [slab.export(writable=False) for slab in self.slabs]

    def do_export(self) -> None:
        """A new descriptor of the first handle, made by the driver."""
        handle = self.slabs[0].handle
        fd = self.driver.call("MemExportToShareableHandle", handle, self.memory._fd_type, 0)
        self.outgoing = [OwnedFd(int(fd))]

    def do_adopt(self, fds: Sequence[int], size_bytes: int) -> None:
        self.slabs += [self.memory.adopt(OwnedFd(fd), size_bytes) for fd in fds]

    def do_release(self) -> None:
        while self.slabs:
            self.slabs.pop().release()

    # -- mappings and what they show

    def do_map(self, writable: bool) -> None:
        """All in one range."""
        self.ranges.append(self.memory.reserve(sum(slab.size_bytes for slab in self.slabs)))
        self.ranges[-1].map(0, self.slabs, writable=writable)

    def do_unmap(self) -> None:
        while self.ranges:
            self.ranges.pop().free()

    def do_set_access(self, writable: bool) -> None:
        at = self.ranges[0]
        if writable:
            access = [self.memory.access(writable=True)]
            self.driver.call("MemSetAccess", at.address, at.size_bytes, access, 1)
        else:
            at.make_read_only()

    def do_write(self, byte: int, how: str = "copy") -> None:
        at = self.ranges[0]
        if how == "copy":
            at.write(0, bytes([byte]) * PAGE)
        else:
            self.driver.use_context()
            self.driver.call("MemsetD32", at.address, byte * 0x01010101, PAGE // 4)
            self.driver.call("CtxSynchronize")

    def do_read(self) -> list[int]:
        """Every byte value in the first page."""
        return sorted(set(self.ranges[0].read(0, PAGE)))

    def do_spin(self, seconds: float) -> None:
        kernels.launch(self.driver, "spin", int(seconds * 1e9))

    # -- a process that writes until it is killed

    def do_count(self, is_kernel: bool) -> None:
        """Fill the first range with one number after the other: by a kernel that never ends, or
        (the tests' stand-in has none) by memsets of a thread."""
        at = self.ranges[0]
        if is_kernel:
            words = at.size_bytes // 4
            kernels.launch(self.driver, "count", at.address, words)
        else:
            threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        at, number = self.ranges[0], 0
        self.driver.use_context()
        while True:
            number += 1
            self.driver.call("MemsetD32", at.address, number, at.size_bytes // 4)

    def do_page(self) -> str:
        """The first page, which every round of `count` changes."""
        return self.ranges[0].read(0, PAGE).hex()

    def do_follow(self, until: str) -> dict[str, float]:
        """Read the first page again and again until the file `until` exists. Returns between which
        two instants of the monotonic clock it last changed."""
        at = self.ranges[0]
        read_s = time.monotonic()
        page = at.read(0, PAGE)
        found = {"before_s": read_s, "after_s": read_s, "reads": 0.0}
        while not os.path.exists(until):
            began_s = time.monotonic()
            now = at.read(0, PAGE)
            if now != page:
                found |= {"before_s": read_s, "after_s": time.monotonic()}
            page, read_s = now, began_s
            found["reads"] += 1
        return found

    def do_digest(self) -> str:
        """Of all that the first range contains."""
        at = self.ranges[0]
        return hashlib.sha256(at.read(0, at.size_bytes)).hexdigest()

    def do_clear(self) -> None:
        for at in self.ranges:
            at.clear()

    # -- the memory service

    def do_load(self, directory: str, slabs: int, slab_bytes: int) -> None:
        """Commit an epoch with one tensor in each slab, and be its reader."""
        request = messages.AttachMsg(
            "check", str(os.getpid()), "rw_or_ro", IDENTITY, wait_ms=30_000
        )
        writer = open_session(directory, self.device, request, memory=self.memory)
        assert isinstance(writer, Writer)
        writer.plan(slabs * slab_bytes, slab_bytes)
        for number in range(slabs):
            writer.place(f"t{number}", slab_bytes, (slab_bytes,), "uint8")
        writer.write("t0", b"\7" * PAGE)
        writer.write(f"t{slabs - 1}", b"\7" * PAGE)
        self.session = writer.commit(IDENTITY)


def serve(sock: socket.socket, requests: Requests) -> None:
    """Serve requests until the other end closes."""
    while True:
        words, fds, _, _ = socket.recv_fds(sock, REQUEST_BYTES_MAX, FDS_MAX)
        if not words:
            return
        request = json.loads(words) | ({"fds": fds} if fds else {})
        answer: dict[str, Any] = {}
        try:
            answer["value"] = getattr(requests, f"do_{request.pop('do')}")(**request)
        except UnderstudyError as error:
            answer["error"] = f"{error.code}: {error.message}"
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        lent = [fd.fileno() for fd in requests.outgoing]
        socket.send_fds(sock, [json.dumps(answer).encode()], lent)
        while requests.outgoing:
            requests.outgoing.pop().close()


def main() -> None:
    arm_from_environment()
    if sys.argv[3] == "witness":
        fcntl.flock(0, fcntl.LOCK_SH)  # before the device is opened
    raise_fd_limit()
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        serve(sock, Requests(sys.argv[2]))


if __name__ == "__main__":
    main()
