"""Which GPUs `gms serve --memory cuda` serves, by UUID; the only file that talks to NVML.

NVML and CUDA number devices in different orders, so a device is its UUID here. To resolve an index
in CUDA_VISIBLE_DEVICES, a short-lived process with that environment asks CUDA itself. A GPU in MIG
mode computes nothing by itself: its instances are served, each as a device.

`python -m gms.server.devices` prints NVML's facts about the GPUs, for a check-up: one JSON document
`{"driver_version", "gpus": [{uuid, is_mig, instances, compute_mode, processes:
[{pid, used_bytes}]}]}`, or `{"problem": why there is none, "is_broken": whether a driver is there
and does not work}`. A process of its own, because a hanging driver must not block the checker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from plumbing.errors import UnderstudyError, UsageError, explain_shortage

VISIBLE = "CUDA_VISIBLE_DEVICES"

# cuInit takes seconds on a machine with eight GPUs that no process holds open; a broken one hangs.
PROBE_S = 60.0

# nvmlComputeMode_t of nvml.h
COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}

# What is raised where there is no driver at all, and nothing is wrong with that.
ABSENT = (
    *("ImportError", "ModuleNotFoundError"),
    *("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"),
)


class NvmlGpu(Struct, frozen=True):
    """A GPU, and its MIG instances if it is in that mode."""

    uuid: str
    instances: tuple[str, ...] = ()
    is_mig: bool = False


def devices_to_serve(wanted: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """The UUIDs of the devices to serve, each `GPU-…` or `MIG-…`, none twice.

    `wanted` are UUIDs or their beginnings, and override CUDA_VISIBLE_DEVICES; with neither, every
    GPU and every MIG instance.
    """
    gpus = list(list_gpus())
    visible = environ.get(VISIBLE)
    words = list(wanted) or ([] if visible is None else visible.split(","))
    if wanted or (words and all(word.startswith(("GPU-", "MIG-")) for word in words)):
        names = [_named(word.strip(), gpus) for word in words]
    elif visible is not None:
        names = [_named_by_id(id_, gpus) for id_ in visible_to(environ)]
    else:
        names = [name for gpu in gpus for name in (gpu.instances if gpu.is_mig else (gpu.uuid,))]
    if not names:
        raise UsageError(
            "gms.no_devices",
            f"there is no device to serve ({VISIBLE} is {visible!r}); NVML lists "
            f"{', '.join(_describe(gpu) for gpu in gpus) or 'none'}",
        )
    # Fail once now, and not once in each server.
    visible_to({**environ, VISIBLE: names[0]})
    return list(dict.fromkeys(names))


def visible_to(environ: Mapping[str, str]) -> list[str]:
    """The ids (UUIDs without prefix) that CUDA shows with `environ`, in its order."""
    words = [sys.executable, "-m", "gms.vmm.cuda_driver"]
    try:
        done = subprocess.run(
            words, env=dict(environ), stdout=subprocess.PIPE, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            "gms.no_cuda",
            f"CUDA's driver did not initialise in {PROBE_S:g} s: check nvidia-smi and dmesg",
        ) from error
    except OSError as error:
        raise UnderstudyError(
            "gms.driver_failed",
            f"cannot start a process to ask CUDA: {explain_shortage(error.errno)}",
        ) from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise UsageError(
            "gms.no_cuda", f"CUDA's driver crashed its process (exit code {done.returncode})"
        ) from error
    if "error" in answer:
        problem = answer["error"]
        kind = UsageError if problem["code"] == "gms.no_cuda" else UnderstudyError
        raise kind(problem["code"], problem["message"], **problem["details"])
    return list(answer["devices"])


def list_gpus() -> Iterator[NvmlGpu]:
    """Every GPU that NVML lists, in its order."""
    with nvml_session() as nvml:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            is_mig = _is_mig(nvml, handle)
            instances = tuple(_instances(nvml, handle)) if is_mig else ()
            yield NvmlGpu(nvml.nvmlDeviceGetUUID(handle), instances, is_mig)


@contextmanager
def nvml_session() -> Iterator[Any]:
    """NVML, initialised while the block runs."""
    try:
        import pynvml as nvml
    except ImportError as error:
        raise UsageError(
            "gms.no_cuda", f"CUDA memory needs nvidia-ml-py, which cannot be imported ({error})"
        ) from error
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise UsageError(
            "gms.no_cuda",
            f"CUDA memory requires the NVIDIA driver, but NVML reports: {error}; check that this "
            "container has a GPU",
        ) from error


class DeviceUsage:
    """How much of a GPU, or of a MIG instance, is used by whomever. NVML stays initialised from the
    first question on: that takes some milliseconds, and a question microseconds."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._handle: Any = None

    def used_bytes(self) -> int | None:
        """None while the driver does not tell."""
        try:
            import pynvml as nvml
        except ImportError:
            return None
        try:
            if self._handle is None:
                nvml.nvmlInit()
                self._handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            found = nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except nvml.NVMLError:
            self._handle = None
            return None
        return int(found.total - found.free)


