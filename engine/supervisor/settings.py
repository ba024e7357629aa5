"""The options of `engine run`, their defaults and reasons, their checks, and the values they lead
to; and what the pool file says of one engine in their place: its model, its backend, its devices.

Does not know how the values are used.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.backends.registry import model_arguments
from engine.core import health, relaunch
from engine.core.events import State
from engine.core.loading import Role
from plumbing.errors import UsageError
from plumbing.pod.messages import Tier
from plumbing.pod.models import model_name
from plumbing.pod.paths import (
    DIR,
    HOST_DEVICES_ENV,
    engine_http_socket,
    engine_socket,
    lockserver_socket,
)
from plumbing.pod.supervision import DRAIN_MS as DRAIN_MS
from plumbing.service.config import Option, Resolved
from plumbing.service.hosts import ALLOWED_HOST
from plumbing.wire.tcp import Security
from plumbing.wire.tcp import settle as settle_security
from plumbing.wire.tcp_address import SCHEME, TcpAddress

PORT_FIRST = 9410  # engine n serves its probes on 9410 + n

INIT_MS = 7_200_000  # the first load of a large model from a slow disk, behind another engine's
WAKING_MS = 60_000  # the old holder's memory may take half a minute to be freed
# Unmapping takes up to 63 ms per GiB of host memory, and waits for the step that runs.
RELEASE_MS = 30_000
REAP_MS = 10_000  # SIGKILL to gone; 243 GB of pinned memory took 26 s, such machines raise this


# Milliseconds, at least 1: the default, and what it limits.
DURATIONS: Mapping[str, tuple[int, str]] = {
    "init_ms": (INIT_MS, "Time limit from launch to standby."),
    "waking_ms": (WAKING_MS, "Time limit from the grant to active."),
    "drain_ms": (
        DRAIN_MS,
        "Time limit for requests in flight when the engine drains: 2 s less than the host's grace.",
    ),
    "release_ms": (RELEASE_MS, "Time limit for freeing KV memory before sleep or a hand-over."),
    "reap_ms": (REAP_MS, "Time limit for killed processes to exit."),
    "answer_ms": (
        health.ANSWER_MS,
        "Time limit for an answer to a health check while active. A backend counts as hung if it "
        "also makes no token within --hang-ms.",
    ),
    "hang_ms": (
        health.HANG_MS,
        "Longest time without a new token while requests are in flight; CPU pressure stretches it,"
        f" up to {health.STRETCH_MAX:g} times.",
    ),
    "hang_alone_ms": (
        health.HANG_ALONE_MS,
        "The same while no standby is ready, unless --hang-ms is longer.",
    ),
    "idle_canary_ms": (
        health.IDLE_CANARY_MS,
        "Interval of canary requests while active and idle.",
    ),
    "backoff_first_ms": (relaunch.BACKOFF_FIRST_MS, "Shortest wait after a failed launch."),
    "backoff_max_ms": (relaunch.BACKOFF_MAX_MS, "Longest wait after a failed launch."),
    "yield_ms": (
        relaunch.YIELD_MS,
        "Wait for another engine to take over, after the death of an engine that held the lock.",
    ),
    "deaths_window_ms": (
        relaunch.DEATHS_WINDOW_MS,
        "The time in which --deaths-max deaths count as a crash loop.",
    ),
}

OPTIONS = (
    Option("backend", str, "reference", "The inference backend to run."),
    DIR,
    Option("engine_id", str, "engine-0", "The name of this engine in the pod.", env="ENGINE_ID"),
    Option(
        "model_name",
        model_name,
        "",
        "The model's name, in a pod with several: the engine uses the model's locks and memory.",
    ),
    Option(
        "pool",
        str,
        None,
        "Pool file of a pod with many models; selects this engine's model and devices by its id.",
    ),
    Option(
        "goal",
        str,
        Tier.AWAKE.value,
        "Initial goal: `awake` (start the backend, and serve once it holds the lock) or `cold`"
        " (start no backend).",
        choices=(Tier.AWAKE.value, Tier.COLD.value),
    ),
    Option(
        "role",
        str,
        Role.AUTO.value,
        "Whether this engine may load the weights; unrelated to which engine is active.",
        env="ENGINE_ROLE",
        choices=tuple(Role),
    ),
    Option(
        "lockserver_socket",
        str,
        None,
        "The lock server's socket or tcp://HOST:PORT. Default: lockserver.sock in --dir.",
        env="LOCKSERVER_SOCKET",
    ),
    Option("lockserver_tls_cert", str, None, "Over TCP: this engine's certificate, a PEM file."),
    Option(
        "lockserver_tls_key", str, None, "Over TCP: the private key of this engine's certificate."
    ),
    Option(
        "lockserver_tls_ca",
        str,
        None,
        "Over TCP: the CA certificate that the lock server is verified with.",
    ),
    Option(
        "service_address",
        str,
        None,
        "HOST:PORT to serve on when active. Only with a lock server over TCP, and then required;"
        " a lock server on a Unix socket provides the listening socket.",
    ),
    Option(
        "gms_socket_dir",
        str,
        None,
        "The directory of the memory service's sockets. Default: --dir.",
        env="GMS_SOCKET_DIR",
    ),
    Option("http_host", str, "127.0.0.1", "Address of probes and metrics."),
    Option(
        "http_port",
        int,
        None,
        f"Port of probes and metrics; {PORT_FIRST} plus the engine's number by default.",
        minimum=0,
        maximum=65535,
    ),
    ALLOWED_HOST,
    *(Option(name, int, *row, minimum=1) for name, row in DURATIONS.items()),
    Option(
        "deaths_max",
        int,
        relaunch.DEATHS_MAX,
        "Number of deaths within --deaths-window-ms that count as a crash loop.",
        minimum=1,
    ),
)

SECURITY = ("lockserver_tls_cert", "lockserver_tls_key", "lockserver_tls_ca")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """A supervisor's settings, resolved: paths absolute, defaults filled in."""

    config: Resolved
    command: tuple[str, ...]
    backend: str
    directory: str
    engine: str
    model: str  # "" in a pod without models
    role: Role
    lockserver_socket: str
    lockserver_security: Security | None  # None: a Unix socket
    service_address: TcpAddress | None  # None: a gateway accepts
    gms_socket_dir: str
    http_port: int
    budgets_ms: Mapping[State, int]

    @property
    def is_remote(self) -> bool:
        """Whether the lock is over TCP: a lease counts instead of the witness."""
        return self.lockserver_socket.startswith(SCHEME)

    @property
    def control_path(self) -> str:
        return engine_socket(self.directory, self.engine)

    @property
    def private_path(self) -> str:
        """Where the backend answers the gateway, if there is one."""
        return engine_http_socket(self.directory, self.engine)


