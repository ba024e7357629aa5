"""One device's server as its supervisor sees it: its process, its answers, its last status.

A server that hangs is killed: its memory lives on in its readers, and a restarted server is better
than one that never answers newcomers. But only for its own silence: not while it waits for a CPU
(`plumbing.pod.supervision`), nor while this process has no descriptor left to ask with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from gms import messages as msg
from gms import names
from gms.server.metrics import ChildMetrics
from plumbing.errors import UnderstudyError
from plumbing.pod.child_process import ChildProcess
from plumbing.pod.supervision import CpuTimes, Restarts, Silence
from plumbing.service import procfs
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.wire import sockets
from plumbing.wire.connection import Connection, connect
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import HelloMsg, Message, WelcomeMsg

PING_S = 1.0
SILENT_MS = 5000.0  # several pings: a server that is silent for longer is not ready
# While a server starts: newcomers wait for the first answer, and its events are lost if it dies
# before we watch it.
FIRST_PING_S = 0.005
PING_GROWTH = 1.1  # fewer questions during a long start: many servers start at once on few CPUs
LOOK_EVERY_MS = 100.0  # at how long it has been silent, and why
FINAL_READ_S = 1.0  # to read what a dead server has sent: it has all arrived already
# Driver calls and fsyncs run on threads, so a loop that could run and did not for half a minute
# never will.
HANG_MS = 30_000.0

logger = logging.getLogger(__name__)


class Child:
    """One device's server process and its last status. The handler of its pings."""

    def __init__(
        self,
        device: str,
        path: str,
        clock: Clock,
        metrics: ChildMetrics,
        log: EventLog,
        tag: str = names.WEIGHTS,
    ) -> None:
        self.device, self.path, self.tag = device, path, tag
        self.restarts = Restarts()
        self.process: ChildProcess | None = None
        self.answered_ms: float | None = None  # None: this process has not answered yet
        self.started_ms = 0.0
        self.problem: str | None = None  # why there is no server, until one answers
        self.on_recovery: Callable[[], None] = lambda: None  # `problem` is over
        self.is_killed_for_silence = False
        self.settled = asyncio.Event()  # it has answered once, or has failed
        self._cannot_ask: str | None = None
        self._silence, self._looked_ms = Silence(), 0.0
        self._document: dict[str, Any] | None = None
        self._clock, self.metrics, self._log = clock, metrics, log
        self._conn: Connection | None = None
        self._relayed_id = 0  # of this process's events: those up to here are in our log
        self._closed = asyncio.Event()

    @property
    def what(self) -> str:
        """`the server of HOST-0`, for sentences."""
        kind = "server" if self.tag == names.WEIGHTS else "KV server"
        return f"the {kind} of {self.device}"

    @property
    def is_dispensable(self) -> bool:
        """Whether weights are served without it, however often it dies."""
        return self.tag != names.WEIGHTS or names.is_offload(self.device)

    @property
    def is_answering(self) -> bool:
        return self.answered_ms is not None

    @property
    def is_responsive(self) -> bool:
        """Whether it has answered lately: a hanging server does not serve newcomers."""
        return self.answered_ms is not None and self._clock.now_ms() - self.answered_ms < SILENT_MS

    def status(self) -> dict[str, Any]:
        """The server's own document, or state `down`."""
        base = {"online": self.is_responsive, "restarts_total": self.restarts.deaths_total}
        if self._document is None or not self.is_answering:
            down = {"device_uuid": self.device, "tag": self.tag, "state": "down", **base}
            return {**down, "problem": self.trouble}
        problem = self.trouble or self._document.get("problem")
        return {**self._document, **base, "problem": problem}

    @property
    def trouble(self) -> str | None:
        """Why the server does not answer, as far as this process knows."""
        return self.problem or self._cannot_ask

    def begin(self, process: ChildProcess) -> None:
        """`process` serves the device from now on."""
        self.process, self.started_ms = process, self._clock.now_ms()
        self.answered_ms, self._relayed_id = None, 0
        self.is_killed_for_silence = False
        self._silence, self._looked_ms = Silence(), self.started_ms

    async def ping(self) -> None:
        """Ping the server while it runs; kill it when it hangs."""
        first_s = FIRST_PING_S
        while True:
            await self._ask()
            await asyncio.sleep(PING_S if self.is_answering else first_s)
            first_s = min(first_s * PING_GROWTH, LOOK_EVERY_MS / 1000)
            self._look()
            if self._silence.ms > HANG_MS and self.process is not None:
                self.is_killed_for_silence = True
                self.process.kill()
                return

    async def _ask(self) -> None:
        try:
            if self._conn is None or self._conn.is_closed:
                self._conn = await connect(self.path, msg.CATALOGUE, self, deadline_s=PING_S)
                self._conn.send(HelloMsg(), 1)  # first: it names the pid
                self._conn.send(msg.WatchMsg(since=self._relayed_id), 2)
            elif self.is_answering:
                self._conn.send(HelloMsg(), 1)
                self._conn.send(msg.StatusMsg(), 2)
            self._cannot_ask = None
        except OSError as error:
            self._cannot_ask = sockets.no_descriptors(f"ask {self.device}", error).message
        except UnderstudyError as error:
            is_ours = error.code == "wire.no_descriptors"
            self._cannot_ask = error.message if is_ours else None
            logger.debug("%s does not answer yet: %s", self.device, error)

    def _look(self) -> None:
        """Count how long the server has been silent, unless it was not asked."""
        now_ms = self._clock.now_ms()
        elapsed_ms = now_ms - self._looked_ms
        if elapsed_ms < LOOK_EVERY_MS or self.process is None:
            return
        self._looked_ms = now_ms
        if self._cannot_ask is not None:
            return
        found = procfs.cpu_times(self.process.pid)
        self._silence.look(elapsed_ms, None if found is None else CpuTimes(*found))

    async def read_out(self) -> None:
        """The process is gone; read what it had sent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_READ_S):
                while self._conn is not None and not self._conn.is_closed:
                    self._closed.clear()
                    await self._closed.wait()

    def end(self) -> None:
        """The process is gone: its status is void."""
        self.answered_ms = None
        if self._conn is not None:
            self._conn.close("the server is gone")

    def opened(self, conn: Connection) -> None: ...

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        if isinstance(message, WelcomeMsg):
            if self.process is None or message.pid != self.process.pid:
                conn.close("the previous server answered, which is exiting")
            else:
                self.answered_ms = self._clock.now_ms()
                self.settled.set()
                self._silence.answered()
                if self.problem is not None:
                    self.problem = None
                    self.on_recovery()
        elif isinstance(message, msg.StatusReplyMsg):
            self._document = message.document
            self.metrics.update(message.document)
        elif isinstance(message, msg.EventMsg):
            self._relay(message.record)

    def closed(self, conn: Connection, reason: str) -> None:
        self._closed.set()

    def _relay(self, record: Mapping[str, Any]) -> None:
        missed = record["id"] - self._relayed_id - 1
        self._relayed_id = record["id"]
        about = {"device_uuid": self.device}
        if self.tag != names.WEIGHTS:
            about["tag"] = self.tag
        if missed:  # our connection was gone for longer than the server keeps events
            message = f"{missed} events of {self.what} were missed"
            self._log.record("gms.events_missed", message, "warning", {**about, "missed": missed})
        self._log.relay(record, about)
