"""The settings of `understudy up`, `drill` and the commands that look at a pod, as data."""

from __future__ import annotations

from engine.backends.registry import BACKENDS
from engine.messages import RANKS_MAX
from plumbing.service.config import Option, Resolved, size_list
from plumbing.service.hosts import ALLOWED_HOST, PORT_MAX
from understudy.drill.targets import check_target
from understudy.pod.ports import (
    ENGINE_PORT,
    GATEWAY_PORT,
    GMS_PORT,
    LOCKSERVER_PORT,
    POOL_PORT,
    SERVICE_PORT,
    UI_PORT,
    Ports,
)
from understudy.pod.table import RESTART_BACKOFF_MAX_S

DIRECTORY = "/run/understudy"

PORT_OFFSET_MAX = 50_000  # leaves room for the ports of some thousand engines
BURN_MAX = 16  # loops per CPU: the pod's share is then a seventeenth, or less

DIR = Option("dir", str, DIRECTORY, "The directory that the pod's processes share.")


def _port(name: str, default: int, text: str) -> Option:
    return Option(name, int, default, text, minimum=1, maximum=65535)


POD_OPTIONS = (
    Option(
        "model",
        str,
        None,
        "The directory of a Hugging Face checkpoint; with --backend vllm also a model of the Hub,"
        " such as Qwen/Qwen3-8B. Default: a small random model.",
    ),
    Option(
        "backend",
        str,
        "reference",
        "The inference backend of the engines.",
        choices=BACKENDS,
    ),
    Option(
        "device_bytes",
        size_list,
        None,
        "Memory to use per device, e.g. 20GiB, or one size for each device, separated by commas. "
        "Default: 4GiB of host memory, or all of a GPU.",
    ),
    Option(
        "tensor_parallel", int, 1, "Number of devices per engine.", minimum=1, maximum=RANKS_MAX
    ),
)

UP_OPTIONS = (
    DIR,
    Option(
        "pool",
        str,
        None,
        "Pool file: serve many models on the same devices; a request wakes its model.",
    ),
    *POD_OPTIONS,
    Option(
        "restart_backoff_max",
        float,
        RESTART_BACKOFF_MAX_S,
        "Longest wait in seconds before a part that keeps failing is restarted.",
        minimum=0,
    ),
    Option("memory", str, "host", "The kind of memory for the weights.", choices=("host", "cuda")),
    Option("host", str, "127.0.0.1", "Address of the inference port."),
    Option("http_host", str, "127.0.0.1", "Address of probes and metrics."),
    ALLOWED_HOST,
    Option(
        "port_offset",
        int,
        0,
        "Add this number to each port that is not set itself, e.g. 100 for a second pod.",
        minimum=0,
        maximum=PORT_OFFSET_MAX,
    ),
    _port("service_port", SERVICE_PORT, "Port for inference requests."),
    _port("lockserver_port", LOCKSERVER_PORT, "Port of the lock server's probes and metrics."),
    _port("gms_port", GMS_PORT, "Port of the memory service's probes and metrics."),
    _port("gateway_port", GATEWAY_PORT, "Port of the gateway's probes and metrics."),
    _port(
        "pool_port", POOL_PORT, "Port of the pool's probes and metrics, in a pod with a pool file."
    ),
    _port("ui_port", UI_PORT, "Port of the page that shows the pod."),
    _port(
        "engine_port",
        ENGINE_PORT,
        "Port of engine 0's probes and metrics; engine n uses this plus n.",
    ),
)

DRILL_OPTIONS = (
    DIR,
    *POD_OPTIONS,
    Option("kills", int, 20, "Number of processes to kill, one after another.", minimum=1),
    Option(
        "target",
        check_target,
        (),
        "What to kill: supervisor, backend-model, api, core or worker of the active engine, "
        "lockserver, gms, gms-supervisor or gateway; stop:PROCESS freezes it. Default: each "
        "process of the active engine in turn.",
        many=True,
    ),
    Option(
        "clients",
        int,
        4,
        "Number of clients that send requests back to back.",
        minimum=1,
        maximum=256,
    ),
    Option(
        "burn",
        int,
        0,
        "Number of busy loops per CPU, at equal priority, that compete with the pod.",
        minimum=0,
        maximum=BURN_MAX,
    ),
    Option(
        "duration_s",
        float,
        0.0,
        "Spread the kills evenly over N seconds, instead of killing as soon as a standby is ready.",
        minimum=0,
    ),
    Option(
        "url",
        str,
        None,
        "With --attach: send the clients' requests to this address outside the pod, e.g. of a"
        " Service or an Ingress, and count what it refuses.",
    ),
    Option("report", str, None, "Write the report to this HTML file."),
)

# What a pool file says instead, for each model.
_BY_MODEL = {"model", "backend", "tensor_parallel"}
NOT_WITH_POOL = tuple(each for each in UP_OPTIONS if each.name in _BY_MODEL)

STATUS_OPTIONS = (DIR,)
UI_OPTIONS = (
    DIR,
    Option("http_host", str, "127.0.0.1", "Address of the page."),
    Option("http_port", int, UI_PORT, "Port of the page.", minimum=0, maximum=PORT_MAX),
    ALLOWED_HOST,
)


def ports_of(config: Resolved) -> Ports:
    """The ports in `UP_OPTIONS`."""
    service, lockserver, gms, gateway, engine = (
        port_of(config, part) for part in ("service", "lockserver", "gms", "gateway", "engine")
    )
    return Ports(service, lockserver, gms, gateway, (engine, engine + 1))


def port_of(config: Resolved, part: str) -> int:
    """The port of `part`: its own setting, else the default plus --port-offset."""
    is_own = config.origin(f"{part}_port") != "default"
    port: int = config[f"{part}_port"]
    return port if is_own else port + int(config["port_offset"])


def given_address(config: Resolved) -> frozenset[str]:
    """What is said of the service's address, and wins over a pool file's `listen`."""
    names = ("host", "service_port")
    return frozenset(name for name in names if config.origin(name) != "default")
