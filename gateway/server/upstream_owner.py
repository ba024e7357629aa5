"""What a connection to an engine needs of the shell around it: its client, its owner, its turn.

A replay takes a microsecond or more for each token, and a failover starts many long ones at once.
So they are read in slices, in turns, `TURN_S` in each turn of the loop: clients, other streams and
the beat to the parent wait no longer for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeVar

from gateway.core.events import GatewayEffect, GatewayEvent
from gateway.server.idle_connections import IdleConnections

UpstreamT = TypeVar("UpstreamT", contravariant=True)

TURN_S = 0.005  # a slice more is less than twice that, unless one event has megabytes


class BodySink(Protocol):
    """The client that an answer is for. While `is_full` it takes bytes slower than they come."""

    is_full: bool

    def send_body(self, data: bytes) -> None: ...
    def gather(self) -> None: ...
    def release(self) -> bool: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Slices(Protocol):
    """A replay."""

    def read_slice(self) -> bool: ...


class Upstreams(Protocol[UpstreamT]):
    """Who opens these connections: the shell around the core."""

    replays: ReplayTurns

    def sent(self, upstream: UpstreamT) -> None: ...
    def connect(self, upstream: UpstreamT) -> None: ...
    def handle(self, event: GatewayEvent) -> None: ...
    def perform_outbox(self) -> None: ...
    @property
    def idle_connections(self) -> IdleConnections: ...
    @property
    def outbox(self) -> Sequence[GatewayEffect]:
        """Always the same one."""

    def now_ms(self) -> float: ...


class ReplayTurns:
    """The replays that have something to read."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Slices] = deque()
        self._is_due = False

    def add(self, upstream: Slices) -> None:
        """Call its `read_slice` until that says that there is no more."""
        self._waiting.append(upstream)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        end_s = time.monotonic() + TURN_S
        while self._waiting:
            upstream = self._waiting.popleft()
            if upstream.read_slice():
                self._waiting.append(upstream)
            if time.monotonic() >= end_s:
                break
        self._is_due = bool(self._waiting)
        if self._is_due:
            self._loop.call_soon(self._take_turns)
