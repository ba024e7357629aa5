"""The HTTP process on its event loop: prepared, awake, serving, draining, as the supervisor asks.

Owns the lent listening socket and the HTTP server behind it. Imported late, since aiohttp and the
tokenizer are the slow imports: by then the model processes are at work.

The surprising thing: aiohttp's own sites are not used, as other processes hold the listening socket
too. `create_server(sock=…)` calls `listen` again with a backlog of its own (its length holds for
all copies, and the lock server chooses it), accepts a whole backlog before anything else runs on
the loop, and resets clients when descriptors run out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

from aiohttp import http_exceptions, web

from engine.backends import process
from engine.backends.channel import POLL_S, Channel, Phases, until_done
from engine.backends.process import ProgressPage
from engine.backends.reference.link import ConfigureMsg, ReadyMsg
from engine.backends.reference.model_link import ModelLink
from engine.backends.reference.routes import ServedModel, continuation_id, make_app
from engine.backends.reference.stream import Tokenizer
from engine.messages import (
    NO_ERA,
    CanaryMsg,
    HealthyMsg,
    PreparedMsg,
    RestedMsg,
    WeightsPlacedMsg,
    WokenMsg,
)
from lockserver.client import serving
from plumbing.errors import UnderstudyError
from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

# A connection without a request after this time is closed: otherwise thousands of half requests
# would take every descriptor, and no other client could be answered.
FIRST_REQUEST_S = 10.0
CONNECTIONS_MAX = 4096  # far above what a few slots can serve, far below the limit of open files

ACCEPTS_PER_TURN = 32  # then the requests in flight get the loop
RETRY_S = 0.1  # after running out of descriptors or memory, until connections close

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SharedListener:
    """Accepts between `start` and `stop`, and never otherwise."""

    def __init__(
        self,
        fd: OwnedFd,
        factory: Callable[[], asyncio.BaseProtocol],
        count: Callable[[], int] = lambda: 0,
        first_request_s: float = FIRST_REQUEST_S,
    ) -> None:
        """Take `fd`, a bound and listening stream socket. `count` gives the open connections."""
        self._sock = socket.socket(fileno=fd.detach())
        self._sock.setblocking(False)  # a flag of the open file, the same for all its holders
        self._factory = factory
        self._count = count
        self._first_request_s = first_request_s
        self._quiet: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self._arrivals: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self.is_accepting = False

    @property
    def is_arriving(self) -> bool:
        """Whether a connection has been accepted and not yet reached its protocol."""
        return bool(self._arrivals)

    def start(self) -> None:
        self.is_accepting = True
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def stop(self) -> None:
        """Accept no more and close our copy; repeated calls do nothing."""
        if self._retry is not None:
            self._retry.cancel()
        if self.is_accepting:
            self._loop.remove_reader(self._sock.fileno())
        self.is_accepting = False
        for timer in self._quiet.values():
            timer.cancel()
        self._quiet.clear()
        self._sock.close()

    def request_received(self, protocol: asyncio.BaseProtocol) -> None:
        """Lift the deadline of `protocol`: its connection has sent a request."""
        timer = self._quiet.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, protocol: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        self._quiet.pop(protocol, None)
        transport.abort()

    def _accept(self) -> None:
        if self._count() + len(self._arrivals) >= CONNECTIONS_MAX:
            self._pause(f"{CONNECTIONS_MAX} connections are open")
            return
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._pause(os.strerror(error.errno or 0))
                    return
                continue  # the client left while it waited (man 2 accept)
            connection.setblocking(False)
            arrival = self._loop.create_task(self._adopt(connection))
            self._arrivals.add(arrival)
            arrival.add_done_callback(self._arrivals.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        try:
            transport, protocol = await self._loop.connect_accepted_socket(
                self._factory, connection
            )
        except OSError:  # the client is gone
            connection.close()
            return
        self._quiet[protocol] = self._loop.call_later(
            self._first_request_s, self._give_up, protocol, transport
        )

    def _pause(self, why: str) -> None:
        """New connections wait in the backlog meanwhile."""
        logger.warning("cannot accept: %s; trying again in %g s", why, RETRY_S)
        self._loop.remove_reader(self._sock.fileno())
        self._retry = self._loop.call_later(RETRY_S, self.start)


# ---------------------------------------------------------------------- the backend

KEEPALIVE_S = 75.0
LINE_BYTES_MAX = 64 * 1024  # of a request, and of a header: as a gateway lets pass
# For connections that are cut when the drain's budget is spent. Not 0, which aiohttp takes for "no
# limit"; not more, because its `shutdown` waits that long for idle connections too.
FLUSH_S = 0.1


async def serve(
    settings: ConfigureMsg,
    names: tuple[str, ...],
    sock: socket.socket,
    models: Sequence[tuple[socket.socket, subprocess.Popen[bytes]]],
    page: ProgressPage,
    seat: serving.ServingSeat | None,
) -> None:
    """Serve for the supervisor at the other end of `sock`, which decides when this process ends."""
    channel = Channel(sock)
    link = ModelLink(models, settings.slots, channel.end, page)
    try:
        tokenizer = Tokenizer.load(settings.directory)
        served = ServedModel(names, tokenizer, link)
        backend = ReferenceBackend(served, settings.directory, seat)
        ready = await backend.prepare()
    except UnderstudyError as error:
        channel.end(process.fault_report(error))
    prepared = PreparedMsg(
        ready.weights_bytes,
        ready.kv_bytes,
        ready.epoch,
        ready.identity,
        continuation=backend.continuation_id,
        can_rest=seat is not None,
        can_offload=True,
    )
    channel.prepared(backend, prepared)
    await asyncio.Event().wait()


class ReferenceBackend:
    """One incarnation's model service: what `channel.Backend` asks for."""

    def __init__(
        self, served: ServedModel, directory: str, seat: serving.ServingSeat | None
    ) -> None:
        """`seat`: this process's; without one it cannot sleep."""
        self._seat = seat
        self._phases = Phases()
        # While a request about memory is under way. The phase alone does not order two of them: a
        # wake may come before the ranks have been sent the offload that was begun before it.
        self._memory = asyncio.Lock()
        self._served = served
        self._directory = directory
        self._listener: SharedListener | None = None
        logging.getLogger("aiohttp.server").addFilter(is_our_fault)
        self._runner = web.AppRunner(
            make_app(served),
            handler_cancellation=True,  # a client that leaves frees its slot
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
        )

    async def prepare(self) -> ReadyMsg:
        """Build the HTTP server while the model loads, so that waking need not; wait for both."""
        await self._runner.setup()
        served = self._served
        ready = await served.link.ready()
        self._phases.step("ready")
        served.ready = ready
        served.continuation_id = continuation_id(self._directory, served.model_name, ready)
        return ready

    @property
    def continuation_id(self) -> str:
        return self._served.continuation_id

    async def wake(
        self,
        engine: str,
        token: int,
        listening: OwnedFd,
        *,
        is_behind_gateway: bool = False,
        era: str = NO_ERA,
    ) -> WokenMsg:
        """Take KV memory and keep `listening` for `serve`. Takes the fd."""
        with listening:
            self._phases.step("wake")
            if self._seat is not None:
                self._seat.join(token)
            server = self._server
            self._served.engine, self._served.token = engine, token
            self._served.is_behind_gateway = is_behind_gateway
            self._listener = SharedListener(
                listening.duplicate(), server, lambda: len(server.connections)
            )
            self._served.on_request = self._listener.request_received
        async with self._memory:
            return await self._served.link.take_memory(token, era)

    async def run_canary(self) -> CanaryMsg:
        self._phases.step("run_canary")
        return await self._served.link.check()

    async def serve(self) -> None:
        self._phases.step("serve")
        assert self._listener is not None
        self._listener.start()

    def health(self) -> HealthyMsg:
        return HealthyMsg(
            in_flight=self._served.link.in_flight,
            progress=self._served.link.progress,
            accepting=self._listener is not None and self._listener.is_accepting,
            rejected=self._served.rejected,
            replayed=self._served.replayed,
            published_blocks=self._served.link.published,
            kept_blocks=self._served.link.kept,
        )

    async def drain(self, budget_s: float, *, resume: bool = False) -> None:
        """Accept no more, answer requests on open connections, cut them when the budget is spent.

        Connections in the backlog stay there for the next engine. With `resume`, streams that the
        gateway continues are left to that at once.
        """
        self._phases.step("drain")
        self._served.is_draining = True
        self._served.is_continued = resume
        if self._listener is not None:
            self._listener.stop()
        if resume:
            for stream in list(self._served.streams):
                stream.leave()
        server = self._server
        await until_done(
            lambda: [connection.transport for connection in server.connections],
            self._is_idle,
            budget_s,
        )
        server.pre_shutdown()
        await server.shutdown(FLUSH_S)

    async def rest(self, budget_s: float, *, keep_kv: bool) -> RestedMsg:
        """After a drain: give the KV memory back on every rank, and leave the serving file.

        Raises:
            UnderstudyError: `engine.in_flight`, requests that the drain has cut have not ended.
        """
        self._phases.step("rest")
        end = time.monotonic() + budget_s
        served = self._served
        while not self._is_idle() or served.link.in_flight:
            if time.monotonic() >= end:
                raise UnderstudyError(
                    "engine.in_flight",
                    f"{served.requests_open} requests are still open after the drain, so the KV"
                    " memory cannot be given back",
                )
            await asyncio.sleep(POLL_S)
        self._listener = None
        served.on_request = lambda protocol: None
        served.is_draining = served.is_continued = False
        wait_s = max(0.0, end - time.monotonic())
        resident_bytes = await served.link.give_memory(wait_s, is_kept=keep_kv)
        if self._seat is not None:
            self._seat.leave()
        self._phases.step("rested")
        return RestedMsg(resident_bytes)

    async def place_weights(self, budget_s: float, *, is_away: bool) -> WeightsPlacedMsg:
        """Release the weights on every rank, or map them again."""
        self._phases.step("place_weights")
        async with self._memory:
            if not self._phases.is_parked:  # woken meanwhile, which has mapped them
                return WeightsPlacedMsg(False)
            return await self._served.link.place(budget_s, is_away=is_away)

    @property
    def _server(self) -> web.Server:
        assert self._runner.server is not None  # since `prepare`
        return self._runner.server

    def _is_idle(self) -> bool:
        is_arriving = self._listener is not None and self._listener.is_arriving
        return not is_arriving and not self._served.requests_open


def is_our_fault(record: logging.LogRecord) -> bool:
    """A filter of aiohttp's log, in which each request that it refuses is an error with a stack
    trace that quotes it: users' text, and as many lines as they like."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http_exceptions.HttpProcessingError | web.RequestPayloadError)
