"""A process of an engine that hands over in place: it joins, uses, stops and leaves as it is told.

A program, `python -m tests.lockserver.serving_worker WITNESS SERVING DEV INO USED`: commands are
lines on descriptor 3, answers lines on stdout. To use is to lock USED alone, so two terms that use
it at once are seen by the kernel, whatever the lock server believes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from typing import IO

from lockserver import serving, witness
from lockserver.core.names import ServingFile
from plumbing.errors import UnderstudyError

PR_SET_PDEATHSIG = 1


class ServingWorker:
    """One such process, from the side of its supervisor."""

    def __init__(self, witness_path: str, path: str, file: ServingFile, used: str) -> None:
        end, self._write = os.pipe()
        args = (witness_path, path, str(file.dev), str(file.ino), used, str(end))
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, *args], stdout=subprocess.PIPE, pass_fds=[end]
        )
        os.close(end)
        assert self._out.readline() == b"ready\n"

    @property
    def _out(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def order(self, line: str) -> None:
        os.write(self._write, line.encode() + b"\n")

    def answer(self) -> str:
        return self._out.readline().decode().strip()

    def ask(self, line: str) -> str:
        self.order(line)
        return self.answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self._out.close()
        os.close(self._write)


def _main(witness_path: str, path: str, dev: int, ino: int, used: str, orders: int) -> None:
    witness.join(witness_path)
    seat = serving.ServingSeat(path, ServingFile(os.path.basename(path), dev, ino))
    device = os.open(used, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    print("ready", flush=True)
    for line in os.fdopen(orders):
        what, _, token = line.strip().partition(" ")
        answer = what
        if what == "wake":
            try:
                seat.join(int(token))
                fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except UnderstudyError as error:
                answer = error.code
            except BlockingIOError:
                answer = "another term uses it"
        elif what == "stop":
            fcntl.flock(device, fcntl.LOCK_UN)
        elif what == "leave":
            seat.leave()
        elif what == "fork":
            if os.fork():
                continue
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            print(answer, flush=True)  # the child does: it is sure to die with its parent now
            signal.pause()
        print(answer, flush=True)


if __name__ == "__main__":
    args = sys.argv[1:]
    _main(args[0], args[1], int(args[2]), int(args[3]), args[4], int(args[5]))
