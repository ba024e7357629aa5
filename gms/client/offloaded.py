"""Weights that are away: released here, kept as a sealed copy in host memory, brought back later.

    away = release(reader, keeper)         # nothing is mapped any more; the addresses stay reserved
    away.free()                         # the device's memory is free, unless another engine maps it
    away.restage(deadline_s)            # the reader maps the same bytes at the same addresses
    Keeper(reader).start()              # as after every attach

The copy belongs to the memory service; this process holds it, too, while it has nothing else: so
the copy outlives the service's container, and comes back from here. It costs no memory: its pages
are shared. The surprising thing: nobody has to lead a restage. The first engine to come writes, the
others map what it has committed, and a rank waits for no other rank.
"""

from __future__ import annotations

import contextlib
import logging
import time

from msgspec import structs

from gms import messages as msg
from gms import names
from gms.client.keeper import Keeper
from gms.client.reader import Reader
from gms.client.sessions import Attachment, OnWait, Opening
from gms.client.writer import Writer
from gms.questions import unexpected_answer
from gms.vmm.host import HostMemory
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message

logger = logging.getLogger(__name__)

# How long a load waits for a copy whose server has died: it is restarted in half a second, and
# whoever holds the copy hands it back. If it is gone, this is what the load takes longer.
COPY_BACK_S = 5.0
# How long an engine waits for the proof that the memory is free: the kernel frees 8 GiB a second.
FREE_TIMEOUT_S = 30.0
# The service of the device is restarted in half a second.
RETRY_S = 0.05


def opened(
    opening: Opening, request: msg.AttachMsg, on_wait: OnWait = lambda reason: None
) -> Reader | Writer:
    """The session that `request` is granted."""
    with contextlib.ExitStack() as stack:
        attachment = Attachment(opening.memory)
        stack.callback(attachment.close)
        client, grant = opening.attach(request, attachment, on_wait=on_wait)
        stack.pop_all()
    if isinstance(grant, msg.WritingMsg):
        return Writer(opening, client, attachment, request, grant, on_wait)
    return Reader(opening, client, attachment, request, grant)


def open_copy(
    directory: str,
    device: str,
    request: msg.AttachMsg,
    epoch: str | None = None,
    wait_s: float = 0.0,
) -> Reader:
    """Attach to the host copy of the weights of `device`: to `epoch`, if given.

    Raises:
        UnderstudyError: `gms.no_copy`, there is none of the identity of `request`.
        UnreachableError: its server is away.
    """
    opening = Opening(directory, names.offload_device(device), HostMemory())
    wanted = structs.replace(request, mode="ro", wait_ms=round(wait_s * 1000), replace=False)
    try:
        copy = opened(opening, wanted)
    except UnreachableError:
        raise
    except UnderstudyError as error:
        raise UnderstudyError(
            "gms.no_copy", f"host memory has no copy of the weights of {device}: {error.message}"
        ) from error
    if isinstance(copy, Reader) and epoch in (None, copy.epoch):
        return copy
    copy.close()
    raise UnderstudyError(
        "gms.no_copy", f"the copy in host memory is epoch {copy.epoch}, not {epoch}"
    )


def written_from_copy(writer: Writer, epoch: str, on_wait: OnWait) -> Reader | Writer:
    """A reader of what `writer` (taken) has copied from the host copy `epoch` and committed; the
    writer itself where that copy is out of reach: then the weights are loaded."""
    opening, end = writer.opening, time.monotonic() + COPY_BACK_S
    while True:
        left_s = max(0.0, end - time.monotonic())
        try:
            copy = open_copy(opening.directory, opening.device, writer.request, epoch, left_s)
        except UnderstudyError as error:
            if isinstance(error, UnreachableError) and left_s > RETRY_S:
                time.sleep(RETRY_S)
                continue
            on_wait(f"the weights are loaded again: {error.message}")
            return writer
        with contextlib.ExitStack() as stack:
            stack.callback(writer.close)  # unless its commit succeeds
            with copy:
                reader = _written(writer, copy)
            stack.pop_all()
            return reader


