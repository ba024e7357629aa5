"""A rank's session with the memory service of its device: the weights that it maps there, and the
index of the KV pools (`engine.kv` has its rules).

Shared by every backend; knows no model. `attach` waits for an absent service: when the service dies
every engine relaunches, and the first ones back must not die again. `KeptWeights` maps one rank's
weights, or releases them and keeps a copy in host memory. What prevents a release is no error: the
weights stay, and the supervisor asks again.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from engine.backends.process import MODEL_ENV, BackendProcess
from engine.kv.adopter import Adoption, adoptable
from engine.kv.layout import IndexHeader, IndexPage
from engine.kv.writer import IndexWriter
from engine.messages import Counts
from gms.client import (
    ADOPTED,
    ADOPTING,
    Keeper,
    KvClaim,
    KvLease,
    Offloaded,
    Reader,
    Writer,
    borrow_pool,
    messages,
    open_session,
    release,
)
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.models import place_of
from plumbing.pod.paths import HOST_DEVICES_ENV
from plumbing.text import size

logger = logging.getLogger(__name__)

# Another engine may be reading a large checkpoint from a slow disk: the design's budget for that.
WAIT_S = 2 * 3600.0
# How long to wait for a service that restarts. Its start takes a second; a kubelet's pause before
# that grows to five minutes, and its image may have to be pulled again. Each timeout is a
# death of this engine, and five within ten minutes would count as a crash loop.
RESTART_WAIT_S = 600.0
RESTART_POLL_S = 0.05
# A process that distrusts its weights is about to exit, and its report with it: a memory service
# that has just died is back within a second, and no engine serves meanwhile.
REPORT_WAIT_S = 2.0
SOCKET_DIR_ENV = "GMS_SOCKET_DIR"


def host_device(rank: int) -> str:
    """The place in host memory that holds the weights of `rank`."""
    names = os.environ.get(HOST_DEVICES_ENV)
    return place_on(names.split(",")[rank] if names else f"HOST-{rank}")


def place_on(device: str) -> str:
    """Where this engine's model has its memory on `device`: the device, in a pod without models."""
    return place_of(device, os.environ.get(MODEL_ENV, ""))


def attach(
    member: BackendProcess, device: str, identity: Mapping[str, Any], rank: int, ranks: int
) -> Reader | Writer:
    """Open the session, once the supervisor permits it; wait for a service that cannot be reached.

    Raises:
        UnreachableError: there was no service for `RESTART_WAIT_S`.
        UnderstudyError: what `gms.client.open_session` raises, with the service's reason.
    """
    request = messages.AttachMsg(
        engine=member.engine,
        incarnation=member.incarnation,
        mode=member.may_load(WAIT_S, ranks).mode,
        identity=dict(identity),
        rank=rank,
        wait_ms=round(WAIT_S * 1000),
    )
    end, has_warned = time.monotonic() + RESTART_WAIT_S, False
    while True:
        try:
            return open_session(
                os.environ[SOCKET_DIR_ENV],
                device,
                request,
                on_wait=lambda reason: logger.info("waiting for weights: %s", reason),
            )
        except UnreachableError as error:
            if time.monotonic() > end:
                raise
            if not has_warned:
                logger.warning("%s; waiting up to %g s for it", error.message, RESTART_WAIT_S)
                has_warned = True
            time.sleep(RESTART_POLL_S)


@contextmanager
def loading(device: str, what: str, dtype: str, weights_bytes: int) -> Iterator[None]:
    """While weights are written: explain a service that ends, or a device that is too small.

    Raises:
        UnderstudyError: `engine.gms_lost`; `gms.larger_than_device`; what else was raised inside.
    """
    try:
        yield
    except UnreachableError as error:
        raise UnderstudyError(
            "engine.gms_lost",
            f"the memory service of {device} ended while the weights were being loaded"
            f" ({error.message}), so what was written is lost; this engine relaunches",
        ) from error
    except UnderstudyError as error:
        # A device that is full now may have room later; one that is too small never will.
        capacity_bytes = error.details.get("capacity_bytes", weights_bytes)
        if error.code != "gms.out_of_memory" or capacity_bytes >= weights_bytes:
            raise
        raise UnderstudyError(
            "gms.larger_than_device",
            f"the weights of {what} need {size(weights_bytes)} as {dtype} and the device has"
            f" {size(capacity_bytes)}; choose a smaller model, or give gms a larger --device-bytes",
            weights_bytes=weights_bytes,
            capacity_bytes=capacity_bytes,
        ) from error


