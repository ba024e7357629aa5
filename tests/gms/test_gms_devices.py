"""Which devices are served, on machines whose NVML and CUDA count them in different orders."""

from __future__ import annotations

import os
import sys

import pytest

from gms.server import devices
from gms.server.devices import devices_to_serve
from plumbing.errors import UnderstudyError, UsageError
from tests.helpers import run_command
from tests.standin import build

# In NVML's order; CUDA counts the GPUs the other way round.
GPUS = [f"GPU-cccccc{n}{n}-0000-0000-0000-000000000000" for n in range(3)]
PARENT = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
MIGS = [f"MIG-bbbbbbb{n}-0000-0000-0000-000000000000" for n in range(2)]
MIXED = [GPUS[0], f"{PARENT}={'+'.join(MIGS)}", GPUS[1]]

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    build.use(monkeypatch, DEVICES=",".join(GPUS))


def serve(visible: str | None, *wanted: str) -> list[str]:
    others = {name: value for name, value in os.environ.items() if name != devices.VISIBLE}
    return devices_to_serve(
        wanted, others if visible is None else {**others, devices.VISIBLE: visible}
    )


@pytest.mark.parametrize(
    ("there", "visible", "wanted", "expected"),
    [
        (GPUS, None, [], GPUS),
        (GPUS, "0", [], [GPUS[2]]),  # CUDA's first, NVML's last
        (GPUS, "2,0", [], [GPUS[0], GPUS[2]]),
        (GPUS, "GPU-cccccc2,GPU-cccccc0", [], [GPUS[2], GPUS[0]]),
        (GPUS, "GPU-CCCCCC11", [], [GPUS[1]]),
        (GPUS, "0", ["GPU-cccccc1", GPUS[0]], [GPUS[1], GPUS[0]]),  # --device goes before
        (GPUS, "", [GPUS[0], "GPU-cccccc0"], [GPUS[0]]),
        (MIXED, None, [], [GPUS[0], *MIGS, GPUS[1]]),  # instances, and not their GPU
        (MIXED, MIGS[1], [], [MIGS[1]]),
        (MIXED, None, ["MIG-bbbbbbb0"], [MIGS[0]]),
        (MIXED, "1", [], [MIGS[0]]),  # as CUDA reads it: the GPU's first instance
    ],
)
def test_devices_are_served_by_uuid(
    monkeypatch: pytest.MonkeyPatch,
    there: list[str],
    visible: str | None,
    wanted: list[str],
    expected: list[str],
):
    """CUDA_VISIBLE_DEVICES as indices, which are CUDA's and not NVML's, as UUIDs and beginnings;
    `--device`; and MIG mode."""
    build.use(monkeypatch, DEVICES=",".join(there))
    assert serve(visible, *wanted) == expected


def test_indices_follow_the_order_that_cuda_uses(monkeypatch: pytest.MonkeyPatch):
    """CUDA_DEVICE_ORDER turns CUDA's order into NVML's: the same index is another device."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert serve("0") == [GPUS[0]]


@pytest.mark.parametrize(
    ("there", "visible", "wanted", "words"),
    [
        (GPUS, None, "GPU-dddd", ["'GPU-dddd' matches no device", *GPUS]),
        (GPUS, None, "GPU-c", ["matches 3 devices"]),
        (GPUS, "GPU-dddd", "", ["matches no device"]),
        (GPUS, "", "", ["CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"]),
        (MIXED, None, PARENT, ["in MIG mode", *MIGS]),
    ],
)
def test_unknown_devices_are_named_beside_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
    there: list[str],
    visible: str | None,
    wanted: str,
    words: list[str],
):
    build.use(monkeypatch, DEVICES=",".join(there))
    with pytest.raises(UsageError) as caught:
        serve(visible, *([wanted] if wanted else []))
    for word in words:
        assert word in caught.value.message


def test_broken_driver_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    """NVML without a driver, CUDA that fails, hangs or dies: each with its reason."""
    monkeypatch.setenv("STANDIN_NVML_INIT", "9")
    with pytest.raises(UsageError, match="Driver Not Loaded"):
        serve(None)
    monkeypatch.delenv("STANDIN_NVML_INIT")
    monkeypatch.setenv("STANDIN_FAIL", "cuInit:1:803")
    with pytest.raises(UnderstudyError, match="compatibility package") as caught:
        serve(None)
    assert (caught.value.code, caught.value.exit_code) == ("gms.driver_failed", 1)
    monkeypatch.setenv("STANDIN_FAIL", "cuInit:1:100")
    with pytest.raises(UsageError, match="no GPU is visible"):
        serve(None)
    monkeypatch.delenv("STANDIN_FAIL")
    monkeypatch.setattr(devices, "PROBE_S", 0.001)
    with pytest.raises(UsageError, match="did not initialise"):
        serve(None)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UsageError, match="crashed its process"):
        devices.visible_to(os.environ)


HIDDEN = {
    "nvidia-ml-py": "sys.modules['pynvml'] = None",
    "NVML Shared Library Not Found": "import pynvml; pynvml.CDLL = lambda *_: os.open('', 0)",
}


@pytest.mark.parametrize("word", HIDDEN)
def test_serving_cuda_where_there_is_none_is_one_sentence(directory: str, word: str):
    """`gms serve --memory cuda` without library or driver: exit code 2, never host memory."""
    program = f"import os, sys; {HIDDEN[word]}; from gms.cli import main; main()"
    flags = ["serve", "--memory", "cuda", "--dir", directory]
    done = run_command([sys.executable, "-c", program, *flags])
    assert done.returncode == 2, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(directory) == []
