"""The smallest clients that can hold a lock: of our server, Redis and etcd.

For measuring only: no reconnects, no clusters, one thread for each object. They import little,
because a process takes longer to die the more memory it has.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

import msgpack

from plumbing.part.paths import lockserver_socket

TYPE_CHECKING = False  # importing typing costs 1 MiB
if TYPE_CHECKING:
    from typing import Any

BEAT_S = 0.5  # lockserver.client.HEARTBEAT_MS
HEADER = struct.Struct(">4sBBHI")  # plumbing/wire/frames.py

REDIS_PX_MS = 10_000  # the usual lifetime of a lock there; renewed at a third of it
REDIS_RETRY_S = 0.1  # redis-py's Lock: sleep=0.1
IF_MINE = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call(%s) end return 0"
RENEW = IF_MINE % "'pexpire',KEYS[1],ARGV[2]"
RELEASE = IF_MINE % "'del',KEYS[1]"

ETCD_TTL_S = 10  # etcdctl lock --ttl, its default
TIMEOUT_S = 120.0  # longer than any wait that is measured


class LockServerClient:
    """Our own protocol over its Unix socket, as a supervisor that is its own backend."""

    def __init__(self, directory: str, engine: str) -> None:
        self.directory, self.engine = directory, engine
        self._supervisor = os.urandom(8).hex()
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(lockserver_socket(directory))
        self._sock.settimeout(BEAT_S)
        self._received, self._progress = b"", 0
        self.incarnation = self.witness = ""

    def launch(self) -> int:
        """Start a new incarnation; the returned descriptor holds its witness."""
        random = os.urandom(8).hex()
        self.incarnation, self.witness = (
            f"{self.engine}-{random}",
            f"witness_{self.engine}_{random}",
        )
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        fd = os.open(os.path.join(self.directory, self.witness), flags, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def want(self, *locks: str, **tokens: int) -> None:
        """Send this supervisor's whole state; without an incarnation, its processes are reaped."""
        self._send(
            type="want",
            supervisor=self._supervisor,
            engine=self.engine,
            incarnation=self.incarnation or None,
            witness=self.witness or None,
            locks=locks,
            tokens=tokens,
        )

    def receive(self) -> dict[str, Any]:
        """The next message; sends heartbeats while there is none.

        Raises:
            OSError: the connection has ended, or the server refuses.
        """
        while True:
            if len(self._received) >= HEADER.size:
                end = HEADER.size + HEADER.unpack_from(self._received)[4]
                if len(self._received) >= end:
                    raw, self._received = self._received[HEADER.size : end], self._received[end:]
                    message: dict[str, Any] = msgpack.unpackb(raw)
                    if message["type"] == "error":
                        raise OSError(f"{message['code']}: {message['message']}")
                    return message
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(65536)
        except TimeoutError:
            self._progress += 1
            self._send(type="beat", progress=self._progress)
            return
        if not data:
            raise OSError("the lock server has closed the connection")
        self._received += data

    def _send(self, **message: Any) -> None:
        payload = msgpack.packb({"id": 0, **message})
        self._sock.sendall(HEADER.pack(b"USDY", 1, 0, 0, len(payload)) + payload)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


class Redis:
    """RESP over one TCP connection (redis.io/docs/reference/protocol-spec)."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = self._sock.makefile("rb")

    def __call__(self, *words: str | int) -> Any:
        """One command: str, int or None."""
        parts = [str(word).encode() for word in words]
        request = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        self._sock.sendall(b"*%d\r\n%s" % (len(parts), request))
        return self._reply()

    def _reply(self) -> Any:
        line = self._replies.readline()
        kind, rest = line[:1], line[1:].strip()
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest.decode()
        if kind == b"$":
            return None if rest == b"-1" else self._replies.read(int(rest) + 2)[:-2].decode()
        raise OSError(f"redis: {line!r}")

    def ping(self) -> None:
        self("PING")

    def try_acquire(self, key: str, owner: str) -> bool:
        return self("SET", key, owner, "NX", "PX", REDIS_PX_MS) is not None

    def renew(self, key: str, owner: str) -> None:
        self("EVAL", RENEW, 1, key, owner, REDIS_PX_MS)

    def release(self, key: str, owner: str) -> None:
        self("EVAL", RELEASE, 1, key, owner)

    def close(self) -> None:
        self._replies.close()
        self._sock.close()


class Etcd:
    """etcd's JSON gateway over one persistent connection."""

    def __init__(self, port: int) -> None:
        import http.client  # 5 MiB that only this one needs
        import json

        self._json = json
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)

    def __call__(self, path: str, **body: Any) -> dict[str, Any]:
        self._http.request("POST", f"/v3/{path}", self._json.dumps(body))
        with self._http.getresponse() as response:
            text = response.read()
            if response.status != 200:
                raise OSError(f"etcd: {path}: {text!r}")
        answer: dict[str, Any] = self._json.loads(text)
        return answer

    def ping(self) -> None:
        self("maintenance/status")

    def lease(self) -> str:
        return str(self("lease/grant", TTL=ETCD_TTL_S)["ID"])

    def keep_alive(self, lease: str) -> None:
        self("lease/keepalive", ID=lease)

    def acquire(self, name: str, lease: str) -> str:
        """Acquire with etcd's own lock service (the oldest key wins, the others watch); its key."""
        return str(self("lock/lock", name=_b64(name), lease=lease)["key"])

    def release(self, key: str) -> None:
        self("lock/unlock", key=key)

    def close(self) -> None:
        self._http.close()


def _b64(text: str) -> str:
    import base64

    return base64.b64encode(text.encode()).decode()
