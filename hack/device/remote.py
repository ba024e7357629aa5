"""The other end of a peer: starts the process that opens CUDA, sends it requests, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hack.device.peer import FDS_MAX
from plumbing.service.process import parent_environment
from plumbing.wire.fds import OwnedFd, close_all

ANSWER_BYTES_MAX = 64 << 10
ANSWER_S = 60.0
END_S = 20.0  # a process that had 80 GiB of a device takes seconds to exit


class PeerError(RuntimeError):
    """A peer refused, ended, or did not answer."""


class NotOffered(PeerError):
    """This driver lacks the call: the tests' stand-in has only those in use."""


class Peer:
    """One process with CUDA; `peer("create", size_bytes=…)` is `do_create` there."""

    def __init__(self, device: str, witness: str | None = None) -> None:
        """`witness`: a file on which it holds a shared lock, on descriptor 0, while it lives."""
        self._fds: list[OwnedFd] = []
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(theirs.fileno()), device, "witness" if witness else "none"]
        with theirs, open(witness or os.devnull, "rb") as stdin:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hack.device.peer", *words],
                stdin=stdin,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **parent_environment()},
            )

    def fileno(self) -> int:
        """Lend the socket, which ends with the peer."""
        return self._sock.fileno()

    def __call__(self, do: str, fds: Sequence[OwnedFd] = (), **more: Any) -> Any:
        """What it answers to this request; takes `fds`.

        Raises:
            PeerError: it refused, ended, or did not answer.
        """
        self._sock.settimeout(ANSWER_S)
        try:
            lent, request = [fd.fileno() for fd in fds], json.dumps({"do": do, **more})
            # If the peer has ended, receiving shows that.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._sock, [request.encode()], lent)
            words, received, _, _ = socket.recv_fds(self._sock, ANSWER_BYTES_MAX, FDS_MAX)
        except TimeoutError:
            raise PeerError(f"no answer to {do} in {ANSWER_S:.0f} s") from None
        except ConnectionResetError:
            words, received = b"", []
        finally:
            close_all(fds)
        if not words:
            raise PeerError(f"the process ended with {self.process.wait(END_S)}")
        self._fds = [OwnedFd(fd) for fd in received]
        reply = json.loads(words)
        if "error" in reply:
            is_missing = reply["error"].startswith("FunctionNotFoundError")
            raise (NotOffered if is_missing else PeerError)(reply["error"])
        return reply["value"]

    def attempt(self, do: str, fds: Sequence[OwnedFd] = (), **more: Any) -> str:
        """`ok`, or why not; for requests that may be refused."""
        try:
            self(do, fds, **more)
        except PeerError as error:
            return f"refused: {error}"
        return "ok"

    def lend(self, do: str = "lend") -> list[OwnedFd]:
        """The descriptors of its memory, which the caller owns."""
        self(do)
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        """End it in an orderly way, or kill it."""
        self._sock.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self._sock.close()
