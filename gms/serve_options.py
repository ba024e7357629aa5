"""The settings of `gms serve`, and of the servers that it starts."""

from __future__ import annotations

from collections.abc import Sequence

from gms.options import DIRECTORY
from gms.server.server import STALL_MS
from plumbing.errors import UsageError
from plumbing.service.config import Option, size_bytes, size_list
from plumbing.service.hosts import ALLOWED_HOST

MEMORY = Option("memory", str, "host", "The kind of memory.", choices=("host", "cuda"))
DEVICE_BYTES = Option(
    "device_bytes", size_bytes, None,
    "Memory to use per device; 4GiB of host memory, or all of a GPU, unless given.", minimum=1,
)  # fmt: skip
DEVICES_BYTES = Option(
    "device_bytes", size_list, None,
    "Memory to use per device, or a size for each, in their order and separated by commas; 4GiB of"
    " host memory, or all of a GPU, unless given.",
)  # fmt: skip
STALL = Option(
    "stall_s", float, STALL_MS / 1000, "Longest time in seconds a writer may make no progress.",
    minimum=0.1,
)  # fmt: skip
HOST_MEMORY = Option(
    "host_memory", size_bytes, None,
    "Host memory for copies of the weights, in equal parts for all devices, or, with models, as the"
    " pool divides it; without it, weights are not copied and cannot be offloaded.", minimum=1,
)  # fmt: skip
MODEL = Option(
    "model", str, (), "A model of the pod, which then has servers of its own on each device, such"
    " as HOST-0.MODEL. Repeatable.", env="UNDERSTUDY_MODELS", many=True,
)  # fmt: skip
SERVE = (
    DIRECTORY,
    MEMORY,
    Option("devices", int, 1, "Number of devices, for host memory.", minimum=1, maximum=64),
    Option(
        "device",
        str,
        (),
        "UUIDs of the GPUs or MIG instances to serve, separated by commas; all visible ones unless"
        " given. Repeatable.",
        env="UNDERSTUDY_GPUS",
        many=True,
    ),
    MODEL,
    DEVICES_BYTES,
    HOST_MEMORY,
    STALL,
    Option("http_host", str, "127.0.0.1", "Address of probes, status and metrics."),
    Option("http_port", int, 9401, "Port of probes, status and metrics.", minimum=0, maximum=65535),
    ALLOWED_HOST,
)
SERVE_DEVICE = (
    DIRECTORY,
    MEMORY,
    Option("device", str, help="The device's name."),
    DEVICE_BYTES,
    STALL,
    Option("restarts", int, 0, "Number of servers that the device had before this one.", minimum=0),
)

SERVE_KV = tuple(option for option in SERVE_DEVICE if option is not STALL)


def sizes_of(devices: Sequence[str], sizes: tuple[int, ...] | None) -> dict[str, int]:
    """What may be used of each device; empty: unless given.

    Raises:
        UsageError: `config.device_sizes`.
    """
    if sizes is None:
        return {}
    if len(sizes) not in (1, len(devices)):
        raise UsageError(
            "config.device_sizes",
            f"--device-bytes has {len(sizes)} sizes, and there are {len(devices)} devices"
            f" ({', '.join(devices)}): give one size for all of them, or one for each",
        )
    return dict(zip(devices, sizes * (len(devices) // len(sizes)), strict=True))
