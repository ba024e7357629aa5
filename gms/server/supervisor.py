"""`gms serve`: one server process per device, and one for host copies, started, watched, and
restarted in place.

It relays the servers' events, so that one address serves all devices. It holds no memory and
decides nothing about it. The servers die with it (PDEATHSIG), so none is ever left unwatched. What
happens to one device's server, even that it cannot be started, disturbs no other's: an init's
`Restarter` decides when it is restarted, and only one that keeps failing to start ends the program.

`Child` is such a process. A `Served` watches one device of it (in a pool, one model's part). A
process that hangs is killed: its memory lives on in its readers. But only for its own silence: not
while this process itself waits for a CPU, or has no descriptor left to ask with.

The child that keeps the host copies (`gms.host_copy`) serves nothing: the supervisor knows only
whether it runs. Neither it nor the copies' server is ever given up: weights are served without a
copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gms import messages as msg
from gms import names
from plumbing.errors import UnderstudyError, UsageError, explain_shortage, is_shortage
from plumbing.pod.paths import gms_socket, write_device_names
from plumbing.pod.supervision import ChildProcess
from plumbing.service.clock import SystemClock
from plumbing.service.events import Event, EventLog
from plumbing.service.http import HttpServer, Probe
from plumbing.service.init import SHORTAGE, Program, Restarter
from plumbing.service.metrics import Metrics
from plumbing.service.notify import RESTARTS_ENV, restarts
from plumbing.service.process import parent_environment
from plumbing.service.signals import SignalInbox
from plumbing.text import duration
from plumbing.wire.connection import Connection, KeptConnection
from plumbing.wire.messages import Message
from plumbing.wire.server import PathGuard

# Of what keeps dying and concerns copies only: a start costs a second of one core.
COPIES_RETRY_S = 10.0
STOP_S = 5.0  # for a server to exit by itself; it has nothing to save
PING_S = 1.0
SILENT_MS = 5000.0  # several pings: a server that is silent for longer is not ready
LATE_MS = 1500.0  # a ping that comes later proves that this process itself had to wait
# Driver calls and fsyncs run on threads, so a loop that could run and did not for half a minute
# never will.
HANG_MS = 30_000.0
# Bad flags do not fix themselves. But flags that have worked once are not bad: then what they name
# is gone, for example a GPU.
USAGE = UsageError.exit_code

Command = Callable[[str], Sequence[str]]
Environment = Callable[[str], Mapping[str, str]]


class GmsSupervisor:
    """The devices' servers in one directory; see the head of this file."""

    def __init__(
        self,
        directory: str,
        devices: Mapping[str, Sequence[str]],
        command: Command,
        *,
        http_host: str,
        http_port: int,
        allowed_hosts: Sequence[str] = (),
        environment: Environment = lambda device: {},
        keep_copies: Sequence[str] | None = None,
    ) -> None:
        """`devices`: the places that each device's server serves; `command`: how that server is
        started; `keep_copies`: starts what keeps the copies of weights in host memory, which
        `command` serves under the name of `names.COPIES`."""
        self.directory = directory
        self.clock = SystemClock()
        self.log = EventLog("gms", self.clock)
        places = [place for served in devices.values() for place in served]
        copies = [names.offload_device(place) for place in places if keep_copies is not None]
        metrics = Metrics()
        of_weights = ServerMetrics(metrics, [*places, *copies], names.WEIGHTS)
        self.metrics = of_weights, ServerMetrics(metrics, places, names.KV)
        self.log.subscribe(of_weights.count)

        self.environment = environment
        self.children = [
            Child(self, device, f"the server of {device}", command, served, is_vital=True)
            for device, served in devices.items()
        ]
        # What keeps host copies; the weights are served without it.
        self.copies: list[Child] = []
        if keep_copies is not None:
            server, keeper = "the server of host copies", "the process that keeps host copies"
            self.copies = [
                Child(self, names.COPIES, server, command, copies),
                Child(self, names.COPIES, keeper, lambda _: keep_copies, ()),
            ]
        self.http = HttpServer(
            http_host,
            http_port,
            probes={"startup": self._startup, "live": self._live, "ready": self._startup},
            status=self.status,
            metrics=metrics,
            events=self.log,
            allowed_hosts=allowed_hosts,
        )

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT (0), or until a server keeps dying (its exit code)."""
        guard_path = os.path.join(self.directory, "gms.lock")
        with contextlib.closing(PathGuard(guard_path, f"gms in {self.directory}")):
            inbox = SignalInbox()
            await self.http.start()
            # Now that no other service can be there: it would count other devices.
            write_device_names(self.directory, [each.device for each in self.children])
            works = [self._signalled(inbox), self._keep_copies(), *map(self._keep, self.children)]
            tasks = [asyncio.create_task(work) for work in works]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                return done.pop().result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._stop_children()
                await self.http.stop()
                inbox.close()

    def status(self) -> dict[str, Any]:
        """`{schema, as_of_event_id, pid, problem, devices: […]}`, as of the last ping."""
        served = [each for child in (*self.children, *self.copies) for each in child.served]
        return {
            "schema": 1,
            "as_of_event_id": self.log.last_id,
            "pid": os.getpid(),
            "restarts": restarts(),
            "problem": self.http.problem,
            "devices": [each.status() for each in served],
        }

    async def _keep(self, child: Child) -> int:
        """Keep it running: what is vital, until its starts keep failing (the exit code then)."""
        while True:
            delay_s = await child.live()
            if delay_s is None and child.is_vital:
                return child.restarter.exit_code
            await asyncio.sleep(COPIES_RETRY_S if delay_s is None else delay_s)

    async def _keep_copies(self) -> int:
        """Start what keeps host copies once the others answer, or have failed: a dozen starts at
        once would share the CPUs, and no request waits for these."""
        for child in self.children:
            await child.settled.wait()
        await asyncio.gather(*map(self._keep, self.copies))
        return await asyncio.Future()  # there are none

    async def _signalled(self, inbox: SignalInbox) -> int:
        signum = await inbox.get()
        self.log.record("gms.stopping", f"stopping: {signal.Signals(signum).name}")
        return 0

    async def _stop_children(self) -> None:
        processes = [child.process for child in (*self.children, *self.copies)]
        alive = [each for each in processes if each is not None and each.returncode is None]
        for process in alive:
            process.send_signal(signal.SIGTERM)
        for process in alive:
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.send_signal(signal.SIGKILL)
                await process.wait()
        for child in (*self.children, *self.copies):
            child.end()

    def _startup(self) -> Probe:
        served = [each for child in self.children for each in child.served]
        silent = {each.place: each.child.problem for each in served if not each.is_responsive}
        if not silent:
            return Probe(True, "every device's server answers", {"kv_silent": []})
        why = (f"{place} ({trouble})" if trouble else place for place, trouble in silent.items())
        details = {"silent": list(silent), "problems": {d: t for d, t in silent.items() if t}}
        return Probe(False, f"no answer from {', '.join(why)}", details)

    def _live(self) -> Probe:
        return Probe(True, "this loop runs", {})


class Child:
    """A process, and the memories that it serves."""

    def __init__(
        self,
        parent: GmsSupervisor,
        device: str,
        name: str,
        command: Command,
        places: Sequence[str],
        *,
        is_vital: bool = False,
    ) -> None:
        """`is_vital`: the program ends with it."""
        self.device, self.name, self.is_vital = device, name, is_vital
        self.log, self.clock = parent.log, parent.clock
        metrics = parent.metrics if is_vital else parent.metrics[:1]  # copies have no KV memory
        self.served = [Served(parent.directory, place, self, metrics) for place in places]
        self.restarter = Restarter()
        self.process: ChildProcess | None = None
        self.problem: str | None = None  # why there is no server, until one answers
        self.settled = asyncio.Event()  # all that it serves has answered once, or it has failed
        self._command, self._parent = command, parent
        self._program, self._has_ever_answered = Program(), False
        self._silent_ms = self._looked_ms = 0.0
        self._is_short = False

    async def live(self) -> float | None:
        """Start the server and wait for its end. The seconds until it is restarted; None: no start
        can help."""
        environ = {**os.environ, **self._parent.environment(self.device), **parent_environment()}
        environ[RESTARTS_ENV] = str(self.restarter.restarts)
        self._program = Program()
        try:
            process = self.process = ChildProcess(self._command(self.device), environ)
        except OSError as error:
            what = f"{self.name} cannot be started: {explain_shortage(error.errno)}"
            is_short = is_shortage(error) or error.errno == errno.EAGAIN  # of fork
            code = SHORTAGE if is_short else 1
            return self._failed("gms.cannot_start", what, code, {"errno": error.errno})
        started_ms = self._looked_ms = self.clock.now_ms()
        self._silent_ms = 0.0
        if not self.served:  # it serves no requests
            self._program.told(b"READY=1", started_ms / 1000)
        async with asyncio.TaskGroup() as tasks:
            works = [self._ping(process), *(each.run() for each in self.served)]
            asking = [tasks.create_task(work) for work in works]
            returncode = await process.wait()
            for task in asking:
                task.cancel()
        self.end()
        silent = ", killed because it had stopped answering"
        lived = duration(self.clock.now_ms() - started_ms)
        how = signal.Signals(-returncode).name if returncode < 0 else f"code {returncode}"
        what = f"{self.name} ended ({how}) after {lived}"
        what += silent if self._silent_ms > HANG_MS else ""
        is_misused = returncode == USAGE and not self._has_ever_answered
        is_told = returncode < 0 or returncode == SHORTAGE or is_misused
        code = returncode if is_told else 1  # whatever else it says, other devices' servers go on
        return self._failed("gms.child_exit", what, code, {"returncode": returncode})

    def _failed(self, kind: str, what: str, code: int, data: Mapping[str, Any]) -> float | None:
        """Show why the device has no server, and record it: a shortage once while it lasts. The
        seconds until the next start; None: there is none."""
        delay_s = self.restarter.ended(code, self._program, self.clock.now_ms() / 1000)
        if delay_s is not None:
            then = "restarting it" + (f" in {duration(delay_s * 1000)}" if delay_s else "")
        elif not self.is_vital:
            then = f"restarting it in {COPIES_RETRY_S:g} s; weights are still served"
        else:
            then = f"giving up after {self.restarter.failed_starts} attempts in a row"
        is_known = self._is_short and code == SHORTAGE and self.problem == what
        self._is_short = code == SHORTAGE
        self.problem = what
        self.settled.set()
        if not is_known:
            severity = "error" if delay_s is None else "warning"
            about = {"device_uuid": self.device, **data}
            self.log.record(kind, f"{what}; {then}", severity, about)
        return delay_s

    async def _ping(self, process: ChildProcess) -> None:
        """Ping the server while it runs; kill it when it hangs."""
        while self._silent_ms <= HANG_MS:
            for each in self.served:
                each.ask()
            await asyncio.sleep(PING_S)
            now_ms = self.clock.now_ms()
            elapsed_ms, self._looked_ms = now_ms - self._looked_ms, now_ms
            is_short = any(each.is_short for each in self.served)
            if elapsed_ms <= LATE_MS and self.served and not is_short:
                self._silent_ms += elapsed_ms
        process.send_signal(signal.SIGKILL)

    def answered(self) -> None:
        """Something that it serves has answered."""
        self._silent_ms, self._has_ever_answered = 0.0, True
        self._program.told(b"READY=1", self.clock.now_ms() / 1000)
        if all(each.answered_ms is not None for each in self.served):
            self.settled.set()
        self.problem = None

    def end(self) -> None:
        """The process is gone: its status is void."""
        for each in self.served:
            each.end()


class Served(KeptConnection):
    """The memory of one place: its servers' answers and last status."""

    def __init__(
        self, directory: str, place: str, child: Child, metrics: Sequence[ServerMetrics]
    ) -> None:
        """`metrics`: of its weights, and of its KV memory if it has any."""
        super().__init__(gms_socket(directory, place), msg.CATALOGUE)
        self.place, self._metrics = place, metrics
        self.answered_ms: float | None = None  # None: this process has not answered yet
        self.child = child
        self.is_short = False  # no descriptor is left to ask with
        self._document: dict[str, Any] | None = None
        self._relayed_id = 0  # of this process's events: those up to here are in our log

    @property
    def is_responsive(self) -> bool:
        """Whether it has answered lately: a hanging server does not serve newcomers."""
        now_ms = self.child.clock.now_ms()
        return self.answered_ms is not None and now_ms - self.answered_ms < SILENT_MS

    def status(self) -> dict[str, Any]:
        """The server's own document, or state `down`."""
        if self._document is None or self.answered_ms is None:
            down = {
                "device_uuid": self.place,
                "state": "down",
                "online": False,
                "restarts_total": self.child.restarter.restarts,
                "problem": self.child.problem,
            }
            kv = {**down, "tag": names.KV} if len(self._metrics) > 1 else None
            return {**down, "tag": names.WEIGHTS, "kv": kv}
        online, kv = self.is_responsive, self._document["kv"]
        kv = kv and {**kv, "online": online}
        return {**self._document, "online": online, "kv": kv}

    async def _connect(self) -> None:
        self.is_short = False
        try:
            await super()._connect()
        except UnderstudyError as error:
            self.is_short = error.code == "wire.no_descriptors"
            raise

    def begin(self, conn: Connection) -> None:
        conn.send(msg.WatchMsg(since=self._relayed_id), 1)

    def ask(self) -> None:
        """Ask for its status, if it is there."""
        if self.conn is not None:
            self.conn.send(msg.StatusMsg(), 1)

    def end(self) -> None:
        """The process is gone: its status is void."""
        self.answered_ms, self._relayed_id = None, 0
        for metrics in self._metrics:
            metrics.restarted(self.place)

    def hear(self, message: Message, request_id: int) -> None:
        if isinstance(message, msg.EventMsg):
            self._relay(message.record)
        elif isinstance(message, msg.StatusReplyMsg):
            self.answered_ms = self.child.clock.now_ms()
            self.child.answered()
            self._document = message.document
            both = message.document, message.document["kv"]
            for metrics, document in zip(self._metrics, both, strict=False):
                metrics.update(document)

    def _relay(self, record: Mapping[str, Any]) -> None:
        self._relayed_id = record["id"]
        self.child.log.relay(record, {"device_uuid": self.place})


