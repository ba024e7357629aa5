"""A front's connections to pods: their names, their reports, and the requests that they get.

Names come from DNS, such as a headless Service with all its pods, ready or not, from a file that is
read again when it changes, or as a list. They are looked up each second; what cannot be looked up
leaves the pods that are known. Each address has one connection, with a channel for the reports and
one for each request. It is opened again at once when it breaks: the gateway of a pod that lives is
there within `pods.GONE_MS`. While no reports come, another one is tried beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from gateway.core.events import PodBroke, PodHeard, PodNamed
from gateway.core.fleet import Fleet
from gateway.server.channels import Channels
from gateway.server.exchange import GatewayExchange
from gateway.server.hop import KEEPALIVE, POD, fleet_security
from plumbing.errors import UsageError
from plumbing.gateway_protocol import CHANNELS_PATH, VERSION, WATCH_PATH, PodReport
from plumbing.text import join_address, one_line, split_address
from plumbing.wire.tcp import reason_of

LOOK_UP_S = 1.0
PODS_MAX = 256
REPORT_BYTES_MAX = 64 << 10
CONNECT_S = 2.0  # a pod whose node has no power does not refuse
RETRY_S, RETRY_S_MAX = 0.02, 1.0  # doubled
# What ends a connection on which something else than reports comes.
NO_REPORTS = (
    *(ValueError, RecursionError),
    *(asyncio.IncompleteReadError, asyncio.LimitOverrunError),
)
PROBLEM_CHARS_MAX = 200  # it may quote the peer
# A pod that ends does this, and one that does not trust this front.
REFUSED = "it closed the connection at once; if this persists, `gateway status` in the pod says why"
WATCH, CHANNELS = (
    f"GET {path} HTTP/1.1\r\nhost: pod\r\n\r\n".encode() for path in (WATCH_PATH, CHANNELS_PATH)
)
Address: TypeAlias = "tuple[str, int]"
_REPORT = msgspec.json.Decoder(PodReport)


class PodNames:
    """What `--pods` says: `NAME:PORT`, several with commas between, or `@FILE` with one a line."""

    def __init__(self, text: str) -> None:
        """Raises:
        UsageError: `gateway.bad_pods`.
        """
        self._file = Path(text[1:]) if text.startswith("@") else None
        self.problem: str | None = None
        self._known: dict[Address, set[Address]] = {}  # of each name, by the last answer
        self._names = [] if self._file else self._parse(text.split(","))

    async def look_up(self) -> set[Address] | None:
        """The addresses now; of a name that cannot be looked up, those that it had. None: the file
        cannot be read."""
        loop, known = asyncio.get_running_loop(), self._known
        self.problem = None
        try:
            if self._file is not None:
                self._names = self._parse(self._file.read_text().splitlines())
        except (OSError, ValueError, UsageError) as error:
            self.problem = f"cannot read the names of pods: {error}; the pods known before are used"
            return None
        asked = [loop.getaddrinfo(*name, type=socket.SOCK_STREAM) for name in self._names]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        self._known = {}
        for name, answer in zip(self._names, answers, strict=True):
            if isinstance(answer, BaseException):
                why = f"cannot look up {name[0]}: {answer}; its addresses known before are used"
                self.problem, self._known[name] = why, known.get(name, set())
            else:
                self._known[name] = {(str(each[4][0]), int(each[4][1])) for each in answer}
        found = set[Address]().union(*self._known.values())
        if len(found) > PODS_MAX:
            self.problem = f"{len(found)} addresses, more than the limit of {PODS_MAX} pods"
        return set(sorted(found)[:PODS_MAX])

    @staticmethod
    def _parse(names: list[str]) -> list[Address]:
        try:
            return [split_address(name) for name in filter(None, map(str.strip, names))]
        except ValueError as error:
            raise UsageError("gateway.bad_pods", f"{error} (--pods)") from None


class PodLinks:
    """All connections of one front."""

    def __init__(self, names: str, tls: str, fleet: Fleet, exchange: GatewayExchange) -> None:
        """Raises:
        UsageError: names or certificates cannot be used.
        """
        self.names = PodNames(names)
        self._security = fleet_security(tls)
        if self._security is not None:
            self._security.client_context()
        self._fleet, self._exchange = fleet, exchange
        self._loop = asyncio.get_running_loop()
        self._watches: dict[Address, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()
        self.problems: dict[str, str] = {}  # by address, as text
        self._channels: dict[str, Channels] = {}  # of each address, the newest connection
        exchange.connect_pod = self._connect

    @property
    def problem(self) -> str | None:
        """Of the names, or of the certificates."""
        tls = None if self._security is None else self._security.problem
        return self.names.problem or tls

    async def run(self) -> None:
        """Look names up for ever."""
        async with asyncio.TaskGroup() as self._tasks:  # a fault in one ends the front
            while True:
                found = await self.names.look_up()
                if found is not None:
                    self._follow(found)
                await asyncio.sleep(LOOK_UP_S)

    def _follow(self, found: set[Address]) -> None:
        known = {each for each, pod in self._fleet.pods.items() if pod.is_named}
        for address in found:
            if join_address(*address) not in known:
                self._exchange.handle(PodNamed(join_address(*address), True))
            if address not in self._watches:
                self._watches[address] = self._tasks.create_task(self._watch(address))
        for address in set(self._watches) - found:
            name = join_address(*address)
            if name in known:
                self._exchange.handle(PodNamed(name, False))
            if name not in self._fleet.pods:  # gone, and no longer named
                self._watches.pop(address).cancel()
                self.problems.pop(name, None)
                if name in self._channels:
                    self._channels.pop(name).abort()

    # ------------------------------------------------------------------ reports

    async def _watch(self, address: Address) -> None:
        """Only an end of the connection, or a refusal, says that the gateway there is gone. Silence
        says nothing: a new connection may be heard where the old one is not, after a partition or
        at an address that another pod has now."""
        retry_s, name = 0.0, join_address(*address)
        while True:
            has_reported = is_refused = is_broken = False
            try:
                async for report in self._reports(address):
                    has_reported = True
                    self.problems.pop(name, None)
                    self._exchange.handle(PodHeard(name, report))
                is_broken, why = True, "it closed the connection"
            except TimeoutError:
                why = "it is silent"
            except OSError as error:
                is_reset = isinstance(error, ConnectionRefusedError | ConnectionResetError)
                is_refused = is_reset and not has_reported
                is_broken, why = has_reported or is_refused, reason_of(error)
            except (*NO_REPORTS, UsageError) as error:
                why = str(error)
            self.problems[name] = one_line(why)[:PROBLEM_CHARS_MAX]
            if is_broken:
                self._exchange.handle(PodBroke(name, is_refused))
                retry_s = 0.0 if has_reported else retry_s
            await asyncio.sleep(retry_s)
            retry_s = min(RETRY_S_MAX, 2 * retry_s or RETRY_S)

    async def _reports(self, address: Address) -> AsyncIterator[PodReport]:
        """Those on one connection, until it is closed.

        Raises:
            TimeoutError: it is silent.
            OSError, ValueError: there is none, or something else than reports came.
        """
        channels, reader = await self._open(address), asyncio.StreamReader(REPORT_BYTES_MAX)
        watch = channels.open(asyncio.StreamReaderProtocol(reader))
        try:
            watch.write(WATCH)
            async with asyncio.timeout(CONNECT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                raise ValueError(f"it answered {head[:64].decode(errors='replace')!r}")
            self._channels[join_address(*address)] = channels
            while True:
                try:
                    async with asyncio.timeout(self._fleet.rules.silent_ms / 1000):
                        line = await reader.readline()
                except TimeoutError:
                    if self._is_silent(join_address(*address)):
                        raise
                    continue  # it is this process that was late
                if not line:
                    return
                report = _REPORT.decode(line)
                if report.version != VERSION:
                    raise ValueError(
                        f"it speaks version {report.version} of the hop, not {VERSION}"
                    )
                if report.incarnation >> 64:  # msgspec knows no such bound
                    raise ValueError("its incarnation has more than 64 bits")
                yield report
        finally:
            watch.abort()
            channels.retire()

    async def _open(self, address: Address) -> Channels:
        """
        Raises:
            OSError, UsageError: there is no connection.
            ValueError: it is no pod's.
        """
        channels = Channels()
        try:
            async with asyncio.timeout(CONNECT_S):
                transport, _ = await self._loop.create_connection(
                    lambda: channels, *address, **self._tls(address)
                )
                keep_alive(transport)
                transport.write(CHANNELS)
                await channels.opened.wait()
        finally:
            if not channels.is_open:
                channels.abort()
        if channels.stray:
            raise ValueError(f"it answered {channels.stray.decode(errors='replace')!r}")
        if not channels.is_open:
            raise ConnectionResetError(REFUSED)
        return channels

    def _is_silent(self, name: str) -> bool:
        pod = self._fleet.pods.get(name)
        now_ms, silent_ms = self._exchange.now_ms(), self._fleet.rules.silent_ms
        return pod is None or pod.is_gone or now_ms - pod.heard_ms >= silent_ms

    def _tls(self, address: Address) -> dict[str, Any]:
        """
        Raises:
            UsageError: users' text would go over a network in plain text.
        """
        if self._security is None:
            if ipaddress.ip_address(address[0]).is_loopback:
                return {}
            raise UsageError(
                "gateway.insecure_hop", "it is on another host: give the front --fleet-tls"
            )
        return {"ssl": self._security.client_context(), "server_hostname": POD}

    # ------------------------------------------------------------------ requests

    def _connect(self, pod: str, protocol: asyncio.Protocol, failed: Callable[[], object]) -> None:
        """Give `protocol` a channel to the pod at this address."""
        channels = self._channels.get(pod)
        if channels is None or not channels.is_open:
            failed()
        else:
            channels.open(protocol)


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Notice within 10 s that this flow is lost."""
    sock = transport.get_extra_info("socket")
    for level, option, value in KEEPALIVE if sock is not None else ():
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)
