"""The backend on its event loop: prepared, awake, serving, draining, as the supervisor asks.

Owns the lent listening socket and the HTTP server behind it.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import web

from engine.backends.channel import POLL_S, Channel, is_private, until_done
from engine.backends.process import BackendProcess
from engine.backends.reference.application import ServedModel, continuation_id, make_app
from engine.backends.reference.config import Settings
from engine.backends.reference.rank import ModelLoop, Rank
from engine.backends.reference.ranks import Peers
from engine.backends.reference.text import Tokenizer
from engine.messages import CanaryMsg, PreparedMsg, RestedMsg, WeightsPlacedMsg, WokenMsg
from plumbing import gateway_protocol as hop
from plumbing.errors import UnderstudyError
from plumbing.service.log import is_our_fault
from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

BACKLOG = 4096  # as the supervisor's: its length is set again when accepting begins
KEEPALIVE_S = 75.0
LINE_BYTES_MAX = 64 * 1024  # of a request, and of a header: as a gateway lets pass
# A gateway's greeting and a request, each on a connection of its own.
HEADERS = f"HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n{hop.GATEWAY}: {hop.VERSION}\r\n"
BODY = '{"prompt": "a", "max_tokens": 3, "stream": true}'
REHEARSED = (
    f"GET {hop.HELLO_PATH} {HEADERS}\r\n",
    f"POST /v1/completions {HEADERS}Content-Length: {len(BODY)}\r\n\r\n{BODY}",
)
# For connections that are cut when the drain's budget is spent. Not 0, which aiohttp takes for "no
# limit"; not more, because its `shutdown` waits that long for idle connections too.
FLUSH_S = 0.1


async def serve(
    settings: Settings,
    names: tuple[str, ...],
    sock: socket.socket,
    member: BackendProcess,
    peers: Peers,
) -> None:
    """Serve for the supervisor at the other end of `sock`, which decides when this process ends."""
    channel = Channel(sock)
    try:
        rank = Rank(settings, member, peers)
        ready, tokenizer = rank.ready, Tokenizer.load(settings.directory)
        model = ModelLoop(rank, settings.slots, member.end, member.counts)
        served = ServedModel(names, tokenizer, model, ready, member.engine)
        served.continuation_id = continuation_id(settings.directory, names[0], ready)
        backend = ReferenceBackend(served, rank)
        await backend.prepare()
    except Exception as error:
        member.end(error)
    prepared = PreparedMsg(
        ready.weights_bytes,
        ready.kv_bytes,
        ready.epoch,
        continuation=served.continuation_id,
        can_rest=member.seat is not None,
        cannot_offload="",
    )
    channel.prepared(backend, prepared)
    await asyncio.Event().wait()


class ReferenceBackend:
    """One incarnation's model service: what `channel.Backend` asks for."""

    def __init__(self, served: ServedModel, rank: Rank) -> None:
        """Rank 0 obeys between two steps of the model."""
        self._served, self._model, self._rank = served, served.model, rank
        self._lent: socket.socket | None = None  # from a wake until it serves
        self._accepting: asyncio.Server | None = None
        logging.getLogger("aiohttp.server").addFilter(is_our_fault)
        self._runner = web.AppRunner(
            make_app(served),
            handler_cancellation=True,  # a client that leaves frees its slot
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
        )

    async def prepare(self) -> None:
        """Build the HTTP server, and try it."""
        await self._runner.setup()
        await self._rehearse()

    async def _rehearse(self) -> None:
        """Answer what a gateway sends, over the canary's memory, whatever comes of it. What runs
        for the first time takes several times as long, and should not do so after a grant."""
        loop, served = asyncio.get_running_loop(), self._served
        served.is_behind_gateway = True
        self._rank.rehearse(is_on=True)
        for request in REHEARSED:
            ours, theirs = socket.socketpair()
            with ours:
                ours.setblocking(False)
                await loop.connect_accepted_socket(self._server, theirs)
                await loop.sock_sendall(ours, request.encode())
                while await loop.sock_recv(ours, LINE_BYTES_MAX):
                    pass
        self._rank.rehearse(is_on=False)

    async def wake(self, token: int, era: str, listening: OwnedFd) -> WokenMsg:
        """Take KV memory and keep `listening` for `serve`. Takes the fd."""
        with listening:
            self._served.token = token
            self._served.is_behind_gateway = is_private(listening)
            self._lent = socket.socket(fileno=listening.detach())
        return self._rank.take_memory(token, era)

    async def run_canary(self) -> CanaryMsg:
        return self._rank.check()

    async def serve(self) -> None:
        assert self._lent is not None
        loop, lent = asyncio.get_running_loop(), self._lent
        self._accepting = await loop.create_server(self._server, sock=lent, backlog=BACKLOG)

    @property
    def in_flight(self) -> int:
        return self._model.in_flight

    async def drain(self, budget_s: float, *, resume: bool = False) -> None:
        """Accept no more, answer requests on open connections, cut them when the budget is spent.
        With `resume`, streams that the gateway continues are left to that at once."""
        self._served.is_draining = True
        self._served.is_continued = resume
        if self._accepting is not None:
            self._accepting.close()
        elif self._lent is not None:
            self._lent.close()
        self._lent = self._accepting = None
        if resume:
            for stream in list(self._served.streams):
                stream.leave()
        server = self._server
        await until_done(
            lambda: [connection.transport for connection in server.connections],
            lambda: not self._served.requests_open,
            budget_s,
        )
        server.pre_shutdown()
        await server.shutdown(FLUSH_S)

    async def rest(self, budget_s: float, *, keep_kv: bool) -> RestedMsg:
        """After a drain: give the KV memory back on every rank, which leaves the serving file.

        Raises:
            UnderstudyError: `engine.in_flight`, requests that the drain has cut have not ended.
        """
        loop, served = asyncio.get_running_loop(), self._served
        end = loop.time() + budget_s
        while served.requests_open or self._model.in_flight:
            if loop.time() >= end:
                raise UnderstudyError(
                    "engine.in_flight",
                    f"{served.requests_open} requests are still open after the drain, so the KV "
                    "memory cannot be freed",
                )
            await asyncio.sleep(POLL_S)
        served.is_draining = served.is_continued = False
        left_s = max(0.0, end - loop.time())
        return self._rank.give_memory(keep_kv, left_s)

    async def place_weights(self, budget_s: float, *, is_away: bool) -> WeightsPlacedMsg:
        """Release the weights on every rank, or map them again."""
        return self._rank.place(is_away, budget_s)

    @property
    def _server(self) -> web.Server:
        assert self._runner.server is not None  # since `prepare`
        return self._runner.server
