"""The life of one request at the gateway as one table.

    waiting ─ask→ asked ─hold→ answering ──whole──▶ done
       ▲            │  └─stream→ streaming ──whole──▶ done
       └─break, refusal┘           │    ▲
                              break│    │join
                                   ▼    │
                parked ─ask→ resuming ─stream→ replaying
                   ▲──break, refusal──┘──break───┘

Nothing was sent to the client in `waiting`, `asked` and `answering`, so a break there costs it
nothing: the request is asked again. `streaming` has sent something, and a break parks. What is sent
in `relaying` cannot be continued, and a break there is the end. `replaying` sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from plumbing.errors import InvariantError


class RequestState(StrEnum):
    WAITING = "waiting"  # for an engine, or its turn
    ASKED = "asked"  # no response yet
    ANSWERING = "answering"  # the answer is held until it is whole
    STREAMING = "streaming"  # events go to the client and into the journal
    RELAYING = "relaying"  # class none: bytes go to the client and are forgotten
    PARKED = "parked"  # a paused stream, for an engine or its turn
    RESUMING = "resuming"  # asked again with its journal, no response yet
    REPLAYING = "replaying"  # the engine plays what the client has
    DONE = "done"


class Turn(StrEnum):
    ASK = "ask"
    STREAM = "stream"  # the head of a marked stream
    HOLD = "hold"  # the head of an answer that is held
    RELAY = "relay"  # the head of any other, or an answer that outgrew its limit
    BREAK = "break"
    REFUSE = "refuse"  # not now: 429, 503, connection refused
    JOIN = "join"  # the replay has reached what the client has, and is equal to it
    FORGET = "forget"  # the journal is given up for its memory
    WHOLE = "whole"
    FAIL = "fail"  # a deadline, a final refusal, a mismatch, a third death
    LEAVE = "leave"  # the client is gone


_S, _T = RequestState, Turn

TRANSITIONS: Mapping[tuple[RequestState, Turn], RequestState] = {
    (_S.WAITING, _T.ASK): _S.ASKED,
    (_S.ASKED, _T.STREAM): _S.STREAMING,
    (_S.ASKED, _T.HOLD): _S.ANSWERING,
    (_S.ASKED, _T.RELAY): _S.RELAYING,
    (_S.ASKED, _T.BREAK): _S.WAITING,
    (_S.ASKED, _T.REFUSE): _S.WAITING,
    (_S.ANSWERING, _T.RELAY): _S.RELAYING,
    (_S.ANSWERING, _T.BREAK): _S.WAITING,
    (_S.STREAMING, _T.BREAK): _S.PARKED,
    (_S.STREAMING, _T.FORGET): _S.RELAYING,
    (_S.PARKED, _T.ASK): _S.RESUMING,
    (_S.RESUMING, _T.STREAM): _S.REPLAYING,
    (_S.RESUMING, _T.BREAK): _S.PARKED,
    (_S.RESUMING, _T.REFUSE): _S.PARKED,
    (_S.REPLAYING, _T.BREAK): _S.PARKED,
    (_S.REPLAYING, _T.JOIN): _S.STREAMING,
    (_S.ANSWERING, _T.WHOLE): _S.DONE,
    (_S.STREAMING, _T.WHOLE): _S.DONE,
    (_S.RELAYING, _T.WHOLE): _S.DONE,
    (_S.WAITING, _T.FAIL): _S.DONE,
    (_S.RELAYING, _T.FAIL): _S.DONE,
    (_S.PARKED, _T.FAIL): _S.DONE,
    (_S.RESUMING, _T.FAIL): _S.DONE,
    (_S.REPLAYING, _T.FAIL): _S.DONE,
    **{(state, _T.LEAVE): _S.DONE for state in _S if state is not _S.DONE},
}


class IllegalTurn(InvariantError):
    """A turn that the table does not have for this state. The state is unchanged."""
