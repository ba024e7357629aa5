"""The HTTP process on its event loop: under a supervisor, or alone.

Owns the two ways to run and what ends them. Imported late, since aiohttp and the tokenizer are the
slow imports: by then the model process is at work.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Coroutine, Sequence
from typing import Any

import uvloop

from engine.backends import process
from engine.backends.channel import Channel
from engine.backends.phases import Phase
from engine.backends.reference.http.backend import Backend
from engine.backends.reference.http.model_link import join_ranks
from engine.backends.reference.http.routes import Service
from engine.backends.reference.http.spawn import ModelProcess
from engine.backends.reference.http.text import Tokenizer
from engine.backends.reference.link import Failed
from engine.messages import FaultReport, Prepared
from plumbing.errors import UnderstudyError, UsageError
from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

BACKLOG = 128  # standalone only; a lent socket keeps its owner's
ALONE_DRAIN_S = 10.0
CHILD_EXIT_S = 10.0  # between two units of work it sees that the link has ended
ENGINE_ALONE = "standalone"


def run(main: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def supervised(
    directory: str,
    model_name: str,
    sock: socket.socket,
    models: Sequence[ModelProcess],
) -> int:
    """Serve for a supervisor. Ends only by the process's end, which the supervisor decides."""
    channel = Channel(sock)
    link = join_ranks(models, lambda failed: channel.end(_report_of(failed)))
    try:
        backend = Backend(Service(model_name, Tokenizer.load(directory), link))
        ready = await backend.prepare()
    except UnderstudyError as error:
        channel.end(process.fault_report(error))
    channel.prepared(
        backend, Prepared(ready.weights_bytes, ready.kv_bytes, ready.epoch, ready.identity)
    )
    await asyncio.Event().wait()
    raise AssertionError("nobody sets that event")


def _report_of(failed: Failed) -> FaultReport:
    exit_code = 2 if failed.exit_code == 2 else 1
    return FaultReport(failed.code, failed.message, failed.permanent, exit_code)


async def alone(
    directory: str,
    model_name: str,
    port: int,
    models: Sequence[ModelProcess],
) -> int:
    """Serve on 127.0.0.1:`port` until SIGINT or SIGTERM.

    Raises:
        UnderstudyError: what the model process said before it ended; `engine.port_in_use`.
    """
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def fail(failed: Failed) -> None:
        if not ended.done():
            kind = UsageError if failed.exit_code == UsageError.exit_code else UnderstudyError
            ended.set_exception(kind(failed.code, failed.message))

    def stop() -> None:
        if not ended.done():
            ended.set_result(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    listening = _listen(port)
    link = join_ranks(models, fail)
    backend = Backend(Service(model_name, Tokenizer.load(directory), link))
    starting = asyncio.ensure_future(_start_alone(backend, listening))
    await asyncio.wait((starting, ended), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        logger.info("serving %s at http://127.0.0.1:%d/v1", model_name, starting.result())
    else:
        starting.cancel()
        listening.close()
    code = await ended
    if backend.phases.now is Phase.SERVING:
        await backend.drain(ALONE_DRAIN_S)
    link.close()
    for model in models:
        model.child.wait(CHILD_EXIT_S)
    return code


async def _start_alone(backend: Backend, listening: OwnedFd) -> int:
    with socket.socket(fileno=listening.duplicate().detach()) as sock:
        port = int(sock.getsockname()[1])
    await backend.prepare()
    await backend.wake(ENGINE_ALONE, 0, listening)
    checked = await backend.run_canary()
    if not checked.ok:
        raise UnderstudyError("engine.canary_failed", checked.detail)
    await backend.serve()
    return port


def _listen(port: int) -> OwnedFd:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
    except OSError as error:
        sock.close()
        raise UnderstudyError(
            "engine.port_in_use",
            f"port {port} cannot be bound: {error.strerror}; choose another --port",
        ) from error
    sock.listen(BACKLOG)
    return OwnedFd(sock.detach())
