"""An engine driven by hand: a process that holds a witness, and connections under the test's
control.

For behaviour that `LockClient` never shows: disconnecting before the answer, two connections at
once, an old token. The supervisor is the test process itself, so its pidfd never becomes readable.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from typing import Any

from lockserver import witness
from lockserver.messages import CATALOGUE, BeatMsg, GrantedMsg, WantMsg
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import close_all
from tests.helpers import free_witness
from tests.lockserver.engines import spawn_backend

ANSWER_S = 30.0


class Hand:
    """One incarnation and its backend process. Use as `with`."""

    def __init__(
        self,
        directory: str,
        engine: str,
        supervisor: str | None = None,
        fate: str = "dies_with_parent",
    ) -> None:
        self.directory = directory
        self.engine = engine
        self.supervisor = supervisor or secrets.token_hex(8)
        self.incarnation = witness.new_incarnation(engine)
        self.path = free_witness(directory, self.incarnation)
        self.backend: subprocess.Popen[bytes] = spawn_backend(self.path, fate=fate)

    def connect(self) -> BlockingClient:
        return BlockingClient(os.path.join(self.directory, "lockserver.sock"), CATALOGUE)

    def want(self, *locks: str, **fields: Any) -> WantMsg:
        """Send the complete `want`: `active`, unless given otherwise."""
        truth: dict[str, Any] = {
            "supervisor": self.supervisor,
            "engine": self.engine,
            "incarnation": self.incarnation,
            "witness": os.path.basename(self.path),
            "locks": locks or ("active",),
            "tokens": {},
        }
        return WantMsg(**{**truth, **fields})

    def granted(self, client: BlockingClient) -> int:
        """The token of its own next grant; grants to others, and lent sockets, are skipped."""
        while True:
            reply = client.receive(ANSWER_S)
            close_all(reply.fds)
            message = reply.message
            if isinstance(message, GrantedMsg) and message.incarnation == self.incarnation:
                return message.token

    def beat(self, client: BlockingClient, progress: int) -> None:
        client.notify(BeatMsg(progress))

    def end(self) -> None:
        """Kill and reap the backend; repeating it is harmless."""
        self.backend.kill()
        self.backend.wait()
        assert self.backend.stdout is not None
        self.backend.stdout.close()

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