def _is_mig(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _instances(nvml: Any, handle: Any) -> Iterator[str]:
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except nvml.NVMLError_NotFound:
            continue  # an empty place; the next one may not be
        yield nvml.nvmlDeviceGetUUID(instance)


def _named(word: str, gpus: Sequence[NvmlGpu]) -> str:
    """The one device whose UUID begins with `word`."""
    known = [name for gpu in gpus for name in (gpu.uuid, *gpu.instances)]
    found = [name for name in known if name.lower().startswith(word.lower())] if word else []
    listed = ", ".join(_describe(gpu) for gpu in gpus) or "no device"
    if len(found) != 1:
        how = f"matches {len(found)} devices" if found else "matches no device"
        raise UsageError("gms.no_such_device", f"{word!r} {how}; NVML lists {listed}")
    if any(gpu.uuid == found[0] and gpu.is_mig for gpu in gpus):
        raise UsageError(
            "gms.no_such_device",
            f"{found[0]} is in MIG mode: choose one of its instances; NVML lists {listed}",
        )
    return found[0]


def _named_by_id(id_: str, gpus: Sequence[NvmlGpu]) -> str:
    """The device of this id, which is a UUID without its prefix."""
    for gpu in gpus:
        for name in (gpu.uuid, *gpu.instances):
            if name.partition("-")[2].lower() == id_:
                return name
    raise UsageError("gms.no_such_device", f"CUDA shows {id_}, which NVML does not list")


def _describe(gpu: NvmlGpu) -> str:
    if not gpu.is_mig:
        return gpu.uuid
    return f"{gpu.uuid} (in MIG mode: {', '.join(gpu.instances) or 'no instance'})"


def main() -> None:
    """Print the facts."""
    try:
        print(json.dumps(facts()))
    except UsageError as error:
        is_broken = type(error.__cause__).__name__ not in ABSENT
        print(json.dumps({"problem": error.message, "is_broken": is_broken}))


def facts() -> dict[str, Any]:
    """The document."""
    gpus = list(list_gpus())
    with nvml_session() as nvml:
        return {
            "driver_version": nvml.nvmlSystemGetDriverVersion(),
            "gpus": [
                {
                    "uuid": gpu.uuid,
                    "is_mig": gpu.is_mig,
                    "instances": list(gpu.instances),
                    **_settings(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)),
                }
                for gpu in gpus
            ],
        }


def _settings(nvml: Any, handle: Any) -> dict[str, Any]:
    def ask(question: Callable[[Any], Any]) -> Any:
        """None where the model or the container does not support the question."""
        try:
            return question(handle)
        except nvml.NVMLError:
            return None

    compute = ask(nvml.nvmlDeviceGetComputeMode)
    running = ask(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    return {
        "compute_mode": None if compute is None else COMPUTE_MODES.get(compute, str(compute)),
        "processes": [{"pid": each.pid, "used_bytes": each.usedGpuMemory} for each in running],
    }


if __name__ == "__main__":
    main()
