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
from gms.server.copier import CopierProcess
from gms.server.kv_metrics import KvMetrics
from gms.server.metrics import GmsMetrics
from plumbing.errors import explain_shortage
from plumbing.pod.child_process import ChildProcess
from plumbing.pod.gms_files import AbsenceFile
from plumbing.pod.supervision import GiveUp, StartAgain
from plumbing.service.clock import Clock, SystemClock
from plumbing.service.events import EventLog
from plumbing.service.http import HttpServer, Probe
from plumbing.service.notify import restarts
from plumbing.service.process import parent_environment
from plumbing.service.signals import SignalInbox
from plumbing.text import duration
from plumbing.wire.server import PathGuard

# Of a KV server that keeps dying: a start costs a second of one core, and without the server an
# engine that wakes has no cache, or waits.
KV_RETRY_S = 10.0
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
        kv_command: Callable[[str, int], Sequence[str]] | None = None,
        copy_command: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        """`command`: how to start a device's server, given how many it had before; `kv_command`
        likewise for the server of its KV memory, if it has one; `copy_command` for what keeps its
        weights' copy in host memory, which then has a server (`command`), too."""
        self.directory = directory
        self.clock = clock or SystemClock()
        self.log = EventLog("gms", self.clock)
        copied = list(devices) if copy_command is not None else []
        hosts = [names.offload_device(device) for device in copied]
        self.metrics = GmsMetrics([*devices, *hosts], names.WEIGHTS)
        self.log.subscribe(self.metrics.count)
        self._commands = {names.WEIGHTS: command, names.KV: kv_command or command}
        self._environment = environment
        self.children = [
            Child(device, names.socket_path(directory, device), self.clock, self.metrics, self.log)
            for device in devices
        ]
        self.host_children = [
            Child(host, names.socket_path(directory, host), self.clock, self.metrics, self.log)
            for host in hosts
        ]
        self.copiers = [
            CopierProcess(device, copy_command, environment, self.log)
            for device in copied
            if copy_command is not None
        ]
        kv_devices = devices if kv_command is not None else ()
        self.kv_metrics = KvMetrics(self.metrics.metrics, kv_devices)
        self.kv_children = [
            Child(
                device,
                names.kv_socket_path(directory, device),
                self.clock,
                self.kv_metrics,
                self.log,
                names.KV,
            )
            for device in kv_devices
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
                    running = [tasks.create_task(self._keep(child)) for child in self._awaited]
                    running.append(tasks.create_task(self._keep_copies()))
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
            "restarts": restarts(),
            "problem": self.http.problem,
            "devices": [self._device(child) for child in (*self.children, *self.host_children)],
        }

    def _device(self, child: Child) -> dict[str, Any]:
        """A device: its weights, and under `kv` its KV memory, if that has a server."""
        kv = next((each.status() for each in self.kv_children if each.device == child.device), None)
        return {**child.status(), "kv": kv}

    @property
    def _awaited(self) -> tuple[Child, ...]:
        """Those without which no engine starts or wakes."""
        return (*self.children, *self.kv_children)

    @property
    def _everybody(self) -> tuple[Child, ...]:
        return (*self._awaited, *self.host_children)

    async def _keep_copies(self) -> None:
        """Start what keeps host copies once the others answer, or have failed: a dozen starts at
        once would share the CPUs, and nobody waits for these."""
        for child in self._awaited:
            await child.settled.wait()
        async with asyncio.TaskGroup() as tasks:
            for child in self.host_children:
                tasks.create_task(self._keep(child))
            for copier in self.copiers:
                tasks.create_task(copier.run())

    async def _keep(self, child: Child) -> None:
        """Start a server, wait for its end, restart it, until it keeps dying. Those of KV memory
        and of host copies are tried for ever: weights are served without them."""
        while True:
            verdict = self._start(child) or await self._watch(child)
            if isinstance(verdict, StartAgain):
                await asyncio.sleep(verdict.delay_ms / 1000)
            elif child.is_dispensable:
                await asyncio.sleep(KV_RETRY_S)
            else:
                self._end(verdict.exit_code)
                return

    def _start(self, child: Child) -> StartAgain | GiveUp | None:
        """None: it runs. Else what to do, since no process could be created."""
        more = {**self._environment(child.device), **parent_environment()}
        words = self._commands[child.tag](child.device, child.restarts.deaths_total)
        try:
            child.begin(ChildProcess(words, {**os.environ, **more}))
        except OSError as error:
            verdict = child.restarts.not_started(error.errno)
            what = f"{child.what} cannot be started: {explain_shortage(error.errno)}"
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
        ended = f"{child.what} ended {_how(returncode)} after {duration(lived_ms)}"
        if child.is_killed_for_silence:
            ended += ", killed because it had stopped answering"
        if child.restarts.shortages:
            ended = (
                f"{child.what} ended {_how(returncode)}: too few descriptors, "
                "threads or memory to start; its log says which"
            )
        self._note(child, "gms.child_exit", ended, verdict, {"returncode": returncode})
        if isinstance(verdict, StartAgain):
            child.metrics.restarted(child.device)
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
        if isinstance(verdict, GiveUp) and child.is_dispensable:
            severity, then = "error", f"restarting it in {KV_RETRY_S:g} s; weights are served on"
        elif isinstance(verdict, GiveUp):
            severity, then = "error", f"giving up after {child.restarts.deaths} attempts in a row"
        elif verdict.delay_ms:
            severity, then = "warning", f"restarting it in {duration(verdict.delay_ms)}"
        else:
            severity, then = "warning", "restarting it"
        is_known = child.restarts.shortages > 1 and child.problem == what
        child.problem = what
        child.settled.set()
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
        processes = [child.process for child in self._everybody]
        processes += [copier.process for copier in self.copiers]
        alive = [each for each in processes if each is not None and each.returncode is None]
        for process in alive:
            process.terminate()
        for process in alive:
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        for child in self._everybody:
            child.end()

    def _startup(self) -> Probe:
        silent = {child.device: child.trouble for child in self.children if not child.is_responsive}
        if not silent:
            away = [child.device for child in self.kv_children if not child.is_responsive]
            details: dict[str, Any] = {"kv_silent": away} if self.kv_children else {}
            but = f", but no KV server of {', '.join(away)}" if away else ""
            return Probe(True, f"every device's server answers{but}", details)
        why = (f"{device} ({trouble})" if trouble else device for device, trouble in silent.items())
        details = {"silent": list(silent), "problems": {d: t for d, t in silent.items() if t}}
        return Probe(False, f"no answer from {', '.join(why)}", details)

    def _live(self) -> Probe:
        return Probe(True, "this loop runs", {})


def _how(returncode: int) -> str:
    return f"({signal.Signals(-returncode).name})" if returncode < 0 else f"(code {returncode})"
