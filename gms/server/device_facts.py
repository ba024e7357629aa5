"""`python -m gms.server.device_facts`: what NVML knows of the GPUs, for a check-up.

One JSON document on stdout: `{"driver_version", "gpus": [{uuid, is_mig, instances, is_persistent,
compute_mode, processes: [{pid, used_bytes}]}]}`, or `{"problem": why there is none, "is_broken":
whether a driver is there and does not work}`. A process of its own, because a driver that hangs
must not do so in the one that looks for what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from gms.server.devices import list_gpus, nvml_session
from plumbing.errors import UsageError

# nvmlComputeMode_t of nvml.h
COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}

# What is raised where there is no driver at all, and nothing is wrong with that.
ABSENT = (
    *("ImportError", "ModuleNotFoundError"),
    *("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"),
)


def main() -> None:
    """Say what there is."""
    try:
        print(json.dumps(facts()))
    except UsageError as error:
        is_broken = type(error.__cause__).__name__ not in ABSENT
        print(json.dumps({"problem": error.message, "is_broken": is_broken}))


def facts() -> dict[str, Any]:
    """The document.

    Raises:
        UsageError: `gms.no_cuda`, there is no driver.
    """
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
        """None for what this model does not know, or this container is not told."""
        try:
            return question(handle)
        except nvml.NVMLError:
            return None

    persistence = ask(nvml.nvmlDeviceGetPersistenceMode)
    compute = ask(nvml.nvmlDeviceGetComputeMode)
    running = ask(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    return {
        "is_persistent": None if persistence is None else bool(persistence),
        "compute_mode": None if compute is None else COMPUTE_MODES.get(compute, str(compute)),
        "processes": [{"pid": each.pid, "used_bytes": each.usedGpuMemory} for each in running],
    }


if __name__ == "__main__":
    main()
