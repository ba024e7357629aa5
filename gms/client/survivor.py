"""A reader comes back to a service that has died: what is said, and how an epoch is handed back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from gms.messages import Offer, Rejoin, Rejoined, Slabs, Wanted
from plumbing.errors import ProtocolError
from plumbing.service.fd_limit import make_fd_room
from plumbing.wire import sockets
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import FDS_PER_FRAME_MAX


def rejoin(
    client: BlockingClient,
    request: Rejoin,
    *,
    identity: Mapping[str, Any],
    manifest: bytes,
    layout_hash: str,
    slab_fds: Sequence[int],
    timeout_s: float,
) -> None:
    """Register again, handing the epoch back if it is asked for.

    Args:
        slab_fds: read-only descriptors of every slab, in order; borrowed.

    Raises:
        UnreachableError, WaitTimeoutError, ProtocolError, RemoteError: try again later; RemoteError
            `gms.not_committed` is final.
    """
    message = client.request(request, timeout_s=timeout_s).message
    if isinstance(message, Wanted):
        # The descriptors that do not fit the offer's own frame come before it: with the offer,
        # everything is there.
        whole = list(range(0, len(slab_fds), FDS_PER_FRAME_MAX)) or [0]
        for first in whole[:-1]:
            client.notify(
                Slabs(request.epoch, first), _copies(slab_fds[first : first + FDS_PER_FRAME_MAX])
            )
        offer = Offer(request.epoch, dict(identity), manifest, layout_hash)
        message = client.request(offer, _copies(slab_fds[whole[-1] :]), timeout_s).message
    if not isinstance(message, Rejoined) or message.epoch != request.epoch:
        raise ProtocolError(
            "gms.unexpected_answer", f"the service answered rejoin with {message.TYPE}"
        )


def _copies(fds: Sequence[int]) -> list[OwnedFd]:
    make_fd_room(len(fds))
    with contextlib.ExitStack() as stack:
        try:
            copies = [stack.enter_context(OwnedFd(os.dup(fd))) for fd in fds]
        except OSError as error:
            raise sockets.no_descriptors(f"copy {len(fds)} descriptors", error) from error
        stack.pop_all()
        return copies