def settle(config: Resolved, command: list[str], directory: str) -> EngineSettings:
    """Fill in what depends on other settings. `directory` is the checked shared directory.

    Raises:
        UsageError: settings that do not go together; also security files that cannot be used.
    """
    engine = config["engine_id"]
    if not engine or "/" in engine:
        why = f"--engine-id {engine!r}: it is part of the names of files, and cannot have a slash"
        raise UsageError("engine.bad_id", why)
    address = config["lockserver_socket"] or lockserver_socket(directory)
    is_remote = address.startswith(SCHEME)
    _check_tcp(config, is_remote=is_remote)
    port = config["http_port"]
    return EngineSettings(
        config=config,
        command=tuple(command),
        backend=config["backend"],
        directory=directory,
        engine=engine,
        model=config["model_name"],
        role=Role(config["role"]),
        lockserver_socket=address,
        lockserver_security=_security(config, address) if is_remote else None,
        service_address=_service_address(config["service_address"]),
        gms_socket_dir=config["gms_socket_dir"] or directory,
        http_port=port if port is not None else PORT_FIRST + number_of(engine),
        budgets_ms={
            State.INIT: config["init_ms"],
            State.WAKING: config["waking_ms"],
            State.DRAINING: config["drain_ms"],
            State.RELEASING: config["release_ms"],
            State.DEAD: config["reap_ms"],
        },
    )


