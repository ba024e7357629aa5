"""The one pipe: what the HTTP process says to rank 0, and rank 0 to the other ranks.

The HTTP process knows rank 0 only; rank 0 passes on what concerns every rank and joins the answers.
A request that the supervisor's channel has, too, is the same message here (`engine.messages`). All
are notifications: one request of a kind is in flight at a time, except `submit`, whose answers
carry its number. Knows no text: prompts and answers are token ids here.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from engine.messages import (
    RANKS_MAX,
    CanaryMsg,
    Count,
    Id,
    KvMemoryKind,
    PlaceWeightsMsg,
    Rank,
    RestedMsg,
    RestMsg,
    RunCanaryMsg,
    Sentence,
    WeightsPlacedMsg,
    WokenMsg,
)
from plumbing.errors import InvariantError, UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.queue_page import ATTEMPT_BYTES
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Catalogue, Message

# The number of rank 0's end of the HTTP process's socket, and of a rank's sockets to other ranks,
# comma-separated: on rank 0 those to ranks 1, 2, …, else one.
LINK_ENV = "UNDERSTUDY_LINK"
PEERS_ENV = "UNDERSTUDY_PEERS"

TOKEN_BYTES = 5  # of a number of 32 bits in MessagePack
# The longest context of any Llama today is 2**20 tokens; a prompt is one frame.
PROMPT_TOKENS_MAX = 1 << 20
PROMPT_BYTES_MAX = PROMPT_TOKENS_MAX * TOKEN_BYTES
# Prompts of all unfinished requests together. A connection is dropped when it holds two frames'
# worth of unread bytes, and a client must never be able to cause that.
PROMPT_BYTES_UNFINISHED_MAX = PROMPT_BYTES_MAX + (1 << 20)
# Prompt and journal together fit the context; beside them are the sampling's lists.
FRAME_BYTES_MAX = PROMPT_BYTES_MAX + (256 << 10)

# Far below the three seconds without progress after which generation counts as hung.
TOKEN_INTERVAL_MS_MAX = 1000

# A process of this engine has ended: the cause is that one's to report.
RANK_LOST = "engine.rank_lost"

FinishReason = Literal["stop", "length"]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=PROMPT_TOKENS_MAX)]
M = TypeVar("M", bound=Message)


class Settings(Struct, frozen=True):
    """The command line's, for one rank. `max_context` None: what fits; `cache_tokens` None: as many
    as the slots hold."""

    directory: str
    slots: int
    max_context: int | None = None
    kv_bytes: int | None = None
    cache_tokens: int | None = None
    kv_memory: KvMemoryKind = "gms"
    may_adopt: bool = True
    has_audit: bool = False
    rank: Rank = 0
    ranks: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    token_interval_ms: int = 0


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True):
    """How to choose a token. `temperature` 0 is greedy; the same seed gives the same tokens.

    All but the first three depend on what was generated so far: `generation.constrained`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()


# ---------------------------------------------------------------------- HTTP process and rank 0


class ReadyMsg(Message, frozen=True, tag="ready"):
    """Weights mapped, decoder tried, no KV memory yet. From rank 0 to the HTTP process: the sizes
    are sums over all ranks, and `epoch` names every rank's."""

    weights_bytes: Count
    kv_bytes: Count
    max_context: Count
    vocab_size: Count
    stop_token_ids: tuple[int, ...]
    epoch: Sentence
    identity: dict[str, Any]


class TakeMemoryMsg(Message, frozen=True, tag="take_memory"):
    """Take memory for the KV cache as the holder of `active` under `token`; answered by `woken`."""

    token: Count
    era: Id


class SubmitMsg(Message, frozen=True, tag="submit"):
    """Generate; answered by one `token` message per token. `request` is its number.

    `made` are tokens of the answer that exist already, which did not end it: the request is resumed
    behind them. They count as generated in every respect, and none of them is sent again.
    """

    request: Count
    prompt: TokenIds
    max_tokens: Count
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()
    made: TokenIds = ()
    attempt: Annotated[bytes, Meta(max_length=ATTEMPT_BYTES)] = b""  # its name for the gateway


