"""A child of a gateway without an engine behind it: answers with its pid, for tests of processes.

`GET /` is answered at once. `GET /stream` gets a first chunk, and the rest when the file that the
query names exists. `STUB` in the environment names what goes wrong: see `main`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time

from msgspec.structs import replace

from gateway import messages as msg
from gateway.core import events as ev
from gateway.core.events import Ending
from gateway.schema import GatewayRequest, GatewayUpstream
from gateway.server.client_listener import Parent
from gateway.server.main import run
from plumbing.errors import UsageError
from plumbing.gateway_protocol import Continuation
from plumbing.wire.fds import OwnedFd
from tests.helpers import auntil

FAULT_ENV = "STUB"


class StubDoors:
    def __init__(self, settings: msg.ConfigureGatewayMsg, parent: Parent) -> None:
        if os.path.exists(os.path.join(os.fsdecode(settings.directory), "refuse")):
            raise UsageError("gateway.bad_tls", "the stub refuses its settings")
        self._listening: OwnedFd | None = None
        self._streams: set[asyncio.Task[None]] = set()
        self._answered = self._door = 0
        self._pauses = msg.HistogramTally(msg.PAUSE_BUCKETS_S)
        self._added = msg.HistogramTally(msg.ADDED_BUCKETS_S)
        self._upstream: GatewayUpstream | None = None
        self._parent = parent
        self._loop = asyncio.get_running_loop()

    def accept(self, listening: OwnedFd, address: str) -> None:
        if self._listening is not None:
            self._close()
        self._listening = listening
        os.set_blocking(listening.fileno(), False)
        self._loop.add_reader(listening.fileno(), self._acceptable)

    def _acceptable(self) -> None:
        assert self._listening is not None
        listener = socket.socket(fileno=os.dup(self._listening.fileno()))
        try:
            conn, _ = listener.accept()
        except BlockingIOError:
            return
        finally:
            listener.close()
        conn.setblocking(False)
        task = self._loop.create_task(self._serve(conn))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)

    async def _serve(self, sock) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            name, _, until = path.partition("?")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            writer.write(f"{os.getpid()}\n".encode())
            await writer.drain()
            if name == "/stream":
                await auntil(lambda: os.path.exists(until), "the end of the stream")
            writer.write(b"end\n")
            await writer.drain()
            self._answered += 1
            self._pauses.observe(0.03)
            self._added.observe(0.0004)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def told(self, event: ev.GatewayEvent) -> None:
        match event:
            case ev.EngineGranted(engine, token):
                self._upstream = GatewayUpstream(engine, token, True, "", Continuation.EXACT, None)
                self._parent.happened(
                    msg.GatewayEventMsg("gateway.stub", f"granted {engine} {token}")
                )
            case ev.NobodyGranted():
                self._upstream = None
            case ev.DoorSet():
                self._door = event.number

    def set_model_doors(self, doors: msg.ModelDoorsMsg) -> None:
        pass

    def demand(self) -> msg.ModelDemandMsg | None:
        return None

    async def stop(self, budget_ms: float) -> None:
        self._close()
        if self._streams:
            await asyncio.wait(self._streams, timeout=budget_ms / 1000)

    def _close(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening.fileno())
            self._listening.close()
            self._listening = None

    def beat(self, progress: int) -> msg.GatewayBeatMsg:
        whole = GatewayRequest(str(Ending.WHOLE), Continuation.EXACT, self._answered)
        return msg.GatewayBeatMsg(
            progress,
            is_accepting=self._listening is not None,
            load=replace(msg.NO_LOAD, in_flight=len(self._streams)),
            totals=msg.GatewayTotals(
                requests=(whole,),
                pause_s=self._pauses.so_far(),
                added_s=self._added.so_far(),
            ),
            upstream=self._upstream,
            door=self._door,
        )


if __name__ == "__main__":
    fault = os.environ.get(FAULT_ENV)
    if fault == "exit":
        sys.exit(7)
    if fault == "mute":
        time.sleep(3600)
    run(StubDoors)