def _check_tcp(config: Resolved, *, is_remote: bool) -> None:
    """Check the settings that belong to a lock server over TCP, and only there."""
    if is_remote:
        if config["model_name"] or config["goal"] != Tier.AWAKE:
            raise UsageError(
                "engine.only_on_one_host",
                "--model-name and --goal need a lock server on this host: leave them out, or leave"
                " out the tcp:// address of --lockserver-socket",
            )
        if config["service_address"] is None:
            raise UsageError(
                "engine.no_service_address",
                "a lock server over TCP has no socket to lend: set --service-address HOST:PORT,"
                " where this engine serves when it is active",
            )
        return
    for name in (*SECURITY, "service_address"):
        if config[name] is not None:
            raise UsageError(
                "engine.only_over_tcp",
                f"--{name.replace('_', '-')} needs a lock server over TCP, and this one is a Unix"
                " socket; set --lockserver-socket tcp://HOST:PORT, or leave it out",
            )


def _security(config: Resolved, address: str) -> Security:
    files = (config[name] for name in SECURITY)
    security = settle_security(TcpAddress.parse(address), *files)
    security.client_context()  # refuse unusable files now rather than later
    return security


def _service_address(text: str | None) -> TcpAddress | None:
    """The address with a numeric host, so that no name is resolved during a takeover."""
    if text is None:
        return None
    try:
        address = TcpAddress.parse(f"{SCHEME}{text}")
        if not address.port:
            raise ValueError("port 0 is not a fixed port")
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (UsageError, ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "an IPv6 address needs brackets"
        raise UsageError(
            "engine.bad_service_address",
            f"--service-address must be HOST:PORT of this host, not {text!r} ({reason})",
        ) from error
    return TcpAddress(str(found[0][4][0]), address.port)


def number_of(engine: str) -> int:
    """The number that ends the id of an engine (`engine-1` → 1), 0 if none does."""
    found = re.search(r"\d{1,3}$", engine)
    return int(found.group()) if found else 0


# With a pool file every engine of a pod has the same command line, but for its id. The supervisor
# reads the file when it starts; a change takes effect when the engine is started again.
HOST_PREFIX = "HOST-"
CUDA_DEVICES_ENV = "CUDA_VISIBLE_DEVICES"
ORIGIN = "pool file"


def placed(config: Resolved, directory: str) -> tuple[Resolved, tuple[str, ...], dict[str, str]]:
    """What the pool file says of this engine: its settings, and its backend's arguments and
    environment. It begins cold: the pool says when it starts.

    Raises:
        UsageError: what is wrong with the file; `engine.not_in_pool`, `engine.pool_decides`.
    """
    from pool.pool_file import (  # YAML: only a pool needs it
        engines_of,
        read_pool_file,
        with_served_names,
    )

    path, engine = config["pool"], config["engine_id"]
    file = with_served_names(read_pool_file(path), directory)
    ids = [(each, name) for name, model in file.models.items() for each in engines_of(name, model)]
    name = dict(ids).get(engine)
    if name is None:
        raise UsageError(
            "engine.not_in_pool",
            f"{path} has no engine {engine}, but {', '.join(each for each, _ in ids)}: set"
            " --engine-id to one of these, or add a model or its shadow to the file",
        )
    model = file.models[name]
    told: dict[str, Any] = {
        "backend": model.backend,
        "model_name": name,
        "goal": Tier.COLD.value,
    }
    given = [f"--{each.replace('_', '-')}" for each in told if config.origin(each) == "flag"]
    if given:
        raise UsageError(
            "engine.pool_decides",
            f"{', '.join(given)}: with --pool the pool file says it; leave it out, or --pool",
        )
    if config["http_port"] is None:
        told["http_port"] = PORT_FIRST + ids.index((engine, name))
    if len(engines_of(name, model)) == 1 and config.origin("yield_ms") == "default":
        told["yield_ms"] = 1  # no other engine takes over, so it is relaunched at once
    devices = ",".join(model.devices)
    variable = HOST_DEVICES_ENV if devices.startswith(HOST_PREFIX) else CUDA_DEVICES_ENV
    arguments = (
        *model_arguments(model.backend, model.model, model.tensor_parallel),
        *("--served-model-name", name, *model.aliases),
        *map(str, model.args),
    )
    return config.changed(told, ORIGIN), arguments, {variable: devices}
