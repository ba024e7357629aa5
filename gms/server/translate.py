"""From messages of peers to events of the machine."""

from __future__ import annotations

from gms import messages as msg
from gms import names
from gms.core import events as ev
from gms.core.events import Mode
from plumbing.errors import ProtocolError
from plumbing.wire.messages import Message


def event_of(session: int, pid: int, message: Message, request_id: int) -> ev.Event:
    """The event that `message` of session `session`, from process `pid`, is.

    Raises:
        ProtocolError: `gms.bad_mode`; `gms.unexpected_message`, only servers say that.
    """
    if isinstance(message, msg.Attach):
        return ev.Attach(
            session=session,
            request_id=request_id,
            engine=message.engine,
            incarnation=message.incarnation,
            mode=_mode(message.mode),
            identity=message.identity,
            rank=message.rank,
            wait_ms=message.wait_ms,
            replace=message.replace,
            pid=pid,
        )
    if isinstance(message, msg.Allocate):
        return ev.Allocate(session, request_id, message.size_bytes)
    if isinstance(message, msg.Progress):
        return ev.Progress(session, message.done_bytes, message.total_bytes)
    if isinstance(message, msg.Commit):
        return ev.Commit(
            session, request_id, message.identity, message.manifest, message.layout_hash
        )
    if isinstance(message, msg.Rejoin):
        return ev.Rejoin(
            session=session,
            request_id=request_id,
            engine=message.engine,
            incarnation=message.incarnation,
            epoch=_epoch_id(message.epoch),
            slab_sizes=message.slab_sizes,
            was_committed=message.was_committed,
            rank=message.rank,
            pid=pid,
        )
    if isinstance(message, msg.Offer):
        return ev.Offer(
            session, request_id, message.identity, message.manifest, message.layout_hash
        )
    if isinstance(message, msg.Condemn):
        return ev.Condemn(session, message.why, message.detail)
    if isinstance(message, msg.Digest):
        return ev.Digested(session, request_id, message.digest, message.is_coming)
    if isinstance(message, msg.Drop):
        return ev.Drop(session, request_id, message.epoch, message.even_if_mapped)
    if isinstance(message, msg.Verify):
        return ev.Verify(session, request_id)
    raise ProtocolError("gms.unexpected_message", f"a client does not say {message.TYPE!r}")


def _epoch_id(value: str) -> str:
    if not names.is_epoch_id(value):
        raise ProtocolError("gms.bad_epoch", f"{value[:64]!r} is no epoch")
    return value


def _mode(word: str) -> Mode:
    try:
        return Mode(word)
    except ValueError:
        known = ", ".join(Mode)
        raise ProtocolError("gms.bad_mode", f"there is no mode {word!r}; use {known}") from None
