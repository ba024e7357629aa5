"""The other end of a peer: starts the process that opens CUDA, tells it what to do, ends it."""

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
from understudy.service import parent
from understudy.wire.fds import OwnedFd, close_all

ANSWER_BYTES_MAX = 1 << 20
ANSWER_S = 60.0
END_S = 20.0  # a process that had 80 GiB of a device takes seconds to go


class PeerError(RuntimeError):
    """A peer refused, or ended, or said nothing."""


class NotOffered(PeerError):
    """This driver has no such call: the stand-in of the tests has only those in use."""


class Peer:
    """One process with CUDA; `peer("create", size_bytes=…)` is `do_create` there.

    `fds` are the descriptors of the last answer, `calls` what its driver calls took.
    """

    def __init__(self, device: str, witness: str | None = None) -> None:
        """`witness`: a file that it holds locked, shared, on descriptor 0, while it lives."""
        self.fds: list[OwnedFd] = []
        self.calls: dict[str, dict[str, float]] = {}
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(theirs.fileno()), device, "witness" if witness else "none"]
        with theirs, open(witness or os.devnull, "rb") as stdin:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hack.device.peer", *words],
                stdin=stdin,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **parent.environment()},
            )

    def fileno(self) -> int:
        """Lend the socket, which ends with the peer."""
        return self._sock.fileno()

    def send(self, do: str, fds: Sequence[OwnedFd] = (), **more: Any) -> None:
        """Ask without waiting; takes `fds`."""
        words = json.dumps({"do": do, **more}).encode()
        try:
            # Of a peer that has ended, the answer says how.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._sock, [words], [fd.fileno() for fd in fds])
        finally:
            close_all(fds)

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """What it says to the last request.

        Raises:
            PeerError: it refused, it ended, or nothing came.
        """
        self._sock.settimeout(timeout_s)
        try:
            words, fds, _, _ = socket.recv_fds(self._sock, ANSWER_BYTES_MAX, FDS_MAX)
        except TimeoutError:
            raise PeerError(f"no answer in {timeout_s:.0f} s") from None
        except ConnectionResetError:
            words, fds = b"", []
        if not words:
            raise PeerError(f"the process ended with {self.process.wait(END_S)}")
        self.fds = [OwnedFd(fd) for fd in fds]
        reply = json.loads(words)
        self.calls = reply["calls"]
        if "error" in reply:
            is_missing = reply["error"].startswith("FunctionNotFoundError")
            raise (NotOffered if is_missing else PeerError)(reply["error"])
        return reply["value"]

    def __call__(self, do: str, fds: Sequence[OwnedFd] = (), **more: Any) -> Any:
        self.send(do, fds, **more)
        return self.answer()

    def attempt(self, do: str, fds: Sequence[OwnedFd] = (), **more: Any) -> str:
        """`ok`, or why not; for what is expected to be refused."""
        try:
            self(do, fds, **more)
        except NotOffered as error:
            return f"skipped: {error}"
        except PeerError as error:
            return f"refused: {error}"
        return "ok"

    def take_fds(self) -> list[OwnedFd]:
        """The descriptors of the last answer, which the caller now owns."""
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        """End it in order, or else at once."""
        close_all(self.take_fds())
        self._sock.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        close_all(self.take_fds())
        self._sock.close()
