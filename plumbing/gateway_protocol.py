"""The private protocol between the gateway and an engine: HTTP/1.1 on the engine's Unix socket.

The gateway forwards a client's request unchanged and adds the header `GATEWAY`. The engine marks
its event stream: after the events of one output it writes one comment with the token ids of these
events, in the same write, and after the last event `END`. A resumed request carries its journal,
the token ids of the answer so far, as binary data after the client's body. A journal is only
numbers here; `gateway/core` knows what is replayed and what the client has seen.

The surprising thing: the comment comes *after* its events. vLLM makes two events of the first
output of a chat, so a comment before an event could not tell which events belong to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

# Of the words below. During an upgrade a gateway meets engines of another release: where versions
# differ, an engine marks nothing and the gateway continues nothing. `Hello` only gains fields.
VERSION = 1

# Clients cannot set any header with this prefix: the gateway removes them from requests.
HEADER_PREFIX = "x-understudy-"
GATEWAY = "X-Understudy-Gateway"  # request, `VERSION` of the gateway: mark the stream
JOURNAL = "X-Understudy-Journal"  # request to resume, "<body bytes>,<tokens>,<chunks>"
ATTEMPT = "X-Understudy-Attempt"  # request: its name on the page of what is queued, as hex
ENGINE = "X-Understudy-Engine"  # response: who answers,
TOKEN = "X-Understudy-Token"  # under which grant of the lock,
CONTINUATION = "X-Understudy-Continuation"  # and what a failover does to this answer

# Between a front and the gateway of a pod, which passes the engine's answer on as it is:
# Response: "<pod>,<incarnation>", who passes it on; to a front's client "<pod>".
POD = "X-Understudy-Pod"
# Request to resume: what it needs; response: what the engine that answers has.
CONTINUATION_ID = "X-Understudy-Continuation-Id"

# Paths of the hop itself; the gateway answers 404 to a client that asks for anything below it.
HOP_PATHS = "/understudy/"
HELLO_PATH = "/understudy/hello"  # GET: a `Hello`, as JSON
WATCH_PATH = "/understudy/watch"  # GET, by a front: `PodReport`s, one line of JSON each
CHANNELS_PATH = "/understudy/channels"  # GET, by a front: the connection then has channels

GROUP_MARK = b": u="  # begins the comment behind the events of one group
END = b": end\n\n"  # behind the last event of a whole answer
# Behind a whole group, before the engine closes a stream that another engine is to resume: a
# handover, which says nothing against the request. Without it a break counts as a death.
HANDED_OVER = b": handed over\n\n"

JOURNAL_TOKENS_MAX = 1 << 20  # the longest context of a model today
ITEM_BYTES = 4  # token ids and chunk sizes travel as unsigned 32-bit numbers, as `array("I")`


class Continuation(StrEnum):
    """What becomes of an answer whose engine dies."""

    EXACT = "exact"  # goes on, bit-identical to an uninterrupted run
    STATE = "state"  # goes on with its exact state; floating point may choose between near-equals
    RETRY = "retry"  # nothing was delivered yet: asked again from the start
    NONE = "none"  # ends with a marked error


class Hello(msgspec.Struct, frozen=True):
    """What an engine says of itself under a grant; unknown fields are ignored.

    Streams resume only where `continuation_id` is equal: it stands for the weights, the tokenizer,
    the chat template, parsers, sampling defaults, adapters and the engine's minor version.
    `continuation` is the best class of its streams, and `problem` says why that is `none`.
    `version`: of the hop, 1 of engines that do not say. `backend_version`: vLLM's, for `/version`.
    `slots`: requests that it runs at once; 0: it does not say.
    """

    engine: Annotated[str, Meta(max_length=64)]
    token: int
    continuation_id: Annotated[str, Meta(max_length=128)]
    continuation: Continuation
    body_bytes_max: Annotated[int, Meta(ge=0)]
    models: tuple[str, ...] = ()
    problem: str | None = None
    version: int = 1
    backend_version: Annotated[str, Meta(max_length=128)] = ""
    slots: Annotated[int, Meta(ge=0)] = 0

    def as_understood(self) -> Hello:
        """What it means to a gateway of this release."""
        if self.version == VERSION:
            return self
        problem = (
            f"{self.engine} uses version {self.version} of the engine protocol and this gateway "
            f"version {VERSION}, so its streams cannot be continued; run one release in all"
            " processes of a pod"
        )
        return msgspec.structs.replace(self, continuation=Continuation.NONE, problem=problem)


# What a message of 64 bits can say: a front passes these figures on.
Count = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
# And these texts, to a terminal too: they have no character that steers one, or turns the direction
# of writing.
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]*\Z"
Word = Annotated[str, Meta(max_length=64, pattern=PRINTABLE)]
ModelName = Annotated[str, Meta(pattern=PRINTABLE)]


class PodModel(msgspec.Struct, frozen=True):
    """One model of a pod. `engine`: the one that requests go to, "" without one; tokens compare
    within an era only. `tier`: how near the model is to serving, `awake` to `cold`."""

    engine: Word = ""
    token: Count = 0
    era: Word = ""
    continuation_id: Annotated[str, Meta(max_length=128, pattern=PRINTABLE)] = ""
    continuation: Continuation = Continuation.NONE
    tier: Word = ""
    in_flight: Count = 0
    waiting: Count = 0
    room: Count = 0  # requests that it takes beside these
    slots: Count = 0  # of its engine, as in `Hello`


class PodReport(msgspec.Struct, frozen=True):
    """What the gateway of a pod says of its pod; unknown fields are ignored. `incarnation`: 64
    random bits of this gateway's start. `leaving_ms`: the time that is left to a pod that is told
    to end. `models`: by each name that a request may give."""

    pod: Word
    incarnation: Annotated[int, Meta(ge=1)]
    models: Annotated[dict[ModelName, PodModel], Meta(max_length=256)]
    body_bytes_max: Annotated[int, Meta(ge=0, le=1 << 53)]
    leaving_ms: Annotated[float, Meta(ge=0, le=1 << 53)] | None = None
    version: int = 1


class Journal(msgspec.Struct, frozen=True):
    """The tokens of an answer so far, and how many of them each output of the engine had."""

    tokens: Sequence[int]
    chunks: Sequence[int]


def group_end(tokens: Sequence[int], chunks: Sequence[int]) -> bytes:
    """The comment behind a group's events. Both are empty for events that no token caused."""
    return b"%b%b|%b\n\n" % (GROUP_MARK, _numbers(tokens), _numbers(chunks))


