"""`gms serve`: one server process per device, started, watched, and restarted in place.

It relays the servers' events, so that one address serves all devices. It holds no memory and
decides nothing about it. The servers die with it (PDEATHSIG), so none is ever left unwatched. A
server that does not answer is killed: its memory lives on in its readers, and a restarted server is
better than one that never answers newcomers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gms import messages as msg
from gms import names
from gms.core.restart import GiveUp, Restarts
from gms.server.metrics import GmsMetrics
from plumbing.errors import UnreachableError
from plumbing.part.format import duration
from plumbing.service.clock import Clock, SystemClock
from plumbing.service.events import EventLog
from plumbing.service.http import HttpServer, Probe
from plumbing.service.process import parent_environment
from plumbing.service.signals import SignalInbox
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import HelloMsg, Message, WelcomeMsg
from plumbing.wire.server import PathGuard
from plumbing.wire.unix_connection import connect

PING_S = 1.0
SILENT_MS = 5000.0  # several pings: a server that is silent for longer is not ready
# While a server starts: newcomers wait for the first answer, and its events are lost if it dies
# before we watch it.
FIRST_PING_S = 0.005
FINAL_READ_S = 1.0  # to read what a dead server has sent: it has all arrived already
# A loaded machine stalls a loop for seconds, never for half a minute.
HANG_MS = 30_000.0
STOP_S = 5.0  # for a server to exit by itself; it has nothing to save

logger = logging.getLogger(__name__)


class Child:
    """One device's server process and its last status. The handler of its pings."""

    def __init__(
        self, device: str, path: str, clock: Clock, metrics: GmsMetrics, log: EventLog
    ) -> None:
        self.device, self.path = device, path
        self.restarts = Restarts()
        self.process: asyncio.subprocess.Process | None = None
        self.answered_ms: float | None = None  # None: this process has not answered yet
        self.started_ms = 0.0
        self._document: dict[str, Any] | None = None
        self._clock, self._metrics, self._log = clock, metrics, log
        self._conn: Connection | None = None
        self._relayed_id = 0  # of this process's events: those up to here are in our log
        self._closed = asyncio.Event()

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
            return {"device_uuid": self.device, "tag": names.WEIGHTS, "state": "down", **base}
        return {**self._document, **base}

    def begin(self, process: asyncio.subprocess.Process) -> None:
        """`process` serves the device from now on."""
        self.process, self.started_ms = process, self._clock.now_ms()
        self.answered_ms, self._relayed_id = None, 0

    async def ping(self) -> None:
        """Ping the server while it runs; kill it when it hangs."""
        while True:
            try:
                if self._conn is None or self._conn.is_closed:
                    self._conn = await connect(self.path, msg.CATALOGUE, self, deadline_s=PING_S)
                    self._conn.send(HelloMsg(), 1)  # first: it names the pid
                    self._conn.send(msg.WatchMsg(since=self._relayed_id), 2)
                elif self.is_answering:
                    self._conn.send(HelloMsg(), 1)
                    self._conn.send(msg.StatusMsg(), 2)
            except UnreachableError as error:
                logger.debug("%s does not answer yet: %s", self.device, error)
            await asyncio.sleep(PING_S if self.is_answering else FIRST_PING_S)
            silent_ms = self._clock.now_ms() - (self.answered_ms or self.started_ms)
            if silent_ms > HANG_MS and self.process is not None:
                logger.error("the server of %s is silent for %d s", self.device, silent_ms // 1000)
                self.process.kill()
                return

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
        elif isinstance(message, msg.StatusReplyMsg):
            self._document = message.document
            self._metrics.update(message.document)
        elif isinstance(message, msg.EventMsg):
            self._relay(message.record)

    def closed(self, conn: Connection, reason: str) -> None:
        self._closed.set()

    def _relay(self, record: Mapping[str, Any]) -> None:
        missed = record["id"] - self._relayed_id - 1
        self._relayed_id = record["id"]
        about = {"device_uuid": self.device}
        if missed:  # our connection was gone for longer than the server keeps events
            message = f"{missed} events of the server of {self.device} were missed"
            self._log.record("gms.events_missed", message, "warning", {**about, "missed": missed})
        self._log.relay(record, about)


class GmsSupervisor:
    """Runs the servers of `devices`.

    `command(device)` starts one; `environment(device)` is added to our own environment for it.
    """

    def __init__(
        self,
        directory: str,
        devices: Sequence[str],
        command: Callable[[str], Sequence[str]],
        *,
        http_host: str,
        http_port: int,
        environment: Callable[[str], Mapping[str, str]] = lambda device: {},
        clock: Clock | None = None,
    ) -> None:
        self.directory = directory
        self.clock = clock or SystemClock()
        self.log = EventLog("gms", self.clock)
        self.metrics = GmsMetrics(devices, names.WEIGHTS)
        self.log.subscribe(self.metrics.count)
        self._command, self._environment = command, environment
        self.children = [
            Child(device, names.socket_path(directory, device), self.clock, self.metrics, self.log)
            for device in devices
        ]
        self.http = HttpServer(
            http_host,
            http_port,
            probes={"startup": self._startup, "live": self._live, "ready": self._startup},
            status=self.status,
            metrics=self.metrics.metrics,
            events=self.log,
        )
        self._exit_code: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT (0), or until a server keeps dying (its exit code).

        Raises:
            UnderstudyError: another supervisor has the directory; the port is in use.
        """
        guard_path = os.path.join(self.directory, "gms.lock")
        with contextlib.closing(PathGuard(guard_path, f"gms in {self.directory}")):
            self._exit_code = asyncio.get_running_loop().create_future()
            inbox = SignalInbox()
            await self.http.start()
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(self._keep(child)) for child in self.children]
                    signals = tasks.create_task(self._await_signal(inbox))
                    code = await self._exit_code
                    for task in (*running, signals):
                        task.cancel()
            finally:
                await self._stop_children()
                await self.http.stop()
                inbox.close()
            return code

    def status(self) -> dict[str, Any]:
        """`{schema, as_of_event_id, devices: […]}`, as of the last ping."""
        return {
            "schema": 1,
            "as_of_event_id": self.log.last_id,
            "pid": os.getpid(),
            "devices": [child.status() for child in self.children],
        }

    async def _keep(self, child: Child) -> None:
        """Start a server, wait for its end, restart it, until it keeps dying."""
        while True:
            child.begin(
                await asyncio.create_subprocess_exec(
                    *self._command(child.device),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, **self._environment(child.device), **parent_environment()},
                )
            )
            assert child.process is not None
            async with asyncio.TaskGroup() as tasks:
                pinging = tasks.create_task(child.ping())
                returncode = await child.process.wait()
                pinging.cancel()
            await child.read_out()
            had_answered = child.is_answering
            child.end()
            lived_ms = self.clock.now_ms() - child.started_ms
            verdict = child.restarts.died(lived_ms, returncode, had_answered=had_answered)
            how = signal.Signals(-returncode).name if returncode < 0 else f"code {returncode}"
            ended = f"the server of {child.device} ended ({how}) after {duration(lived_ms)}"
            data = {"device_uuid": child.device, "returncode": returncode}
            if isinstance(verdict, GiveUp):
                ended += f"; giving up after {child.restarts.deaths} short runs in a row"
                self.log.record("gms.child_exit", ended, "error", data)
                self._end(verdict.exit_code)
                return
            ended += f"; restarting it in {duration(verdict.delay_ms)}"
            self.log.record("gms.child_exit", ended, "warning", data)
            self.metrics.restarted(child.device)
            await asyncio.sleep(verdict.delay_ms / 1000)

    async def _await_signal(self, inbox: SignalInbox) -> None:
        signum = await inbox.get()
        self.log.record("gms.stopping", f"stopping: {signal.Signals(signum).name}")
        self._end(0)

    def _end(self, code: int) -> None:
        if self._exit_code is not None and not self._exit_code.done():
            self._exit_code.set_result(code)

    async def _stop_children(self) -> None:
        alive = [c.process for c in self.children if c.process and c.process.returncode is None]
        for process in alive:
            process.terminate()
        for process in alive:
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        for child in self.children:
            child.end()

    def _startup(self) -> Probe:
        silent = [child.device for child in self.children if not child.is_responsive]
        if silent:
            return Probe(False, f"no answer from {', '.join(silent)}", {"silent": silent})
        return Probe(True, "every device's server answers", {})

    def _live(self) -> Probe:
        return Probe(True, "this loop runs", {})
