"""Which GPUs `gms serve --memory cuda` serves, by UUID; the only file that talks to NVML.

NVML and CUDA count devices in orders of their own, so an index of one means nothing to the other:
here a device is its UUID, and what an index in CUDA_VISIBLE_DEVICES stands for is asked of CUDA
itself, in a short-lived process with that very environment. A GPU in MIG mode computes nothing by
itself: its instances are served, each as a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plumbing.errors import UnderstudyError, UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"

# cuInit takes seconds on a machine with eight GPUs that nobody holds open; a broken one hangs.
PROBE_S = 60.0


@dataclass(frozen=True)
class Gpu:
    """A GPU, and its MIG instances if it is in that mode."""

    uuid: str
    instances: tuple[str, ...] = ()
    is_mig: bool = False


def devices_to_serve(wanted: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """The UUIDs of the devices to serve, each `GPU-…` or `MIG-…`, none twice.

    `wanted` are UUIDs or beginnings of them, and override CUDA_VISIBLE_DEVICES; with neither it is
    every GPU and every MIG instance there is.

    Raises:
        UsageError: `gms.no_cuda`, no driver; `gms.no_such_device`; `gms.no_devices`.
        UnderstudyError: `gms.driver_failed`, there is one and it does not work now.
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
    # One sentence now, where each server would have one of its own.
    visible_to({**environ, VISIBLE: names[0]})
    return list(dict.fromkeys(names))


def visible_to(environ: Mapping[str, str]) -> list[str]:
    """The ids (UUIDs without prefix) that CUDA shows with `environ`, in its order.

    Raises:
        UsageError: `gms.no_cuda`, CUDA cannot be used with it.
        UnderstudyError: `gms.driver_failed`.
    """
    words = [sys.executable, "-m", "gms.vmm.cuda_visible"]
    try:
        done = subprocess.run(
            words, env=dict(environ), stdout=subprocess.PIPE, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            "gms.no_cuda",
            f"CUDA's driver did not initialise in {PROBE_S:g} s: look at nvidia-smi and dmesg",
        ) from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise UsageError(
            "gms.no_cuda", f"CUDA's driver ended its process with {done.returncode}"
        ) from error
    if "error" in answer:
        problem = answer["error"]
        kind = UsageError if problem["code"] == "gms.no_cuda" else UnderstudyError
        raise kind(problem["code"], problem["message"], **problem["details"])
    return list(answer["devices"])


def list_gpus() -> Iterator[Gpu]:
    """Every GPU that NVML lists, in its order.

    Raises:
        UsageError: `gms.no_cuda`.
    """
    with nvml_session() as nvml:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            is_mig = _is_mig(nvml, handle)
            instances = tuple(_instances(nvml, handle)) if is_mig else ()
            yield Gpu(nvml.nvmlDeviceGetUUID(handle), instances, is_mig)


@contextmanager
def nvml_session() -> Iterator[Any]:
    """NVML, initialised for as long as the block lasts.

    Raises:
        UsageError: `gms.no_cuda`.
    """
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
            f"CUDA memory needs NVIDIA's driver, and NVML says: {error}; was this container given "
            "a GPU?",
        ) from error


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


def _named(word: str, gpus: Sequence[Gpu]) -> str:
    """The one device whose UUID begins with `word`."""
    known = [name for gpu in gpus for name in (gpu.uuid, *gpu.instances)]
    found = [name for name in known if name.lower().startswith(word.lower())] if word else []
    listed = ", ".join(_describe(gpu) for gpu in gpus) or "no device"
    if len(found) != 1:
        how = f"begins {len(found)} of the devices" if found else "is none of the devices"
        raise UsageError("gms.no_such_device", f"{word!r} {how}; NVML lists {listed}")
    if any(gpu.uuid == found[0] and gpu.is_mig for gpu in gpus):
        raise UsageError(
            "gms.no_such_device",
            f"{found[0]} is in MIG mode, so its instances are the devices; NVML lists {listed}",
        )
    return found[0]


def _named_by_id(id_: str, gpus: Sequence[Gpu]) -> str:
    """The device of this id, which is a UUID without its prefix."""
    for gpu in gpus:
        for name in (gpu.uuid, *gpu.instances):
            if name.partition("-")[2].lower() == id_:
                return name
    raise UsageError("gms.no_such_device", f"CUDA shows {id_}, which NVML does not list")


def _describe(gpu: Gpu) -> str:
    if not gpu.is_mig:
        return gpu.uuid
    return f"{gpu.uuid} (in MIG mode: {', '.join(gpu.instances) or 'no instance'})"
