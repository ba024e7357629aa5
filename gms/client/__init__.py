"""What engines import: attach to a device's memory as its writer or as a reader. Blocking.

    request = AttachMsg("engine-0", incarnation, "rw_or_ro", identity={…}, wait_ms=7_200_000)
    session = open_session(directory, "HOST-0", request)
    if isinstance(session, Writer):
        session.plan(total_bytes)                        # optional: slabs get the right size
        for name, shape, dtype, nbytes in …:
            session.place(name, nbytes, shape, dtype)    # its address
            session.write(name, …)                       # or session.view(name), on the host
            session.progress(done_bytes, total_bytes)    # silence is taken for a stall
        session = session.commit(identity)               # now a Reader, at the same addresses
    # where the weights were offloaded, it has been copied from host memory, and is a Reader already
    weights = {name: session.view(name) for name in session.tensors}
    Keeper(session).start()                              # keeps the session if the service restarts

No numpy, no asyncio, no click here: this runs inside workers that have loops of their own. A
session is its connection: when `client` becomes readable, the service is gone. The views are bare
addresses: using one after `unmap` or `close` ends the process (SIGSEGV), and so does writing to a
writer's view after `commit`. Readers keep their descriptors, so that the keeper can hand the memory
back to a restarted service.
"""

from __future__ import annotations

from gms import messages
from gms.client.attach import Attachment, OnWait, look_for_mps, memory_for
from gms.client.keeper import Keeper
from gms.client.kv_loan import KvClaim, KvLease, borrow_pool
from gms.client.weights import Offloaded, Reader, Writer, open_copy, opened, release, restaged
from gms.manifest import TensorRecord
from gms.messages import ADOPTED, ADOPTING, BEGUN
from gms.names import offload_device
from gms.vmm.host import Filling
from gms.vmm.interface import Allocation, DeviceMemory

__all__ = [
    "ADOPTED",
    "ADOPTING",
    "BEGUN",
    "Allocation",
    "Filling",
    "Keeper",
    "KvClaim",
    "KvLease",
    "Offloaded",
    "Reader",
    "TensorRecord",
    "Writer",
    "borrow_pool",
    "look_for_mps",
    "memory_for",
    "messages",
    "offload_device",
    "open_copy",
    "open_session",
    "release",
]


def open_session(
    directory: str,
    device: str,
    request: messages.AttachMsg,
    *,
    on_wait: OnWait = lambda reason: None,
    memory: DeviceMemory | None = None,
) -> Reader | Writer:
    """Attach to the memory of `device`, waiting at most `request.wait_ms` for the grant.

    Args:
        request: its `mode` is `ro` (read, once something is committed) or `rw_or_ro` (read what
            is committed, else write); `identity` is what the weights must be; None accepts any.
        on_wait: called with a sentence whenever the reason for waiting changes.
        memory: what to map with; by default the kind that `device` has.

    Raises:
        UnreachableError: no server there, or it went away while we waited. Try again: also
            `gms.server_exhausted`, it has run short.
        UsageError: `gms.no_cuda`, `gms.device_not_visible`: this process cannot use that GPU.
        RemoteError: the server refused: `gms.identity_mismatch` (`details["field"]`),
            `gms.wait_timeout`, …
    """
    attachment = Attachment(directory, device, memory or memory_for(device))
    session = opened(attachment, request, on_wait)
    if isinstance(session, Writer) and session.source_epoch is not None:
        return restaged(session, on_wait)
    return session
