"""A process that holds device memory and does what it is told: `Holder` starts one and tells it.

create N   make N bytes and send their descriptor        import N   take the descriptor sent along
map, unmap                                               release    all that it holds
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from gms.client import memory_for
from gms.vmm.interface import Allocation
from plumbing.service.process import arm_from_environment
from plumbing.wire.fds import OwnedFd

WORD_BYTES_MAX = 100


class Holder:
    """The other end."""

    def __init__(self, device: str) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.gms.memory_process", device, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
            )

    def do(self, command: str, fd: OwnedFd | None = None) -> OwnedFd | None:
        """Send `command`, lending `fd`; what descriptor came back, if any."""
        socket.send_fds(self._sock, [command.encode()], [fd.fileno()] if fd else [])
        answer, fds, _, _ = socket.recv_fds(self._sock, WORD_BYTES_MAX, 1)
        assert answer == b"ok", f"{command}: the holder ended with {self.process.wait()}"
        return OwnedFd(fds[0]) if fds else None

    def kill(self) -> None:
        self._sock.close()
        self.process.kill()
        self.process.wait()


def main() -> None:
    arm_from_environment()
    memory = memory_for(sys.argv[1])
    slabs: list[Allocation] = []
    reservation = None
    with socket.socket(fileno=int(sys.argv[2])) as sock:
        while True:
            words, fds, _, _ = socket.recv_fds(sock, WORD_BYTES_MAX, 1)
            if not words:
                return
            word, *rest = words.decode().split()
            answer: list[OwnedFd] = []
            if word == "create":
                slabs.append(memory.create(int(rest[0]), "t"))
                answer = [slabs[-1].export(writable=True)]
            elif word == "import":
                slabs.append(memory.adopt(OwnedFd(fds[0]), int(rest[0])))
            elif word == "map":
                reservation = memory.reserve(sum(slab.size_bytes for slab in slabs))
                reservation.map(0, slabs, writable=False)
            elif word == "unmap" and reservation is not None:
                reservation.free()
            elif word == "release":
                while slabs:
                    slabs.pop().release()
            socket.send_fds(sock, [b"ok"], [fd.fileno() for fd in answer])
            for each in answer:
                each.close()


if __name__ == "__main__":
    main()
