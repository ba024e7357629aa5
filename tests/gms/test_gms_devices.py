"""Which devices are served, on machines whose NVML and CUDA count them in different orders."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gms.server import devices
from gms.server.devices import devices_to_serve
from plumbing.errors import UnderstudyError, UsageError
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


@pytest.fixture
def mixed(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, one in MIG mode with two instances, another GPU."""
    build.use(monkeypatch, DEVICES=",".join(MIXED))


def serve(visible: str | None, *wanted: str) -> list[str]:
    others = {name: value for name, value in os.environ.items() if name != devices.VISIBLE}
    return devices_to_serve(
        wanted, others if visible is None else {**others, devices.VISIBLE: visible}
    )


def test_every_gpu_is_served_by_default():
    """Nothing said: NVML's list."""
    assert serve(None) == GPUS


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", [GPUS[2]]),  # CUDA's first, NVML's last
        ("2,0", [GPUS[0], GPUS[2]]),
        (GPUS[1], [GPUS[1]]),
        ("GPU-cccccc2,GPU-cccccc0", [GPUS[2], GPUS[0]]),
        ("GPU-CCCCCC11", [GPUS[1]]),
    ],
)
def test_visible_devices_are_served_by_uuid(visible: str, expected: list[str]):
    """CUDA_VISIBLE_DEVICES as indices, which are CUDA's and not NVML's, as UUIDs and beginnings."""
    assert serve(visible) == expected


def test_indices_follow_the_order_that_cuda_uses(monkeypatch: pytest.MonkeyPatch):
    """CUDA_DEVICE_ORDER turns CUDA's order into NVML's: the same index is another device."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert serve("0") == [GPUS[0]]


def test_named_devices_override_what_is_visible():
    """--device: UUIDs or beginnings of them, in their order, whatever the environment says."""
    assert serve("0", "GPU-cccccc1", GPUS[0]) == [GPUS[1], GPUS[0]]
    assert serve("", GPUS[0], "GPU-cccccc0") == [GPUS[0]]


@pytest.mark.parametrize(
    ("visible", "wanted", "words"),
    [
        (None, "GPU-dddd", ["'GPU-dddd' matches no device", *GPUS]),
        (None, "GPU-c", ["matches 3 devices"]),
        ("GPU-dddd", "", ["matches no device"]),
        (None, " ", ["matches no device"]),
        ("", "", ["CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"]),
        ("9", "", ["CUDA_ERROR_NO_DEVICE"]),
    ],
)
def test_unknown_devices_are_one_sentence(visible: str | None, wanted: str, words: list[str]):
    """No such device, several, none: what was asked for and what there is."""
    with pytest.raises(UsageError) as caught:
        serve(visible, *([wanted] if wanted else []))
    for word in words:
        assert word in caught.value.message


@pytest.mark.usefixtures("mixed")
def test_mig_instances_are_served_and_their_gpu_is_not():
    """Nothing said: GPUs and instances, in NVML's order; empty places between them are passed."""
    assert serve(None) == [GPUS[0], *MIGS, GPUS[1]]
    assert serve(MIGS[1]) == [MIGS[1]]
    assert serve(None, "MIG-bbbbbbb0") == [MIGS[0]]


@pytest.mark.usefixtures("mixed")
def test_gpu_in_mig_mode_is_refused_with_its_instances():
    """Asked for by name: the sentence says what to name instead."""
    with pytest.raises(UsageError, match="in MIG mode") as caught:
        serve(PARENT)
    assert MIGS[0] in caught.value.message


@pytest.mark.usefixtures("mixed")
def test_index_of_a_gpu_in_mig_mode_is_its_first_instance():
    """As CUDA reads it: the index of the GPU, the UUID of an instance."""
    assert serve("1") == [MIGS[0]]


def test_gpu_in_mig_mode_without_instances_is_no_device(monkeypatch: pytest.MonkeyPatch):
    """MIG mode is on without instances: nothing to serve, and the message names the reason."""
    gpu = devices.NvmlGpu(PARENT, (), True)
    monkeypatch.setattr(devices, "list_gpus", lambda: iter([gpu]))
    with pytest.raises(UsageError, match="in MIG mode: no instance"):
        serve(None)


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
    done = subprocess.run(
        [sys.executable, "-c", program, *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(directory) == []


def test_probe_without_cuda_python_names_the_package_to_install():
    """The child that asks CUDA, where cuda-python cannot be imported."""
    program = "import sys; sys.modules['cuda'] = None; from gms.vmm.cuda_driver import main; main()"
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    assert "understudy[cuda]" in json.loads(done.stdout)["error"]["message"]
