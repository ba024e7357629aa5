"""Messages between the HTTP process and the model processes, over a socket pair each.

A question that the supervisor's channel has, too, is the same message here (`engine.messages`). All
are notifications: one request of a kind is in flight at a time, except `submit`, whose answers
carry its number. Must not know text: prompts and answers are token ids here. Every rank has such a
link, for its settings, its memory and its failure; requests go to rank 0 only, which leads the
others.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from engine.messages import (
    RANKS_MAX,
    CanaryMsg,
    Count,
    FaultReportMsg,
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
from plumbing.pod.queue_page import ATTEMPT_BYTES
from plumbing.wire.messages import Catalogue, Message

LINK_ENV = "UNDERSTUDY_LINK"  # the number of the model process's end, in its environment
# Its sockets to the other ranks, comma-separated: on rank 0 those to ranks 1, 2, …, else one.
PEERS_ENV = "UNDERSTUDY_PEERS"

TOKEN_BYTES = 4
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

FinishReason = Literal["stop", "length"]

# The code of a failure that is only the effect of another rank's.
RANK_LOST = "engine.rank_lost"

PackedPrompt = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=PROMPT_BYTES_MAX)]
"""See `pack`."""
PackedTokens = Annotated[bytes, Meta(max_length=PROMPT_BYTES_MAX)]
Attempt = Annotated[bytes, Meta(max_length=ATTEMPT_BYTES)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class ConfigureMsg(Message, frozen=True, tag="configure"):
    """The first frame: the command line's settings. `max_context` None: what fits;
    `cache_tokens` None: as many as the slots hold."""

    directory: str
    slots: Annotated[int, Meta(ge=1, le=1024)]
    max_context: Annotated[int, Meta(ge=2, le=PROMPT_TOKENS_MAX)] | None
    kv_bytes: Count | None
    cache_tokens: Count | None = None
    kv_memory: KvMemoryKind = "gms"
    may_adopt: bool = True
    has_audit: bool = False
    rank: Rank = 0
    ranks: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    token_interval_ms: Annotated[int, Meta(ge=0, le=TOKEN_INTERVAL_MS_MAX)] = 0


class ReadyMsg(Message, frozen=True, tag="ready"):
    """Weights mapped, decoder tried, no KV memory yet. Sizes are those of the sending rank."""

    weights_bytes: Count
    kv_bytes: Count
    max_context: Count
    vocab_size: Count
    stop_token_ids: tuple[int, ...]
    epoch: Sentence
    identity: dict[str, Any]


class TakeMemoryMsg(Message, frozen=True, tag="take_memory"):
    """Take memory for the KV cache, as the holder of `active` under `token`; answered by `woken`.

    Rank 0 gets it when all others have answered. `epochs` and `identities`, as digests, are those
    of every rank's weights.
    """

    token: Count
    era: Id
    epochs: tuple[Sentence, ...]
    identities: tuple[Id, ...]


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
    bad_words: tuple[tuple[int, ...], ...] = ()


class SubmitMsg(Message, frozen=True, tag="submit"):
    """Generate; answered by one `token` message per token.

    `made` are tokens of the answer that exist already: the request is resumed behind them. They
    count as generated in every respect, and none of them is sent again.
    """

    request: Count
    prompt: PackedPrompt
    max_tokens: Count
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    made: PackedTokens = b""
    attempt: Attempt = b""  # its name for the gateway


class CancelMsg(Message, frozen=True, tag="cancel"):
    """The client has left. There is no answer; a last token may be on its way."""

    request: Count


class TokenMsg(Message, frozen=True, tag="token"):
    """One token of one request. `finish_reason` "stop": it is the stop token and has no text."""

    request: Count
    token: TokenId
    progress: Count
    finish_reason: str | None = None


class ProgressedMsg(Message, frozen=True, tag="progressed"):
    """Steps were done that make no token: of a prompt, or of tokens that were made before."""

    progress: Count


class PublishedMsg(Message, frozen=True, tag="published"):
    """How many blocks the next engine was told of, since the wake, and how many it would find."""

    blocks: Count
    kept: Count


LINK = Catalogue(
    ConfigureMsg,
    ReadyMsg,
    TakeMemoryMsg,
    WokenMsg,
    RestMsg,
    RestedMsg,
    PlaceWeightsMsg,
    WeightsPlacedMsg,
    RunCanaryMsg,
    CanaryMsg,
    SubmitMsg,
    CancelMsg,
    TokenMsg,
    ProgressedMsg,
    PublishedMsg,
    FaultReportMsg,
    frame_bytes_max=FRAME_BYTES_MAX,
)


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as 32-bit numbers: a fifth of the work of a list of integers."""
    return array("I", tokens).tobytes()


def unpack(packed: bytes) -> tuple[int, ...]:
    return tuple(array("I", packed))


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
