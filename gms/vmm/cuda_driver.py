"""One device through CUDA's driver API: calls by name, failures as errors with a fix.

The only file that talks to cuda-python. It knows devices and contexts, and nothing of slabs. The
surprising thing: it works without a context while the driver allows it, because a context takes
hundreds of MiB of the device. A call that is refused for lack of one is repeated with the device's
primary context, which torch uses too.

`python -m gms.vmm.cuda_driver` prints `{"devices": [id, …]}`, what CUDA shows a process with this
environment, in CUDA's order, or `{"error": {…}}`. A process of its own, because CUDA reads its
environment once, and a driver may hang or crash.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from plumbing.errors import UnderstudyError, UsageError

# The driver's errors for a call that needs a context: the first for all copies, both for memory
# calls of some drivers.
CONTEXT_WANTED = ("CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_NOT_INITIALIZED")

# How to fix the usual errors.
FIXES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "the device is full; `gms status` and nvidia-smi show the holders",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: check CUDA_VISIBLE_DEVICES, and that this "
    "container has a GPU",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "this container's libcuda does not match the host's "
    "driver: remove its compatibility package, or update the host's driver",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start the host's fabric manager (nvidia-fabricmanager)",
    "CUDA_ERROR_STUB_LIBRARY": "the toolkit's stub of libcuda is loaded: remove its directory from "
    "LD_LIBRARY_PATH",
    "CUDA_ERROR_OPERATING_SYSTEM": "the kernel refused: often out of descriptors, so raise the "
    "limit (ulimit -n)",
    "CUDA_ERROR_NOT_SUPPORTED": "virtual memory management with descriptors is needed: Linux, and "
    "a GPU of the Volta generation or newer",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device's memory has failed: drain the node and reset it",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "this process accessed an illegal address; its context is lost "
    "and it must exit",
}


class Driver:
    """The driver, for the device called `uuid`; calls may come from any thread."""

    def __init__(self, uuid: str) -> None:
        """Initialise the driver and find the device."""
        self.api = initialised()
        self.uuid = uuid
        self.has_context = False
        self._context: Any = None
        self._context_lock = threading.Lock()
        ids = visible_ids(self.api)
        if id_of(uuid) not in ids:
            seen = ", ".join(ids) or "none"
            raise UsageError(
                "gms.device_not_visible",
                f"CUDA shows {seen} to this process, not {uuid}; check CUDA_VISIBLE_DEVICES",
                visible=ids,
            )
        self.ordinal = ids.index(id_of(uuid))

    def call(self, name: str, *args: Any) -> Any:
        """The result of `cu<name>(*args)`, called with a context if the driver needs one."""
        answer = getattr(self.api, f"cu{name}")(*args)
        if answer[0].name in CONTEXT_WANTED:
            self.use_context()
            answer = getattr(self.api, f"cu{name}")(*args)
        return checked(answer, name)

    def use_context(self) -> None:
        """Make the primary context current on this thread, permanently."""
        with self._context_lock:
            if self._context is None:
                device = checked(self.api.cuDeviceGet(self.ordinal), "DeviceGet")
                retained = self.api.cuDevicePrimaryCtxRetain(device)
                self._context = checked(retained, "DevicePrimaryCtxRetain")
                self.has_context = True
        checked(self.api.cuCtxSetCurrent(self._context), "CtxSetCurrent")

    def version(self) -> str:
        """The newest CUDA that the driver knows, like 13.0."""
        number = int(self.call("DriverGetVersion"))
        return f"{number // 1000}.{number % 1000 // 10}"


def initialised() -> Any:
    """The driver's API, initialised."""
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise UsageError(
            "gms.no_cuda",
            f"CUDA memory needs cuda-python, which cannot be imported ({error}); "
            "pip install understudy[cuda]",
        ) from error
    try:
        found = api.cuInit(0)
    except RuntimeError as error:  # cuda-python found no libcuda.so.1, or one that is too old
        raise UsageError(
            "gms.no_cuda",
            f"CUDA memory requires the NVIDIA driver, which cannot be loaded ({error})",
        ) from error
    try:
        checked(found, "Init")
    except UnderstudyError as error:
        if error.details["driver_error"] != "CUDA_ERROR_NO_DEVICE":
            raise
        raise UsageError("gms.no_cuda", error.message, **error.details) from error
    return api


def visible_ids(api: Any) -> list[str]:
    """The UUIDs of the devices that this process sees, without a prefix, in CUDA's order."""
    # For a MIG instance, the older of the two calls returns the GPU's UUID. cuda-python 13 has only
    # the newer one, under the older name.
    uuid_of = getattr(api, "cuDeviceGetUuid_v2", api.cuDeviceGetUuid)
    ids = []
    for ordinal in range(checked(api.cuDeviceGetCount(), "DeviceGetCount")):
        device = checked(api.cuDeviceGet(ordinal), "DeviceGet")
        digits = bytes(checked(uuid_of(device), "DeviceGetUuid").bytes).hex()
        ids.append(
            "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
        )
    return ids


def id_of(uuid: str) -> str:
    """`GPU-<id>` or `MIG-<id>` without its prefix."""
    return uuid.partition("-")[2].lower()


def checked(answer: tuple[Any, ...], name: str) -> Any:
    """The value of a driver call's result."""
    error, *values = answer
    if not error:
        return values[0] if values else None
    known = error.name
    code = "gms.device_full" if known == "CUDA_ERROR_OUT_OF_MEMORY" else "gms.driver_failed"
    fix = f": {FIXES[known]}" if known in FIXES else ""
    raise UnderstudyError(code, f"cu{name} failed with {known}{fix}", driver_error=known)


def main() -> None:
    """Print the ids of the devices that this process sees, or the error."""
    try:
        print(json.dumps({"devices": visible_ids(initialised())}))
    except UnderstudyError as error:
        print(json.dumps({"error": error.to_dict()}))


if __name__ == "__main__":
    main()
