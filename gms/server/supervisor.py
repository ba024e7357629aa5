"""`gms serve`: one server process per device, started, watched, and restarted in place.

It relays the servers' events, so that one address serves all devices. It holds no memory and
decides nothing about it. The servers die with it (PDEATHSIG), so none is ever left unwatched. What
happens to one device's server, even that it cannot be started, disturbs no other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gms import names
from gms.server.child import Child
from gms.server.metrics import GmsMetrics
from plumbing.part.absence import AbsenceFile
from plumbing.part.child_process import ChildProcess
from plumbing.part.format import duration
from plumbing.part.restarts import GiveUp, StartAgain
from plumbing.service.clock import Clock, SystemClock
from plumbing.service.events import EventLog
from plumbing.service.http import HttpServer, Probe
from plumbing.service.process import parent_environment
from plumbing.service.signals import SignalInbox
from plumbing.shortage import explain
from plumbing.wire.server import PathGuard

STOP_S = 5.0  # for a server to exit by itself; it has nothing to save


class GmsSupervisor:
    """The devices' servers in one directory; see the head of this file."""

    def __init__(
        self,
        directory: str,
        devices: Sequence[str],
        command: Callable[[str, int], Sequence[str]],
        *,
        http_host: str,
        http_port: int,
        allowed_hosts: Sequence[str] = (),
        environment: Callable[[str], Mapping[str, str]] = lambda device: {},
        clock: Clock | None = None,
    ) -> None:
        """`command`: how to start a device's server, given how many it had before."""
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
            allowed_hosts=allowed_hosts,
        )
        for child in self.children:
            child.on_recovery = self._tell_why
        self._absence: AbsenceFile | None = None
        self._exit_code: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT (0), or until a server keeps dying (its exit code).

        Raises:
            UnderstudyError: another supervisor has the directory; the port is in use.
        """
        guard_path = os.path.join(self.directory, "gms.lock")
        with (
            contextlib.closing(PathGuard(guard_path, f"gms in {self.directory}")),
            contextlib.closing(AbsenceFile(self.directory)) as self._absence,
        ):
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
        """`{schema, as_of_event_id, pid, problem, devices: […]}`, as of the last ping."""
        return {
            "schema": 1,
            "as_of_event_id": self.log.last_id,
            "pid": os.getpid(),
            "problem": self.http.problem,
            "devices": [child.status() for child in self.children],
        }

    async def _keep(self, child: Child) -> None:
        """Start a server, wait for its end, restart it, until it keeps dying."""
        while True:
            verdict = self._start(child) or await self._watch(child)
            if isinstance(verdict, GiveUp):
                self._end(verdict.exit_code)
                return
            await asyncio.sleep(verdict.delay_ms / 1000)

    def _start(self, child: Child) -> StartAgain | GiveUp | None:
        """None: it runs. Else what to do, since no process could be created."""
        more = {**self._environment(child.device), **parent_environment()}
        words = self._command(child.device, child.restarts.deaths_total)
        try:
            child.begin(ChildProcess(words, {**os.environ, **more}))
        except OSError as error:
            verdict = child.restarts.not_started(error.errno)
            what = f"the server of {child.device} cannot be started: {explain(error.errno)}"
            self._note(child, "gms.cannot_start", what, verdict, {"errno": error.errno})
            return verdict
        return None

    async def _watch(self, child: Child) -> StartAgain | GiveUp:
        """Wait for the end of the running server; what to do then."""
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
        ended = f"the server of {child.device} ended {_how(returncode)} after {duration(lived_ms)}"
        if child.is_killed_for_silence:
            ended += ", killed because it had stopped answering"
        if child.restarts.shortages:
            ended = (
                f"the server of {child.device} ended {_how(returncode)}: too few descriptors, "
                "threads or memory to start; its log says which"
            )
        self._note(child, "gms.child_exit", ended, verdict, {"returncode": returncode})
        if isinstance(verdict, StartAgain):
            self.metrics.restarted(child.device)
        return verdict

    def _note(
        self,
        child: Child,
        event_type: str,
        what: str,
        verdict: StartAgain | GiveUp,
        data: Mapping[str, Any],
    ) -> None:
        """Show why the device has no server, and record it: a shortage once while it lasts."""
        if isinstance(verdict, GiveUp):
            severity, then = "error", f"giving up after {child.restarts.deaths} attempts in a row"
        elif verdict.delay_ms:
            severity, then = "warning", f"restarting it in {duration(verdict.delay_ms)}"
        else:
            severity, then = "warning", "restarting it"
        is_known = child.restarts.shortages > 1 and child.problem == what
        child.problem = what
        self._tell_why()
        if not is_known:
            self.log.record(
                event_type, f"{what}; {then}", severity, {"device_uuid": child.device, **data}
            )

    def _tell_why(self) -> None:
        """To whoever asks a server that is not there."""
        if self._absence is not None:
            self._absence.write({c.device: c.problem for c in self.children if c.problem})

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
        silent = {child.device: child.trouble for child in self.children if not child.is_responsive}
        if not silent:
            return Probe(True, "every device's server answers", {})
        why = (f"{device} ({trouble})" if trouble else device for device, trouble in silent.items())
        details = {"silent": list(silent), "problems": {d: t for d, t in silent.items() if t}}
        return Probe(False, f"no answer from {', '.join(why)}", details)

    def _live(self) -> Probe:
        return Probe(True, "this loop runs", {})


def _how(returncode: int) -> str:
    return f"({signal.Signals(-returncode).name})" if returncode < 0 else f"(code {returncode})"
