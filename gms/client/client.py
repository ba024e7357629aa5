"""What engines import: attach to a device's memory as its writer or as a reader. Blocking.

    session = open_session(directory, "HOST-0", engine="engine-0", incarnation=…, mode="rw_or_ro",
                           identity={…}, wait_s=7200)
    if isinstance(session, Writer):
        session.plan(total_bytes, tensor_bytes_max)      # optional: slabs get the right size
        for name, shape, dtype, nbytes in …:
            session.place(name, nbytes, shape, dtype)    # its address
            session.write(name, …)                       # or session.view(name), on the host
            session.progress(done_bytes, total_bytes)    # silence is taken for a stall
        session = session.commit(identity)               # now a Reader, at the same addresses
    weights = {name: session.view(name) for name in session.tensors}
    Keeper(session).start()                              # the service may die; we go on

No numpy, no asyncio, no click here: this runs inside workers whose loops belong to somebody else.
A session is its connection: when `fileno()` becomes readable, the service is gone. The views are
bare addresses: one that is used after `unmap` or `close` ends the process (SIGSEGV), and so does
writing to a writer's view after `commit`. Readers keep their descriptors: a restarted service gets
its memory back from them, which is the keeper's work.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from gms import epoch_file, messages, names
from gms.client.attachment import Attachment
from gms.client.keeper import Keeper
from gms.client.reader import Reader
from gms.client.sessions import stale_layout, unexpected_answer
from gms.client.writer import Writer
from gms.core.manifest import TensorRecord
from gms.messages import CATALOGUE, Attach, Attached, Slabs, Waiting, Writing
from gms.vmm.interface import Allocation, Memory
from gms.vmm.kinds import memory_for
from plumbing.errors import WaitTimeoutError
from plumbing.service.fd_limit import make_fd_room
from plumbing.wire.blocking import BlockingClient, Reply
from plumbing.wire.fds import OwnedFd, close_all

__all__ = [
    "Allocation",
    "Keeper",
    "Reader",
    "TensorRecord",
    "Writer",
    "memory_for",
    "messages",
    "open_session",
]

# The server answers a wait that is over by itself; this is how much longer we listen for it.
GRACE_S = 5.0
CONNECT_TIMEOUT_S = 5.0  # a server that does not accept for so long hangs
OnWait = Callable[[str], None]


def open_session(
    directory: str,
    device: str,
    *,
    engine: str,
    incarnation: str,
    mode: str,
    identity: Mapping[str, Any] | None,
    wait_s: float,
    on_wait: OnWait = lambda reason: None,
    replace: bool = False,
    rank: int = 0,
    tag: str = names.WEIGHTS,
    memory: Memory | None = None,
) -> Reader | Writer:
    """Attach to the memory of `device`, waiting at most `wait_s` for the grant.

    Args:
        mode: `rw` (write; an error where something is committed, unless `replace`), `ro` (read,
            once something is committed) or `rw_or_ro` (read what is committed, else write).
        identity: what the weights must be; None takes what is there.
        on_wait: called with a sentence whenever the reason for waiting changes.
        memory: what to map with; by default the kind that `device` has.

    Raises:
        UnreachableError: no server there, or it went away while we waited.
        UsageError: `gms.no_cuda`, `gms.device_not_visible`: this process cannot use that GPU.
        RemoteError: the server said no: `gms.identity_mismatch` (`details["field"]`),
            `gms.already_committed`, `gms.wait_timeout`, …
    """
    path = names.socket_path(directory, device, tag)
    opening = _Opening(directory, path, memory or memory_for(device))
    request = Attach(
        engine=engine,
        incarnation=incarnation,
        mode=mode,
        identity=None if identity is None else dict(identity),
        rank=rank,
        wait_ms=round(wait_s * 1000),
        replace=replace,
    )
    return opening.run(request, wait_s, on_wait)


class _Opening:
    """From a path to a session; closes everything if it does not get there."""

    def __init__(self, directory: str, path: str, memory: Memory) -> None:
        self.directory = directory
        self.path = path
        self.memory = memory

    def connect(self, deadline_s: float = CONNECT_TIMEOUT_S) -> BlockingClient:
        """A fresh connection to the device's server."""
        return BlockingClient(self.path, CATALOGUE, connect_timeout_s=deadline_s)

    def run(
        self, request: Attach, wait_s: float, on_wait: OnWait = lambda reason: None
    ) -> Reader | Writer:
        with contextlib.ExitStack() as stack:
            # Opened first for its low number; see `epoch_file.join`.
            placeholder = stack.enter_context(_placeholder())
            client = stack.enter_context(self.connect())
            reply = _granted(client, request, wait_s, on_wait)
            message = reply.message
            attachment = Attachment(self.memory)
            stack.callback(attachment.close)
            if isinstance(message, Writing):
                attachment.hold(self._join(message.epoch_file, placeholder))
                # Addresses for all that it could ever write: more may become free while it loads.
                attachment.reserve(message.capacity_bytes)
                session: Reader | Writer = Writer(
                    self, client, attachment, request, message, on_wait
                )
            elif isinstance(message, Attached):
                self._take_slabs(client, reply, message, attachment, placeholder)
                session = Reader(self, client, attachment, request, message)
            else:
                close_all(reply.fds)
                raise unexpected_answer(message.TYPE, "attach")
            stack.pop_all()
            return session

    def reattach(
        self, request: Attach, wait_s: float, attachment: Attachment, layout_hash: str
    ) -> tuple[BlockingClient, Attached]:
        """Attach again with an attachment that has addresses and nothing mapped there."""
        with contextlib.ExitStack() as stack:
            placeholder = stack.enter_context(_placeholder())
            client = stack.enter_context(self.connect())
            reply = _granted(client, request, wait_s, lambda reason: None)
            message = reply.message
            if not isinstance(message, Attached) or message.layout_hash != layout_hash:
                close_all(reply.fds)
                if isinstance(message, Attached):
                    raise stale_layout(message.epoch)
                raise unexpected_answer(message.TYPE, "attach")
            stack.callback(attachment.unmap)
            self._take_slabs(client, reply, message, attachment, placeholder)
            stack.pop_all()
            return client, message

    def _take_slabs(
        self,
        client: BlockingClient,
        reply: Reply,
        message: Attached,
        attachment: Attachment,
        placeholder: OwnedFd,
    ) -> None:
        """Every descriptor of the answer, then the flock, then the mappings: in this order."""
        fds = list(reply.fds)
        count = len(message.slab_sizes)
        try:
            if count > len(fds):
                make_fd_room(count - len(fds))
            while len(fds) < count:
                more = client.receive(GRACE_S)
                fds += more.fds
                if not isinstance(more.message, Slabs) or more.message.epoch != message.epoch:
                    raise unexpected_answer(more.message.TYPE, "attach")
            if len(fds) != count:
                raise unexpected_answer(f"{len(fds)} descriptors", "attach")
            attachment.hold(self._join(message.epoch_file, placeholder))
            attachment.reserve(sum(message.slab_sizes))
        except BaseException:
            close_all(fds)
            raise
        attachment.adopt(fds, message.slab_sizes, writable=False)

    def _join(self, name: str, placeholder: OwnedFd) -> OwnedFd:
        if not names.is_epoch_file(name):
            raise unexpected_answer(f"the epoch file {name!r}", "attach")
        return epoch_file.join(os.path.join(self.directory, name), placeholder)


def _granted(client: BlockingClient, request: Attach, wait_s: float, on_wait: OnWait) -> Reply:
    """Send `request` and wait for its last answer, passing reasons on to `on_wait`."""
    end = time.monotonic() + wait_s + GRACE_S
    reply = client.request(request, timeout_s=wait_s + GRACE_S)
    while isinstance(reply.message, Waiting):
        on_wait(reply.message.message)
        rest_s = end - time.monotonic()
        if rest_s <= 0:
            raise WaitTimeoutError(
                "gms.wait_timeout",
                f"waited {wait_s:g} s for the weights: {reply.message.message}",
                reason=reply.message.reason,
            )
        reply = client.receive(rest_s)
    return reply


def _placeholder() -> OwnedFd:
    return OwnedFd(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
