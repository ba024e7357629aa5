"""What every session with a device's server has, whichever kind it is.

Made by `gms.client.open_session`, which says how they are used: `gms.reader`, `gms.writer`.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from gms.client.attachment import Attachment
from gms.messages import Attach, Attached
from gms.vmm.interface import Memory
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.wire.blocking import BlockingClient


class Opening(Protocol):
    """How a session came to be, for a reader that attaches again."""

    memory: Memory

    def connect(self, deadline_s: float) -> BlockingClient: ...

    def reattach(
        self, request: Attach, wait_s: float, attachment: Attachment, layout_hash: str
    ) -> tuple[BlockingClient, Attached]: ...


class Session:
    """What readers and writers share: a connection, mapped slabs, and their end."""

    def __init__(
        self, opening: Opening, client: BlockingClient, attachment: Attachment, request: Attach
    ) -> None:
        self._opening = opening
        self._client = client
        self._attachment = attachment
        self._request = request
        self.is_closed = False

    def fileno(self) -> int:
        """Lend the session's socket: readable means that the service is gone or speaks."""
        return self._client.fileno()

    def close(self) -> None:
        """Unmap, let the epoch go, leave. In this order; again is harmless."""
        if not self.is_closed:
            self.is_closed = True
            with contextlib.ExitStack() as stack:
                stack.callback(self._client.close)  # also where the driver fails to unmap
                self._attachment.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stale_layout(epoch: str) -> UnderstudyError:
    return UnderstudyError(
        "gms.stale_layout",
        f"epoch {epoch} has another layout than the one that was mapped before; this engine must "
        "start anew",
        epoch=epoch,
    )


def unexpected_answer(what: str, request: str) -> ProtocolError:
    return ProtocolError("gms.unexpected_answer", f"the service answered {request} with {what}")
