"""A proxy between a client and a device's server that counts frames and descriptors.

A directory of its own, with the proxy's socket under the server's name and links to the server's
other files: the client cannot tell it from the real one, and every frame that it sends or is sent
is taken apart by the wire's own decoder and put together again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator

from gms import names
from gms.messages import CATALOGUE
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import FrameDecoder, encode_frame
from plumbing.wire.limits import FDS_PER_FRAME_MAX


class CountingProxy:
    """`asked` and `answered` count frames by type; `fds` are those of each answer, in order."""

    def __init__(self, real: str, device: str) -> None:
        self.directory = tempfile.mkdtemp(prefix="gms-")
        for name in os.listdir(real):
            if not name.endswith((".sock", ".lock")):
                os.symlink(f"{real}/{name}", f"{self.directory}/{name}")
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.fds: list[int] = []
        self._target = names.socket_path(real, device)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(names.socket_path(self.directory, device))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        """One connection, then the end."""
        client, _ = self._listener.accept()
        with client, socket.socket(socket.AF_UNIX) as server:
            server.connect(self._target)
            back = threading.Thread(target=self._pump, args=(server, client, self.answered))
            back.start()
            self._pump(client, server, self.asked)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket, count: Counter[str]) -> None:
        decoder = FrameDecoder(CATALOGUE.frame_bytes_max)
        with contextlib.suppress(OSError):
            while True:
                data, sent, flags, _ = socket.recv_fds(source, 65536, 253)
                assert not flags & socket.MSG_CTRUNC
                if not data:
                    break
                for frame in decoder.receive(data, [OwnedFd(fd) for fd in sent]):
                    message, _ = CATALOGUE.decode(frame.payload, len(frame.fds))
                    count[message.TYPE] += 1
                    if count is self.answered:
                        self.fds.append(len(frame.fds))
                    self._send(
                        target, encode_frame(frame.payload, len(frame.fds), 2**24), frame.fds
                    )
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        decoder.close()

    @staticmethod
    def _send(target: socket.socket, data: bytes, fds: list[OwnedFd]) -> None:
        assert len(fds) <= FDS_PER_FRAME_MAX
        try:  # the other end may have what it wanted and be gone
            sent = socket.send_fds(target, [data], [fd.fileno() for fd in fds])
            target.sendall(data[sent:])
        finally:
            close_all(fds)

    def close(self) -> None:
        self._thread.join(20)
        self._listener.close()
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def counting_proxy(real: str, device: str) -> Iterator[CountingProxy]:
    proxy = CountingProxy(real, device)
    try:
        yield proxy
    finally:
        proxy.close()