def commit(
    writer: Writer,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    what: str,
    device: str,
    began_s: float,
) -> Reader:
    """Publish what was written, if the identity of `what` is still that from before the load.

    Raises:
        UnderstudyError: `model.changed`; what `Writer.commit` raises.
    """
    if changed := sorted(key for key in after if after[key] != before.get(key)):
        writer.close()
        raise UnderstudyError(
            "model.changed",
            f"{what} changed while it was read ({', '.join(changed)}); nothing was published, and"
            " the next attempt reads it again",
        )
    reader = writer.commit(after)
    took_s = time.monotonic() - began_s
    weights = size(reader.size_bytes)
    logger.info("loaded and committed %s on %s in %.1f s", weights, device, took_s)
    return reader


def borrow(device: str, claim: KvClaim, wait_s: float) -> KvLease:
    """The KV memory of `device`; waits `wait_s` for another engine that still maps it.

    Raises:
        UnderstudyError: `gms.kv_busy`, `gms.kv_stale_token`, …; UnreachableError.
    """
    return borrow_pool(
        os.environ[SOCKET_DIR_ENV],
        device,
        claim,
        wait_s,
        on_wait=lambda reason: logger.info("waiting for KV memory: %s", reason),
        on_change=logger.warning,
    )


class KeptWeights:
    """The weights of `reader`, kept from now on."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._gone: Offloaded | None = None
        self.keeper = self._kept()

    @property
    def is_away(self) -> bool:
        """Nothing is mapped: no process may compute."""
        return self._gone is not None

    def let_go(self) -> tuple[int, str]:
        """Release the weights and have their memory freed: how much is free, or what is in the
        way of either."""
        try:
            if self._gone is None:
                self._gone = release(self.reader, self.keeper)
            return self._gone.free(), ""
        except UnderstudyError as error:
            return 0, error.message

    def bring_back(self, budget_s: float) -> None:
        """Map them where they were, if they are not.

        Raises:
            UnderstudyError: as `Offloaded.restage`; the process must end.
        """
        gone = self._gone
        if gone is None:
            return
        gone.restage(budget_s, on_wait=logger.warning)
        self._gone, self.keeper = None, self._kept()

    def distrust(self, detail: str) -> None:
        """Report that a canary on them failed: after the report of a second incarnation they are
        taken out of service and loaded again."""
        self.keeper.report_canary_failure(detail)
        if not self.keeper.wait_until_reported(REPORT_WAIT_S):
            logger.warning("a failed canary was not reported: no memory service is running")

    def close(self) -> None:
        """Keep nothing any more; a reader that maps its weights stays as it is."""
        self.keeper.close()
        if self._gone is not None:
            self._gone.close()

    def _kept(self) -> Keeper:
        # It keeps the session through the deaths of the memory service, while others compute.
        keeper = Keeper(self.reader, on_change=logger.warning)
        keeper.start()
        return keeper


def page_of(lease: KvLease) -> IndexPage:
    """The index in the lease's pool. Its mapping lives until the page is released."""
    return IndexPage(memoryview(mmap.mmap(lease.index.fileno(), lease.index_bytes)))


class KeptPools:
    """The index of one engine in the pools of `leases`, one of each rank, from a wake to a rest.
    Their owner closes the leases."""

    def __init__(
        self,
        leases: Sequence[KvLease],
        headers: Sequence[IndexHeader],
        *,
        may_adopt: bool,
        counts: Counts,
    ) -> None:
        """Adopt or begin empty, before the first step. `counts` of this process are kept up to
        date."""
        self.leases = leases
        self._pages = [page_of(each) for each in leases]
        incarnation = leases[0].claim.incarnation
        adoption = Adoption(why_empty="adoption is off (--no-kv-adoption)")
        if may_adopt:
            adoption = adoptable(self._pages, headers, incarnation)
        if adoption.records:
            self._mark(ADOPTING)
        self.adopted, self.why_empty = adoption.records, adoption.why_empty
        cohort = secrets.token_hex(16)
        self.writer = IndexWriter(self._pages, headers, incarnation, cohort, adoption, counts)

    def trust(self) -> None:
        """The canary has passed on what was adopted."""
        self._mark(ADOPTED)

    def distrust(self, why: str) -> None:
        """No engine after this one may believe the content."""
        self.writer.clear()
        for lease in self.leases:
            lease.discard(why)

    def close(self) -> None:
        """Leave the content to the next engine, and map the index no more. An engine that lives to
        do this has not died of what it adopted."""
        self.writer.prove()
        self.writer.close()
        self.writer.counts.published = self.writer.counts.kept = 0
        for page in self._pages:
            page.release()

    def _mark(self, mark: str) -> None:
        for lease in self.leases:
            lease.mark(mark)
