"""When device memory is free, step by step over real processes, with NVML as the witness.

The seed's Decision 7, measured there with nvidia-smi: memory is counted by references across
processes; the server's release frees nothing while a client holds it, and nothing can force that.
"""

from __future__ import annotations

import pytest

from tests.gms.bench import ClientProcess, GmsProcess
from tests.gms.kinds import stand_in_only
from tests.helpers import until
from tests.standin import build

MIB = 1 << 20
SIZE = 512 * MIB
GPU = build.GPU_A

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    build.use(monkeypatch)


def used() -> int:
    """The bytes in use on the device, by NVML, of all processes."""
    import pynvml

    pynvml.nvmlInit()
    found = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(GPU)).used
    pynvml.nvmlShutdown()
    return int(found)


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
