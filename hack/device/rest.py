"""Of an engine that rests: its KV memory goes and comes back under graphs captured before.

An engine captures its graphs once, over addresses. When it rests, the memory behind them is
unmapped and freed; when it wakes, other memory is mapped there.
"""

from __future__ import annotations

import time

from hack.device.part import MIB, NOISE_BYTES, Part, Skipped, mib
from hack.device.peer import PAGE
from hack.device.remote import NotOffered, Peer

SIZE_BYTES = 1024 * MIB  # well above what a driver's own bookkeeping takes
RESTS = 20
REST_S = 2.0  # what one may take at most, with the wait until memory in use has settled


def rest(part: Part) -> None:
    """Do graphs work over memory that was unmapped and mapped again, and is it free meanwhile?"""
    size = min(SIZE_BYTES, part.bytes_max // 8)
    if not part.fits(size):
        raise Skipped(f"there are not {size // MIB} MiB to spare")
    peer = part.peer(context=True)
    peer("create", size_bytes=size)
    peer("map", writable=True)
    has_graph = _capture(peer)
    taken = part.nvml.settled()
    freed: list[int] = []
    shown: list[list[int]] = []
    rests = min(RESTS, part.kills_max)  # few where the memory and the driver are stand-ins
    while len(freed) < rests and part.left_s() > REST_S:
        began = time.monotonic()
        peer("vacate")
        released_ms = (time.monotonic() - began) * 1e3
        freed.append(taken - part.nvml.settled())
        began = time.monotonic()
        peer("occupy", size_bytes=size)
        part.note(release_ms=round(released_ms, 2), take_ms=_ms_since(began), rests=len(freed))
        peer("clear")
        peer("replay")
        shown += [peer("read", offset=at) for at in (0, size // 2, size - PAGE)]
    if not freed:
        raise Skipped("out of time")
    part.note(size_mib=mib(size), least_freed_mib=mib(min(freed)), has_graph=has_graph)
    part.claim(
        memory_is_free_at_rest=min(freed) >= size - NOISE_BYTES,
        graphs_write_to_what_is_mapped_now=all(page == [1] for page in shown),
    )


def _capture(peer: Peer) -> bool:
    """Capture what fills the range, once; False: this driver has no graphs (the tests' stand-in),
    and the same is done directly."""
    try:
        peer("capture")
    except NotOffered:
        return False
    return True


def _ms_since(began: float) -> float:
    return round((time.monotonic() - began) * 1e3, 2)
