"""The canaries of one incarnation: which way each one takes, and the record of what it found.

A waking backend can only be asked over the channel. One that serves behind a gateway is asked
through its private socket, the way of real requests, so that a backend whose HTTP side does not
accept, or is stuck, is found. Without a gateway requests arrive on a socket that other engines
have, too, and the channel is the only way to ask this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.messages import CanaryMsg, RunCanaryMsg
from engine.supervisor.channel import BackendChannel
from engine.supervisor.http_canary import HttpCanary
from plumbing.service.clock import rfc3339
from plumbing.service.events import EventLog

Done = Callable[[bool, str], object]


class Canaries:
    """One at a time."""

    def __init__(self, channel: BackendChannel, log: EventLog) -> None:
        self.private_path: str | None = None  # where the backend serves, behind a gateway
        self.last: dict[str, Any] | None = None
        self._channel = channel
        self._log = log
        self._by_http: HttpCanary | None = None  # while it is on its way

    @property
    def problem(self) -> str | None:
        """Why the one that is on its way has no answer yet."""
        return self._by_http.problem if self._by_http is not None else None

    def gate(self, on_done: Done) -> None:
        """The one before the backend serves: call `on_done` with its verdict."""
        self._ask_channel(on_done, is_idle=False)

    def check(self, on_done: Done) -> None:
        """One while the backend serves, and is idle."""
        if self.private_path is None:
            self._ask_channel(on_done, is_idle=True)
            return
        self._by_http = HttpCanary(
            self.private_path,
            on_verdict=lambda ok, detail: self._done(on_done, ok, detail, is_idle=True),
            on_no_way=lambda: self._ask_channel(on_done, is_idle=True),
        )

    def stop(self) -> None:
        """Nobody waits for the one that is on its way any more."""
        if self._by_http is not None:
            self._by_http.close()
            self._by_http = None

    def _ask_channel(self, on_done: Done, *, is_idle: bool) -> None:
        self._by_http = None

        def answered(reply: CanaryMsg) -> None:
            self._done(on_done, reply.ok, reply.detail, is_idle=is_idle)

        self._channel.ask(RunCanaryMsg(), CanaryMsg, answered)

    def _done(self, on_done: Done, ok: bool, detail: str, *, is_idle: bool) -> None:
        self._by_http = None
        verdict = "passed" if ok else "failed"
        event = self._log.record(
            "engine.canary",
            f"canary {verdict}" + (f": {detail}" if detail else ""),
            "info" if ok else "error",
            {"ok": ok, "detail": detail, "is_idle": is_idle},
        )
        self.last = {"ok": ok, "at": rfc3339(event.ts)}
        on_done(ok, detail)
