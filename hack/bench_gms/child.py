"""The child processes of `bench_gms`: `python -m hack.bench_gms.child VERB …` prints JSON.

serve DIR BYTES           a device's server that knows both protocols; prints nothing
attach DIR                attach, read every tensor's record, detach, attach again
attach-two-requests DIR   attach with two requests for each allocation
ask DIR                   `gms status` repeatedly, until stdin ends
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable

from gms import messages as msg
from gms import names
from gms.client import Reader, open_session
from gms.vmm.host import HostMemory
from hack.bench_gms import two_requests
from plumbing.service.cli import run_async
from plumbing.service.process import arm_from_environment, make_fd_room
from plumbing.service.signals import wait_signals
from plumbing.wire.blocking import BlockingClient

DEVICE = "HOST-0"
ASK_EVERY_S = 0.002


def serve(directory: str, capacity_bytes: str) -> None:
    async def run() -> None:
        server = two_requests.TwoRequestServer(directory, DEVICE, HostMemory(), int(capacity_bytes))
        await server.start()
        try:
            await wait_signals()
        finally:
            await server.close()

    run_async(run)


def attach(directory: str) -> None:
    began = time.perf_counter()
    session = open_session(
        directory, DEVICE, engine="bench", incarnation="1", mode="ro", identity=None, wait_s=20
    )
    assert isinstance(session, Reader)
    report = {"attach": _since(began)}
    began = time.perf_counter()
    report["tensors"] = len([record.offset for record in session.tensors.values()])
    report["look"] = _since(began)
    began = time.perf_counter()
    session.unmap()
    report["detach"] = _since(began)
    began = time.perf_counter()
    session.remap(20)
    report["reattach"] = _since(began)
    report["slabs"] = len(session.slab_fds())
    session.close()
    print(json.dumps(report))


def attach_two_requests(directory: str) -> None:
    make_fd_room(4096)
    began = time.perf_counter()
    whole, allocations = two_requests.attach(directory, DEVICE)
    report = {"attach": _since(began), "slabs": len(allocations)}
    whole.free()
    for allocation in allocations:
        allocation.release()
    print(json.dumps(report))


def ask(directory: str) -> None:
    """Prints pairs of the time (monotonic clock, s) and how long the answer took (ms)."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    asked: list[tuple[float, float]] = []
    while not poll.poll(ASK_EVERY_S * 1000):
        when, began = time.monotonic(), time.perf_counter()
        with BlockingClient(names.socket_path(directory, DEVICE), msg.CATALOGUE) as client:
            client.request(msg.StatusMsg())
        asked.append((when, _since(began)))
    print(json.dumps(asked))


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


VERBS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "attach": attach,
    "attach-two-requests": attach_two_requests,
    "ask": ask,
}

if __name__ == "__main__":
    arm_from_environment()
    VERBS[sys.argv[1]](*sys.argv[2:])
