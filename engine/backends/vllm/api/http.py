"""vLLM's own HTTP server: on a private socket from the start, on the lent one once it serves.

Owns both sockets. Building the server takes half a second, so it is built and tried while the
engine prepares; at the grant only a listening socket is added to it.

Surprising: the private socket has a path only until the trial is over. After that nothing can
connect to it, and a killed process leaves no file behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import time
from typing import Any

import aiohttp
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.v1.engine.async_llm import AsyncLLM

from engine.backends.channel import until_done
from engine.backends.process import ENGINE_ID_ENV
from engine.backends.vllm.api.gateway_endpoints import (
    CONNECTION,
    Gate,
    Marks,
    Traffic,
    body_bytes_max,
)
from plumbing.errors import UnderstudyError, UsageError
from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

# vLLM's flags that its server takes by the same names.
SERVER_FLAGS = (
    *("host", "port", "h11_max_incomplete_event_size", "h11_max_header_count"),
    *("enable_ssl_refresh", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
    "ssl_ciphers",
)
BACKLOG = 4096  # the lock server's own: listening again with less would cut the shared queue
START_WAIT_S = 60.0
START_POLL_S = 0.005
STOP_POLL_S = 0.001  # the loop's next turns see the connections closed
TRIAL_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)  # in every vocabulary
TRIAL_TOKENS = 2  # a prefill and a decode
TRIAL_WAIT_S = 600.0  # the first inference may compile kernels


def bind(args: argparse.Namespace, path: str) -> socket.socket:
    """The private socket, at `path`; vLLM also checks the arguments that only its server uses, such
    as tool call parsers, and loads those.

    Raises:
        UsageError: `vllm.arguments`.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    args.uds = path
    try:
        sock: socket.socket = setup_server(args, reuse_port=False)[1]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError("vllm.arguments", f"vLLM refuses its arguments: {error}") from error
    return sock


