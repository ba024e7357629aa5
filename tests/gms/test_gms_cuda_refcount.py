"""When device memory is free, step by step over real processes, with NVML as the witness.

The seed's Decision 7, measured there with nvidia-smi: memory is counted by references across
processes; the server's release frees nothing while a client holds it, and nothing can force that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from plumbing.wire.fds import OwnedFd
from tests.gms.bench import IDENTITY, ClientProcess, GmsProcess
from tests.gms.kinds import stand_in_only
from tests.gms.memory_process import Holder
from tests.helpers import until
from tests.standin import build

MIB = 1 << 20
SIZE = 512 * MIB
GPU = build.GPU_A
NOISE = 64 * MIB  # of a real device
BASELINE: dict[str, int] = {}

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    build.use(monkeypatch)
    if build.REAL_GPU is not None:
        monkeypatch.setitem(BASELINE, GPU, used())


@pytest.fixture
def holder() -> Iterator[Callable[[], Holder]]:
    started: list[Holder] = []

    def start() -> Holder:
        started.append(Holder(GPU))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def used() -> int:
    """The bytes in use on the device, by NVML, of all processes."""
    import pynvml

    pynvml.nvmlInit()
    found = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(GPU)).used
    pynvml.nvmlShutdown()
    return int(found)


def expect_used(size_bytes: int, why: str = "memory to be kept or free") -> None:
    """So much is in use: at once, and to the byte. Of a real device, beyond what was when the test
    began, roughly (the driver keeps a little for itself), and after a moment."""
    if build.REAL_GPU is None:
        assert used() == size_bytes, why
    else:
        until(lambda: abs(used() - BASELINE[GPU] - size_bytes) < NOISE, why)


def shared(server: Holder, client: Holder) -> None:
    """The server makes memory, the client imports and maps it; no descriptor stays on the way."""
    fd = server.do(f"create {SIZE}")
    assert isinstance(fd, OwnedFd)
    with fd:
        client.do(f"import {SIZE}", fd)
    client.do("map")


def test_memory_is_free_when_the_last_process_releases_it(holder: Callable[[], Holder]):
    """The table: baseline, create and import, server releases, client releases, death."""
    server, client = holder(), holder()
    expect_used(0, "baseline")
    shared(server, client)
    expect_used(SIZE, "one piece of memory, however many hold it")
    server.do("release")
    expect_used(SIZE, "the server's release frees nothing")
    client.do("unmap")
    expect_used(SIZE, "neither does unmapping, while the client has its handle")
    client.do("release")
    expect_used(0, "freed by the last reference")
    client.kill()
    expect_used(0, "back to the baseline")


def test_client_that_only_maps_keeps_the_memory(holder: Callable[[], Holder]):
    """Handles and descriptors are all gone, a mapping is left: not freed until it goes too."""
    server, client = holder(), holder()
    shared(server, client)
    server.do("release")
    client.do("release")
    expect_used(SIZE)
    client.do("unmap")
    expect_used(0)


@pytest.mark.parametrize("first", ["server", "client"])
def test_death_frees_like_a_release(holder: Callable[[], Holder], first: str):
    """SIGKILL one of two: the memory stays for the other; SIGKILL that one: it is free."""
    server, client = holder(), holder()
    shared(server, client)
    one, other = (server, client) if first == "server" else (client, server)
    one.kill()
    expect_used(SIZE)
    other.kill()
    expect_used(0)


def test_descriptor_alone_keeps_the_memory(holder: Callable[[], Holder]):
    """Everybody who ever opened the device is dead: what a third process holds is importable."""
    server = holder()
    fd = server.do(f"create {SIZE}")
    server.kill()
    expect_used(SIZE)
    newcomer = holder()
    newcomer.do(f"import {SIZE}", fd)
    assert fd is not None
    fd.close()
    newcomer.do("map")
    newcomer.kill()
    expect_used(0)


@stand_in_only  # slabs of 2 MiB are counted, which on a real device are lost in the noise
def test_service_frees_according_to_the_table(directory: str):
    """The same through the service: a replaced epoch, the server's death, its readers' deaths."""
    gms = GmsProcess(directory, device=GPU, device_bytes=SIZE).start()
    reader = None
    try:
        gms.load().close()
        slab_bytes = used()
        assert slab_bytes == gms.status()["committed_bytes"]
        reader = ClientProcess(directory, "ro", device=GPU)
        reader.expect("reader")
        assert used() == slab_bytes, "a reader takes nothing"
        gms.load(mode="rw", replace=True).close()
        assert used() == 2 * slab_bytes, "the reader still maps what was replaced"
        reader.kill()
        until(lambda: used() == slab_bytes, "the replaced epoch to be free")
        reader = ClientProcess(directory, "ro", device=GPU)
        reader.expect("reader")
        gms.kill()
        assert used() == slab_bytes, "memory outlives its service while somebody maps it"
        assert reader.do("read")["first"] == 7
    finally:
        gms.stop()
        if reader is not None:
            reader.kill()
    assert used() == 0


@stand_in_only
@pytest.mark.parametrize("needs_context", [False, True])
def test_server_maps_nothing_and_makes_no_context_unless_it_must(
    directory: str, monkeypatch: pytest.MonkeyPatch, needs_context: bool
):
    """Commit and attach, with a driver that wants a context and one that does not: status says."""
    monkeypatch.setenv("STANDIN_NEEDS_CONTEXT", str(int(needs_context)))
    gms = GmsProcess(directory, device=GPU).start()
    try:
        with gms.load(), gms.reader():
            status = gms.status()
            assert status["memory"] == "cuda"
            assert status["driver"]["cuda_version"] == "13.0"
            assert status["driver"]["has_context"] == needs_context
            with open(f"/proc/{gms.pid}/maps", encoding="utf-8") as maps:
                assert "standin:" not in maps.read(), "the server maps nothing"
    finally:
        gms.stop()


@stand_in_only
def test_full_device_is_waited_for(
    directory: str, monkeypatch: pytest.MonkeyPatch, holder: Callable[[], Holder]
):
    """Another process has the device's memory: the writer waits, and continues when it dies."""
    monkeypatch.setenv("STANDIN_MEMORY", str(SIZE + 64 * MIB))
    other = holder()
    fd = other.do(f"create {SIZE}")
    assert fd is not None
    fd.close()
    gms = GmsProcess(directory, device=GPU, device_bytes=SIZE).start()
    said: list[str] = []

    def told(reason: str) -> None:
        said.append(reason)
        other.kill()

    try:
        with gms.writer(on_wait=told) as writer:
            writer.place("t", 128 * MIB, (128 * MIB,), "uint8")
            with writer.commit(IDENTITY):
                assert used() >= 128 * MIB
        assert said
        assert "CUDA_ERROR_OUT_OF_MEMORY" in said[0]
    finally:
        gms.stop()
