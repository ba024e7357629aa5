"""The model that is served, and the state of its engine: what the routes are given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from engine.backends.reference.grammar import Grammars
from engine.backends.reference.http.model_link import ModelLink
from engine.backends.reference.http.replies import ApiError
from engine.backends.reference.http.stream import MarkedStream
from engine.backends.reference.http.text import Tokenizer
from engine.backends.reference.link import ReadyMsg
from plumbing import hop


@dataclass
class ServedModel:
    """The backend keeps it up to date. `names`: its own first, then those that clients also use.

    `is_behind_gateway`: the connections are the gateway's, whose headers are obeyed.
    `is_continued`: a drain leaves streams to the next engine.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    link: ModelLink
    engine: str = ""
    token: int = 0
    is_behind_gateway: bool = False
    is_draining: bool = False
    is_continued: bool = False
    rejected: int = 0
    replayed: int = 0  # tokens of journals, of requests that went on
    ready: ReadyMsg | None = None
    grammars: Grammars | None = None
    continuation_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    requests_open: int = 0  # between their headers and the end of their answer
    streams: set[MarkedStream] = field(default_factory=set)  # that another engine can continue
    on_request: Callable[[asyncio.BaseProtocol], None] = lambda protocol: None

    @property
    def model_name(self) -> str:
        return self.names[0]

    @property
    def limits(self) -> ReadyMsg:
        assert self.ready is not None  # connections are accepted only afterwards
        return self.ready

    def check_model(self, asked: str | None) -> None:
        """Raises ApiError 404."""
        if asked is not None and asked not in self.names:
            what = f"The model {asked[:64]!r} does not exist; this engine serves"
            what = f"{what} {self.model_name!r}."
            raise ApiError(404, what, code="model_not_found", param="model")

    def is_marked(self, request: web.Request) -> bool:
        """Whether a gateway of this release asks, and so can continue the answer. Not where the
        body is compressed: a journal behind it would be taken for a part of it."""
        is_plain = "Content-Encoding" not in request.headers
        is_gateways = request.headers.get(hop.GATEWAY) == str(hop.VERSION)
        return self.is_behind_gateway and is_gateways and is_plain