STATES = ("empty", "staging", "committed", "recovering", "offloaded", "down")
MODES = ("rw", "ro", "waiting")
EVENTS = {"gms.recovered": "recoveries_total", "gms.condemned": "condemnations_total"}
HELP = {
    "exports_total": "Epochs sent to readers.",
    "reclaims_total": "Epochs whose memory became free.",
    "recoveries_total": "Epochs that readers handed back to a restarted server.",
    "condemnations_total": "Epochs that were taken out of service because their bytes were bad.",
    "offloads_total": "Epochs freed because host memory has a sealed copy.",
    "restages_total": "Epochs restored from their copy in host memory.",
    "oom_waits_total": "Slabs that waited for memory to become free.",
    "protocol_errors_total": "Requests that were refused as the peer's fault.",
}
PHASES = ("committed_bytes", "staging_bytes", "superseded_bytes", "releasing_bytes")
KV_STATES = ("empty", "making", "idle", "lent", "discarded", "releasing", "recovering", "down")
KV_HELP = {
    "pools_made_total": "KV pools made.",
    "pools_lent_total": "Incarnations that a KV pool was lent to.",
    "pools_discarded_total": "KV pools whose content was never lent again.",
    "pools_given_up_total": "KV pools that engines freed in order to sleep.",
    "recoveries_total": "KV pools that engines handed back to a restarted server.",
    "stale_refusals_total": "Claims that were refused because a newer grant is known.",
    "full_waits_total": "KV pools that waited for memory to become free.",
    "protocol_errors_total": "Requests that were refused as the peer's fault.",
}