def _written(writer: Writer, copy: Reader) -> Reader:
    writer.copy(copy)
    return writer.commit(copy.identity, restaged_from=copy.epoch)


def release(reader: Reader, keeper: Keeper) -> Offloaded:
    """Unmap a reader's weights, once this process holds their host copy; closes `keeper`, its own.

    Raises:
        UnderstudyError: `gms.no_copy`. Nothing has changed, and `keeper` goes on.
    """
    request = structs.replace(reader.request, identity=reader.identity)
    try:
        copy = open_copy(reader.opening.directory, reader.opening.device, request)
    except UnreachableError as error:
        raise UnderstudyError(
            "gms.no_copy", f"no server of copies in host memory answers: {error.message}"
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(copy.close)
        if copy.layout_hash != reader.layout_hash:
            raise UnderstudyError(
                "gms.no_copy", f"the host copy {copy.epoch} has another layout than these weights"
            )
        copy_keeper = Keeper(copy, on_change=logger.warning)
        copy_keeper.start()
        stack.callback(copy_keeper.close)
        keeper.close()
        session = reader.leave()
        stack.pop_all()
    return Offloaded(reader, copy, copy_keeper, session)


class Offloaded:
    """A reader that has nothing mapped, and the host copy from which it comes back."""

    def __init__(
        self, reader: Reader, copy: Reader, keeper: Keeper, session: BlockingClient
    ) -> None:
        """Takes all but `reader`; `session` is what the reader had."""
        self.reader, self.copy = reader, copy
        self._keeper = keeper
        self._session: BlockingClient | None = session

    def free(self) -> int:
        """Have the device's memory freed; returns how much the kernel says is free.

        Raises:
            RemoteError: `gms.epoch_mapped`: another engine still maps it, and frees it when it
                offloads in turn; `gms.no_copy`, …: it stays as it is.
            UnreachableError, WaitTimeoutError: not known.
        """
        session, self._session = self._session, None
        try:
            answer = self._ask(session or self.reader.opening.connect())
        except UnreachableError:
            if session is None:
                raise
            answer = self._ask(self.reader.opening.connect())  # the service was restarted
        if not isinstance(answer, msg.OffloadedMsg):
            raise unexpected_answer(answer.TYPE, "offload")
        return answer.size_bytes

    def restage(self, deadline_s: float, on_wait: OnWait = lambda reason: None) -> None:
        """Map the weights again where they were, from the device or from the copy. The reader then
        needs a keeper; this object is done with.

        Raises:
            UnreachableError, WaitTimeoutError: not within `deadline_s`; may be repeated.
            UnderstudyError: `gms.stale_copy`, `gms.stale_layout`, …: fatal to the engine.
        """
        end = time.monotonic() + deadline_s
        while True:
            try:
                left_s = max(0.0, end - time.monotonic())
                self.reader.remap(left_s, self.copy.epoch, self._rewrite)
                break
            except UnreachableError as error:
                if time.monotonic() + RETRY_S > end:
                    raise
                on_wait(f"the weights are not restored yet: {error.message}")
                time.sleep(RETRY_S)
        self.close()

    def close(self) -> None:
        """Let the copy go; the service keeps it."""
        if self._session is not None:
            self._session.close()
        self._keeper.close()
        self.copy.close()

    def _ask(self, client: BlockingClient) -> Message:
        """Closes `client`. On the reader's own session it says that the reader has left, too."""
        with contextlib.closing(client):
            return client.request(msg.OffloadMsg(), timeout_s=FREE_TIMEOUT_S).message

    def _rewrite(
        self,
        opening: Opening,
        client: BlockingClient,
        attachment: Attachment,
        request: msg.AttachMsg,
        grant: msg.WritingMsg,
    ) -> Reader:
        return _written(Writer(opening, client, attachment, request, grant), self.copy)
