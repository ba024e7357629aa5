"""Looks up what a session's table says: legal, the client's fault, or ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from plumbing.errors import InvariantError, ProtocolError
from plumbing.wire.messages import Message, type_of

S = TypeVar("S")


def next_state(table: Mapping[tuple[S, type[Any]], S], state: S, kind: type[Any]) -> S:
    """The state that `kind`, a message or an event, leads to from `state`.

    Raises:
        ProtocolError: `gms.unexpected_message`, the client sent it at the wrong moment.
        InvariantError: our own mistake.
    """
    target = table.get((state, kind))
    if target is not None:
        return target
    if issubclass(kind, Message):
        raise ProtocolError(
            "gms.unexpected_message",
            f"{type_of(kind)} is not allowed now: this session is {state}",
            state=str(state),
        )
    raise InvariantError(f"{kind.__name__} in state {state}")