class ServerMetrics:
    """Of the weights of `devices`, or of their KV memory: a state, restarts, counters, gauges, from
    the status of the devices' servers.

    Rare events are counted one by one, because a server may die before its next status. The other
    counters grow by the increase in the status document, so a server's restart does not lower them.
    """

    def __init__(self, metrics: Metrics, devices: Sequence[str], tag: str) -> None:
        self.metrics, self._is_weights = metrics, tag == names.WEIGHTS
        one: dict[str, Sequence[str]] = {"device_uuid": devices}
        both = {**one, "tag": (tag,)}
        m, self._labels = metrics, {}
        if self._is_weights:
            prefix, what, texts = "gms", "the device's server", HELP
            self._labels = {"tag": tag}
            text = "Attached sessions and waiting ones, by mode."
            self._sessions = m.gauge("gms_sessions", text, {**one, "mode": MODES})
            text = "State of the device's memory."
            self._state = m.one_hot("gms_epoch_state", text, STATES, both)
            text = "Memory of all epochs, shared by readers."
            self._bytes = m.gauge("gms_allocated_bytes", text, both)
            text = "Memory of the committed epoch."
            self._exported = m.gauge("gms_exported_bytes", text, both)
            self._capacity = m.gauge("gms_capacity_bytes", "Memory limit of the device.", both)
            self._fds = m.gauge("gms_open_fds", "Open descriptors of the device's server.", one)
        else:
            prefix, what, texts = "gms_kv", "the server of the device's KV memory", KV_HELP
            states = {**one, "state": ("holding", "waiting")}
            text = "Processes that hold the KV pool, and those that wait for it."
            self._sessions = m.gauge("gms_kv_sessions", text, states)
            text = "State of the device's KV memory."
            self._state = m.one_hot("gms_kv_state", text, KV_STATES, one)
            self._bytes = m.gauge("gms_kv_pool_bytes", "Memory of the KV pool.", one)
        # By their figures in the status document.
        self._counted = texts.keys() - (EVENTS.values() if self._is_weights else ())
        self._restarts = m.counter(f"{prefix}_restarts_total", f"Restarts of {what}.", one)
        self._counters = {
            name: m.counter(f"{prefix}_{name}", text, one) for name, text in texts.items()
        }
        self._seen: dict[tuple[str, str], int] = {}

    def restarted(self, device: str) -> None:
        """The server of `device` was restarted: its counts begin at zero."""
        self._restarts.labels(device_uuid=device).inc()
        self._state.set("down", device_uuid=device, **self._labels)
        for name in self._counted:
            self._seen[device, name] = 0

    def count(self, event: Event) -> None:
        """Count an event that was relayed from a device's server."""
        name = EVENTS.get(event.type)
        if name is not None:
            self._counters[name].labels(device_uuid=event.data["device_uuid"]).inc()

    def update(self, document: Mapping[str, Any]) -> None:
        """Take over the figures of a server's status document."""
        device = document["device_uuid"]
        labels = {"device_uuid": device, **self._labels}
        self._state.set(document["state"], **labels)
        if not document["online"]:
            return
        for name in self._counted:
            grown = document[name] - self._seen.get((device, name), 0)
            self._seen[device, name] = document[name]
            self._counters[name].labels(device_uuid=device).inc(max(0, grown))
        sessions, waiting = document["sessions"], document["waiting"]
        if not self._is_weights:
            self._bytes.labels(**labels).set(document["pool_bytes"])
            for state, found in (("holding", sessions), ("waiting", waiting)):
                self._sessions.labels(device_uuid=device, state=state).set(len(found))
            return
        self._bytes.labels(**labels).set(sum(document[name] for name in PHASES))
        self._exported.labels(**labels).set(document["committed_bytes"])
        self._capacity.labels(**labels).set(document["capacity_bytes"])
        self._fds.labels(device_uuid=device).set(document["open_fds"])
        modes = [session["mode"] for session in sessions] + ["waiting"] * len(waiting)
        for mode in MODES:
            self._sessions.labels(device_uuid=device, mode=mode).set(modes.count(mode))