def read_group_end(comment: bytes) -> tuple[list[int], list[int]]:
    """The token ids and chunk sizes of a comment, from `GROUP_MARK` to its empty line.

    Raises:
        ValueError: not such a comment, or sizes that do not add up.
    """
    tokens, bar, chunks = comment.strip().removeprefix(GROUP_MARK).partition(b"|")
    if not bar or not comment.startswith(GROUP_MARK):
        raise ValueError("not the comment behind a group")
    ids = [int(each) for each in tokens.split(b",")] if tokens else []
    sizes = [int(each) for each in chunks.split(b",")] if chunks else []
    if sum(sizes) != len(ids) or any(size < 1 for size in sizes) or any(each < 0 for each in ids):
        raise ValueError(f"{len(ids)} tokens in chunks of {sizes}")
    return ids, sizes


def with_journal(body: bytes | bytearray, journal: Journal) -> tuple[bytes, str]:
    """The body of a request that is resumed, and the value of its `JOURNAL` header."""
    packed = array("I", journal.tokens).tobytes() + array("I", journal.chunks).tobytes()
    return b"".join((body, packed)), f"{len(body)},{len(journal.tokens)},{len(journal.chunks)}"


def without_journal(body: bytes, header: str) -> tuple[bytes, Journal]:
    """The client's body and the journal.

    Raises:
        ValueError: the header and the length of the body do not fit.
    """
    parts = [int(part) for part in header.split(",") if part.isascii() and part.isdigit()]
    if len(parts) != 3:
        raise ValueError(f"{header!r} is not a journal's header")
    size, tokens, chunks = parts
    if tokens > JOURNAL_TOKENS_MAX or size + ITEM_BYTES * (tokens + chunks) != len(body):
        raise ValueError(f"a body of {len(body)} bytes does not fit {header!r}")
    middle = size + ITEM_BYTES * tokens
    journal = Journal(array("I", body[size:middle]), array("I", body[middle:]))
    if sum(journal.chunks) != tokens or 0 in journal.chunks:
        raise ValueError(f"{tokens} tokens in chunks of {list(journal.chunks)[:8]}")
    return body[:size], journal


def read_attempt(header: str) -> bytes:
    """The name in an `ATTEMPT` header; nothing if there is none."""
    try:
        return bytes.fromhex(header)
    except ValueError:
        return b""


def _numbers(values: Sequence[int]) -> bytes:
    return b",".join(b"%d" % each for each in values)
