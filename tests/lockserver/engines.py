"""Stand-ins for engines: a real supervisor connection over real processes that hold a witness.

Also a program, `python -m tests.lockserver.engines DIR ENGINE MIB FATE`: a supervisor in its own
process, which writes the messages it receives to stdout as JSON lines and can be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from lockserver import witness
from lockserver.client.client import LockClient
from lockserver.messages import HandOverMsg
from plumbing.errors import UnderstudyError
from plumbing.service import procfs
from plumbing.wire import peer
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from tests.helpers import auntil

BACKEND = """
import ctypes, signal, sys
if sys.argv[3] == "dies_with_parent":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
from lockserver.witness import join
join(sys.argv[1])
dirty = b"x" * (int(sys.argv[2]) << 20)
print("ready", flush=True)
signal.pause()
"""


def spawn_backend(
    path: str, dirty_mib: int = 0, fate: str = "dies_with_parent"
) -> subprocess.Popen[bytes]:
    """A process that holds the witness at `path`; returns once it does."""
    backend = subprocess.Popen(
        [sys.executable, "-c", BACKEND, path, str(dirty_mib), fate], stdout=subprocess.PIPE
    )
    assert backend.stdout is not None
    assert backend.stdout.readline() == b"ready\n"
    return backend


@contextlib.asynccontextmanager
async def running(client: Any) -> AsyncIterator[Any]:
    """A client that keeps its connection while the block lasts."""
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class HearingClient(LockClient):
    """A client that keeps what it hears, in order: `granted`, `lost`, … and what came with it."""

    def __init__(self, address: str, **more: Any) -> None:
        self.told: list[tuple[str, Any]] = []
        super().__init__(address, **more)

    def heard(self, what: str) -> list[Any]:
        return [value for key, value in self.told if key == what]

    def granted(self, incarnation: str, token: int) -> None:
        self.told.append(("granted", (self.lock, incarnation, token)))

    def service(self, address: str) -> None:
        self.told.append(("service", address))

    def begin(self, conn: Connection) -> None:
        super().begin(conn)
        self.told.append(("connected", None))

    def lose(self, reason: str) -> None:
        super().lose(reason)
        self.told.append(("lost", reason))

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        self.told.append(("refused", error.code))

    def hand_over(self, message: HandOverMsg) -> None:
        self.told.append(("hand_over", message))

    def lease_lost(self, reason: str) -> None:
        self.told.append(("lease_lost", reason))


class SupervisorClient(HearingClient):
    """... and shows its supervisor each grant first."""

    def __init__(self, of: Engine, address: str, **more: Any) -> None:
        self.of = of
        super().__init__(address, **more)

    def granted(self, incarnation: str, token: int) -> None:
        if self.of.on_granted is not None:
            self.of.on_granted(incarnation, token)
        super().granted(incarnation, token)
        self.of.hold_on(incarnation, token)


class Engine:
    """A supervisor with a backend tree. Use as `async with`."""

    def __init__(
        self, directory: str, engine: str, supervisor: str | None = None, **more: Any
    ) -> None:
        """`more`: as of `LockClient`, which has a default for `address` here."""
        self.directory = directory
        self.backends: list[subprocess.Popen[bytes]] = []
        self.incarnation: str | None = None
        self.witness: str | None = None
        self.continuation = ""
        self.client = SupervisorClient(
            self,
            more.pop("address", os.path.join(directory, "lockserver.sock")),
            engine=engine,
            supervisor=supervisor,
            heartbeat_ms=50,
            **more,
        )
        self.on_granted: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def heard(self) -> list[tuple[str, str, int]]:
        """The grants."""
        return self.client.heard("granted")

    @property
    def refused(self) -> list[str]:
        return self.client.heard("refused")

    @property
    def connects(self) -> int:
        return len(self.client.heard("connected"))

    def hold_on(self, incarnation: str, token: int) -> None:
        if incarnation == self.incarnation:
            self.want(self.client.lock, token=token)

    def launch(self, processes: int = 1, dirty_mib: int = 0, fate: str = "dies_with_parent") -> str:
        self.incarnation = witness.new_incarnation(self.client.engine)
        self.witness, held = witness.create(self.directory, self.incarnation)
        self.backends = [spawn_backend(self.witness, dirty_mib, fate) for _ in range(processes)]
        os.close(held)  # a server may remove a witness that nobody holds
        return self.incarnation

    def want(self, lock: str | None = None, *, token: int = 0) -> None:
        """`lock`: the one that is wanted, if any is."""
        assert lock in (None, self.client.lock)
        is_wanted, continuation = lock is not None, self.continuation
        self.client.set_want(
            self.incarnation, is_wanted=is_wanted, token=token, continuation=continuation
        )

    def reap(self) -> None:
        for backend in self.backends:
            backend.kill()
            backend.wait()
            assert backend.stdout is not None
            backend.stdout.close()
        self.backends.clear()

    def relent(self) -> None:
        """What a supervisor sends once its tree is reaped."""
        self.incarnation = self.witness = None
        self.want()

    def token(self) -> int:
        mine = [token for _, who, token in self.heard if who == self.incarnation]
        return mine[-1] if mine else 0

    async def granted(self) -> int:
        return await auntil(self.token, f"{self.client.engine} to be granted its lock")

    async def hold(self) -> int:
        """Launch, request the lock and wait for the grant; returns its token."""
        self.launch()
        self.want(self.client.lock)
        return await self.granted()

    async def stand_by(self) -> None:
        """Launch, request `active`, and wait for the first message that names the holder."""
        self.launch()
        self.want("active")
        await auntil(lambda: self.heard, f"{self.client.engine} to hear who is active")

    async def __aenter__(self) -> Engine:
        self._task = asyncio.create_task(self.client.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.disconnect()
        self.reap()

    async def disconnect(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None


class EngineProcess:
    """An `Engine` in its own process, with the pids and pidfds of its whole tree."""

    def __init__(
        self,
        directory: str,
        engine: str,
        dirty_mib: int = 0,
        fate: str = "dies_with_parent",
        under: Sequence[str] = (),
    ) -> None:
        """`under` is a command that runs the supervisor, for example in its own PID namespace; pids
        are those seen from here."""
        self.process = subprocess.Popen(
            [*under, sys.executable, "-m", __name__, directory, engine, str(dirty_mib), fate],
            stdout=subprocess.PIPE,
        )
        self.pidfds: list[OwnedFd] = []
        try:
            started = self.line()
            self.incarnation: str = started["incarnation"]
            supervisor = self.process.pid if not under else procfs.children(self.process.pid)[0]
            self.pids: list[int] = [supervisor, *procfs.children(supervisor)]
            assert len(self.pids) == 1 + len(started["backends"])
            self.pidfds += [OwnedFd(os.pidfd_open(pid)) for pid in self.pids]
        except BaseException:
            self.process.kill()
            self.close()
            raise

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        document: dict[str, Any] = json.loads(self.process.stdout.readline())
        return document

    def granted(self) -> int:
        """Its own next grant of `active`; blocks until then."""
        while True:
            heard = self.line()
            if heard.get("who") == self.incarnation:
                return int(heard["token"])

    def is_gone(self) -> bool:
        """Whether none of them has memory or a descriptor any more. A dying process has released
        both, its witness among them, a moment before its pidfd is readable."""
        return all(
            peer.is_gone(pidfd.fileno()) or procfs.is_spent(pid)
            for pid, pidfd in zip(self.pids, self.pidfds, strict=False)
        )

    def signal(self, number: int, *, tree: bool) -> None:
        for pidfd in self.pidfds if tree else self.pidfds[:1]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd.fileno(), number)

    def close(self) -> None:
        """End the whole tree; repeating it is harmless."""
        self.signal(signal.SIGKILL, tree=True)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pidfd in self.pidfds:
            pidfd.close()
        self.pidfds.clear()


async def _main(directory: str, name: str, dirty_mib: int, fate: str) -> None:
    engine = Engine(directory, name)

    def tell(incarnation: str, token: int) -> None:
        line = {"who": incarnation, "token": token, "mono_ms": time.monotonic() * 1000}
        print(json.dumps(line), flush=True)

    engine.on_granted = tell
    incarnation = engine.launch(processes=2, dirty_mib=dirty_mib, fate=fate)
    pids = [backend.pid for backend in engine.backends]
    print(json.dumps({"incarnation": incarnation, "backends": pids}), flush=True)
    engine.want("active")
    async with engine:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