class Front:
    """The server of one engine; made by `start`."""

    def __init__(self, args: argparse.Namespace, model_config: Any) -> None:
        self.traffic = Traffic(os.environ.get(ENGINE_ID_ENV, ""))
        self.body_max = 0
        self._args, self._model_config = args, model_config
        self._app: Any = None
        self._task: asyncio.Task[Any] | None = None
        self._lent: asyncio.Server | None = None

    @classmethod
    async def start(
        cls,
        engine: AsyncLLM,
        args: argparse.Namespace,
        sock: socket.socket,
        body_max: int | None = None,
    ) -> Front:
        """Build vLLM's application and serve it on the private `sock`. `body_max` is the largest
        request body that a gateway may pass on, in bytes; by default it depends on the model.

        Raises:
            UsageError: `vllm.not_generative`.
            UnderstudyError: `vllm.front_failed`.
        """
        tasks = await engine.get_supported_tasks()
        if "generate" not in tasks:
            raise UsageError(
                "vllm.not_generative",
                f"{args.model} does not generate text (its tasks: {', '.join(sorted(tasks))}), and"
                " a takeover is checked by generating a token; serve it with `vllm serve`",
            )
        front, model = cls(args, engine.model_config), engine.model_config
        level = logging.getLogger().level
        front._app = build_app(args, tasks, model)
        logging.getLogger().setLevel(level)  # one of its libraries silences all but errors
        router = front._app.router  # the marks lie inside of all middleware
        router.middleware_stack = Marks(router.middleware_stack, front.traffic)
        await init_app_state(engine, front._app.state, args, tasks)
        await front._listen_privately(sock)
        front.body_max = body_max or body_bytes_max(
            model.max_model_len, is_multimodal=model.is_multimodal_model
        )
        front.traffic.is_dead = lambda: engine.errored
        front.traffic.on_dead = front.close
        # uvicorn uses it for every connection from now on.
        config = front._app.state.server.config
        config.loaded_app = Gate(config.loaded_app, front.traffic)
        return front

    @property
    def models(self) -> tuple[str, ...]:
        """The names by which clients may ask for it, adapters included."""
        names = self._args.served_model_name or [self._args.model]
        return (*names, *(each.name for each in self._args.lora_modules or ()))

    @property
    def has_parsers(self) -> bool:
        """Whether its chats go through a parser of reasoning or tools."""
        chat = getattr(self._app.state, "openai_serving_chat", None)
        return getattr(chat, "parser_cls", Any) is not None

    @property
    def keeps_responses(self) -> bool:
        """Whether an answer of the Responses API is more than what one question to the engine says:
        stored, made with tools, or by an adapter that may be loaded meanwhile."""
        return bool(
            envs.VLLM_ENABLE_RESPONSES_API_STORE
            or envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING
            or self._args.tool_server
        )

    def check_no_tls(self) -> None:
        """Raises:
        UsageError: `vllm.tls_behind_gateway`.
        """
        if self._args.ssl_keyfile or self._args.ssl_certfile:
            raise UsageError(
                "vllm.tls_behind_gateway",
                "--ssl-keyfile and --ssl-certfile are set, but clients' connections end at the"
                " gateway; give the certificate to `gateway serve` (--tls-cert, --tls-key)",
            )

    async def _listen_privately(self, sock: socket.socket) -> None:
        """Serve as `vllm serve` does, with the same settings."""
        args, log_config = self._args, get_uvicorn_log_config(self._args)
        settings = {name: getattr(args, name) for name in SERVER_FLAGS}
        if log_config is not None:
            settings["log_config"] = log_config
        serving = serve_http(
            self._app,
            sock=sock,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            **settings,
        )
        self._task = asyncio.create_task(serving)
        end = time.monotonic() + START_WAIT_S
        while not getattr(getattr(self._app.state, "server", None), "started", False):
            if self._task.done() or time.monotonic() > end:
                raise UnderstudyError(
                    "vllm.front_failed", "vLLM's HTTP server did not start; its log has the reason"
                )
            await asyncio.sleep(START_POLL_S)

    async def warm_up(self) -> None:
        """Send one request through the whole stack, so that a client's is never the first; then
        unlink the private socket.

        Raises:
            UnderstudyError: `vllm.trial_failed`.
        """
        room = max(1, self._model_config.max_model_len - TRIAL_TOKENS)
        body = {
            "model": (self._args.served_model_name or [self._args.model])[0],
            "prompt": list(TRIAL_PROMPT[:room]),
            "max_tokens": TRIAL_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        keys = self._args.api_key or [envs.VLLM_API_KEY]
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys[0] else {}
        url = f"{'https' if self._args.ssl_keyfile else 'http'}://trial/v1/completions"
        connector = aiohttp.UnixConnector(self._args.uds)
        timeout = aiohttp.ClientTimeout(total=TRIAL_WAIT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                # The certificate names the public host, and this is our own socket.
                session.post(url, json=body, headers=headers, ssl=False) as reply,
            ):
                status, text = reply.status, await reply.text()
        except aiohttp.ClientError as error:  # for example, a client certificate is required
            logger.warning("the trial request got no answer: %s", error)
            return
        finally:
            os.unlink(self._args.uds)
        if status >= 500:
            raise UnderstudyError(
                "vllm.trial_failed", f"the first request failed with {status}: {text[:500]}"
            )
        if status >= 400:  # another kind of model; the canary does not need this
            logger.warning("the trial request was refused with %d: %s", status, text[:500])

    # ------------------------------------------------------------------ the lent socket

    @property
    def has_ended(self) -> bool:
        """Whether vLLM itself has stopped the server, as it does when its engine dies."""
        return self._task is not None and self._task.done()

    async def open(self, listening: OwnedFd) -> None:
        """Let the running server accept from `listening`; takes it."""
        server, loop = self._app.state.server, asyncio.get_running_loop()
        config = server.config

        def protocol() -> asyncio.Protocol:
            state = dict(server.lifespan.state)
            made: asyncio.Protocol = config.http_protocol_class(
                config=config, server_state=server.server_state, app_state=state
            )
            state[CONNECTION] = made  # in the scope of each of its requests
            return made

        sock = socket.socket(fileno=listening.detach())
        sock.setblocking(False)
        self._lent = await loop.create_server(protocol, sock=sock, ssl=config.ssl, backlog=BACKLOG)

    def close(self) -> None:
        """Stop accepting; connections queued on the lent socket are for the next engine."""
        if self._lent is not None:
            self._lent.close()

    async def drain(self, budget_s: float, *, resume: bool = False) -> None:
        """Stop accepting, finish requests on open connections, and flush their responses. `resume`:
        leave the streams that can be continued to the next engine."""
        self.traffic.is_draining = True
        self.close()
        if resume:
            await self.traffic.hand_over()
        connections = self._app.state.server.server_state.connections
        await until_done(
            lambda: [connection.transport for connection in connections],
            lambda: not self.traffic.in_flight,
            budget_s,
        )
        for connection in list(connections):
            connection.shutdown()

    async def stop(self, budget_s: float) -> None:
        """After `drain`: cut the connections that are still open, and wait until nothing of their
        requests runs. Then `open` may follow again.

        Raises:
            UnderstudyError: `vllm.rest_in_flight`.
        """
        connections, traffic = self._app.state.server.server_state.connections, self.traffic
        began = time.monotonic()
        while connections or traffic.in_flight:
            spent_s = time.monotonic() - began
            if spent_s > budget_s:
                raise UnderstudyError(
                    "vllm.rest_in_flight",
                    f"{traffic.in_flight} requests on {len(connections)} connections are still in"
                    f" progress {budget_s:g} s after their connections were closed",
                )
            for connection in list(connections):
                # One that is closing has only its last bytes to send.
                if not connection.transport.is_closing() or spent_s > budget_s / 2:
                    connection.transport.abort()
            await asyncio.sleep(STOP_POLL_S)
        self._lent = None
        traffic.renew()
