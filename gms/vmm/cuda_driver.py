"""One device through CUDA's driver API: calls by name, failures as errors with a mend.

The only file that talks to cuda-python. It knows devices and contexts, and nothing of slabs. The
surprising thing: it works without a context for as long as the driver lets it, because a context
takes hundreds of MiB of the device; a call that is refused for want of one is made again with the
device's primary context, which is the one that torch uses too.
"""

from __future__ import annotations

import threading
from typing import Any

from plumbing.errors import UnderstudyError, UsageError

# How the driver says that a call needs a context: the first for copies always, both for memory
# calls where a driver wants one.
CONTEXT_WANTED = ("CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_NOT_INITIALIZED")

# What to do about the usual ones.
MENDS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "the device is full; `gms status` and nvidia-smi say who holds it",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: look at CUDA_VISIBLE_DEVICES, and whether this "
    "container was given one",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the libcuda of this container does not fit the driver of "
    "the host: remove its compatibility package, or update the host's driver",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start the host's fabric manager (nvidia-fabricmanager)",
    "CUDA_ERROR_STUB_LIBRARY": "the toolkit's stub of libcuda is loaded: take its directory out of "
    "LD_LIBRARY_PATH",
    "CUDA_ERROR_OPERATING_SYSTEM": "the kernel refused: often out of descriptors, so raise the "
    "limit (ulimit -n)",
    "CUDA_ERROR_NOT_SUPPORTED": "virtual memory management with descriptors is needed: Linux, and "
    "a GPU of the Volta generation or newer",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device's memory has failed: drain the node and reset it",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "this process touched memory that it may not; its context is "
    "lost and it has to end",
}


class Driver:
    """The driver, for the device called `uuid`; calls may come from any thread."""

    def __init__(self, uuid: str) -> None:
        """Initialise the driver and find the device.

        Raises:
            UsageError: `gms.no_cuda`, no cuda-python or no driver; `gms.device_not_visible`.
            UnderstudyError: `gms.driver_failed`.
        """
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
                f"CUDA does not show {uuid} to this process but {seen}; check CUDA_VISIBLE_DEVICES",
                visible=ids,
            )
        self.ordinal = ids.index(id_of(uuid))

    def call(self, name: str, *args: Any) -> Any:
        """`cu<name>(*args)`, with a context if the driver wants one; what it answers.

        Raises:
            UnderstudyError: `gms.device_full`, the driver is out of memory; `gms.driver_failed`.
        """
        error, *values = getattr(self.api, f"cu{name}")(*args)
        if error.name in CONTEXT_WANTED:
            self.use_context()
            error, *values = getattr(self.api, f"cu{name}")(*args)
        if error:
            raise failed(name, error)
        return values[0] if values else None

    def use_context(self) -> None:
        """Make the primary context current on this thread, and keep it for good."""
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
    """The driver's API, initialised.

    Raises:
        UsageError: `gms.no_cuda`, there is no cuda-python, no driver, or no GPU.
        UnderstudyError: `gms.driver_failed`, which the next try may not meet: a fabric manager or
            a driver that is still coming up.
    """
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
    except RuntimeError as error:  # cuda-python's word for no libcuda.so.1, or too old a one
        raise UsageError(
            "gms.no_cuda",
            f"CUDA memory needs NVIDIA's driver, which cannot be loaded ({error})",
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
    # Of a MIG instance, the older of the two calls gives the GPU's. cuda-python 13 has one name
    # for the newer, 12 has two.
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
    """The value of an answer of the driver's.

    Raises:
        UnderstudyError: the answer is an error.
    """
    error, *values = answer
    if error:
        raise failed(name, error)
    return values[0] if values else None


def failed(name: str, error: Any) -> UnderstudyError:
    """The error for a call that the driver answered with `error`."""
    known = error.name
    code = "gms.device_full" if known == "CUDA_ERROR_OUT_OF_MEMORY" else "gms.driver_failed"
    mend = f": {MENDS[known]}" if known in MENDS else ""
    return UnderstudyError(code, f"cu{name} failed with {known}{mend}", driver_error=known)
