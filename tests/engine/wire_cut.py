"""A TCP proxy that can stop forwarding: what a partition looks like to both ends."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

CHUNK_BYTES = 65_536
POLL_S = 0.005


class Proxy:
    """Forwards to `target` until `cut`; then nothing passes, without any notice. Connections
    stay open and new ones are taken, as by a network that drops packets."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lost: list[socket.socket] = []  # taken while cut: never to be heard
        self._is_cut = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        self._is_cut.set()

    def reconnect(self) -> None:
        """New connections come through; those from before the cut are dead, and now say so."""
        self._is_cut.clear()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(30)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            was_cut = False
            while not self._is_closed.is_set():
                ready = selector.select(POLL_S)
                is_cut = self._is_cut.is_set()
                if was_cut and not is_cut:
                    self._drop_all(selector)
                was_cut = is_cut
                for key, _ in ready:
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is self._listener:
                        self._accept(selector, is_cut=is_cut)
                    elif not is_cut and sock in self._pairs:
                        self._forward(selector, sock)
                if is_cut:
                    self._is_closed.wait(POLL_S)  # what is readable stays so
            self._drop_all(selector)
            self._listener.close()

    def _accept(self, selector: selectors.BaseSelector, *, is_cut: bool) -> None:
        near, _ = self._listener.accept()
        if is_cut:
            self._lost.append(near)
            return
        try:
            far = socket.create_connection(self._target, timeout=10)
        except OSError:
            near.close()
            return
        for sock, other in ((near, far), (far, near)):
            self._pairs[sock] = other
            selector.register(sock, selectors.EVENT_READ)

    def _forward(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        other = self._pairs[sock]
        try:
            data = sock.recv(CHUNK_BYTES)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        self._drop(selector, sock)

    def _drop(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        for each in (sock, self._pairs.pop(sock)):
            self._pairs.pop(each, None)
            with contextlib.suppress(KeyError):
                selector.unregister(each)
            each.close()

    def _drop_all(self, selector: selectors.BaseSelector) -> None:
        while self._pairs:
            self._drop(selector, next(iter(self._pairs)))
        for sock in self._lost:
            sock.close()
        self._lost.clear()