class CancelMsg(Message, frozen=True, tag="cancel"):
    """The client has left. There is no answer; a last token may be on its way."""

    request: Count


class TokenMsg(Message, frozen=True, tag="token"):
    """One token of one request. `finish_reason` "stop": it is the stop token, which counts and has
    no text. `progress` grows with every prefill chunk and every token, also of what is only
    computed again: what "not hung" means."""

    request: Count
    token: TokenId
    progress: Count
    finish_reason: FinishReason | None = None


class ProgressedMsg(Message, frozen=True, tag="progressed"):
    """Steps were done that make no token, or blocks published: how many the next engine was told of
    since the wake, and how many it would find."""

    progress: Count
    published: Count
    kept: Count


# ---------------------------------------------------------------------- rank 0 and other ranks


class ForwardMsg(Message, frozen=True, tag="forward"):
    """Run tokens through a slot of a cache, together with rank 0. Has no answer."""

    cache: Count
    slot: Count
    start: Count
    tokens: TokenIds


class FloatsMsg(Message, frozen=True, tag="floats"):
    """A part of a sum or of the logits, or the sum."""

    data: bytes


class BlockMsg(Message, frozen=True, tag="block"):
    """Copy the chunk at `start` of `slot` into a block, or the other way; or answer its checksum.
    Answered by `done`."""

    kind: Literal["save", "load", "checksum"]
    slot: Count = 0
    start: Count = 0
    block: Count = 0


class DistrustMsg(Message, frozen=True, tag="distrust"):
    """Report that a canary failed; answered by `done`."""


class DoneMsg(Message, frozen=True, tag="done"):
    checksum: Count = 0


LINK = Catalogue(
    *(ReadyMsg, TakeMemoryMsg, WokenMsg, RestMsg, RestedMsg, PlaceWeightsMsg, WeightsPlacedMsg),
    *(RunCanaryMsg, CanaryMsg, SubmitMsg, CancelMsg, TokenMsg, ProgressedMsg),
    *(ForwardMsg, FloatsMsg, BlockMsg, DistrustMsg, DoneMsg),
    frame_bytes_max=FRAME_BYTES_MAX,
)


class Pipe:
    """A model process's end of its connection to another process of the engine, `name`.

    It waits without a deadline: the other's end is noticed at once, and a hang is the supervisor's
    to notice. Every call raises UnderstudyError `engine.rank_lost`.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._client = BlockingClient.from_socket(sock, LINK)
        self._name = name
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def send(self, message: Message) -> None:
        try:
            self._client.notify(message)
        except UnreachableError as error:
            raise self._lost() from error

    def receive(self) -> Message:
        """The next message."""
        self.wait(None)
        try:
            return self._client.receive().message
        except UnreachableError as error:
            raise self._lost() from error

    def receive_as(self, kind: type[M]) -> M:
        message = self.receive()
        if not isinstance(message, kind):
            raise InvariantError(f"{self._name} sent {message.TYPE} instead of {kind.__name__}")
        return message

    def receive_all(self) -> list[Message]:
        """What has arrived."""
        found: list[Message] = []
        try:
            while True:
                found.append(self._client.receive(timeout_s=0).message)
        except WaitTimeoutError:
            return found
        except UnreachableError as error:
            raise self._lost() from error

    def wait(self, timeout_ms: int | None) -> bool:
        """Whether a message, or the end, has arrived before the time is over; None: none is."""
        return self._client.has_pending or bool(self._poll.poll(timeout_ms))

    def _lost(self) -> UnderstudyError:
        return UnderstudyError(
            RANK_LOST, f"{self._name} has ended, and an engine cannot continue without it"
        )


def digest_of(facts: Any) -> str:
    """What two processes compare in place of `facts`, which are JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def finish_reason(
    token: int, made: int, max_tokens: int, stop_token_ids: Sequence[int]
) -> FinishReason | None:
    """Why an answer ends with `token`, its `made`-th one; None: it continues."""
    if token in stop_token_ids:
        return "stop"
    return "length" if made >= max_tokens else None
