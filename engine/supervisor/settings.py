"""The settings of `engine run`: their checks, and the values they lead to; `options.py` has the
options. Must not know how they are used.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from engine.core.events import State
from engine.core.loading import Role
from engine.supervisor.options import DRAIN_MS as DRAIN_MS
from engine.supervisor.options import INIT_MS as INIT_MS
from engine.supervisor.options import MEMBERS_MAX as MEMBERS_MAX
from engine.supervisor.options import OPTIONS as OPTIONS
from engine.supervisor.options import PORT_FIRST as PORT_FIRST
from engine.supervisor.options import REAP_MS as REAP_MS
from engine.supervisor.options import RELEASE_MS as RELEASE_MS
from engine.supervisor.options import TERMINATION_LOG as TERMINATION_LOG
from engine.supervisor.options import WAKING_MS as WAKING_MS
from plumbing.errors import UsageError
from plumbing.pod.messages import Tier
from plumbing.pod.models import ACTIVE, LOADER, lock_of
from plumbing.pod.paths import engine_http_socket, engine_socket, lockserver_socket
from plumbing.service.config import Resolved
from plumbing.wire.tcp import Security
from plumbing.wire.tcp import settle as settle_security
from plumbing.wire.tcp_address import SCHEME, TcpAddress

TERMINATION_LOG_BYTES_MAX = 4096  # what the kubelet keeps of it
SECURITY = ("lockserver_tls_cert", "lockserver_tls_key", "lockserver_tls_ca")
# vLLM can span nodes, but by means of its own; sharing and parking here assume ranks on one node.
ONE_NODE_BACKENDS = frozenset({"vllm"})


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
    member: int
    members: int
    service_address: TcpAddress | None  # None: the lock server lends it, or none serves
    gms_socket_dir: str
    http_port: int
    budgets_ms: Mapping[State, int]

    @property
    def is_remote(self) -> bool:
        """Whether the lock server is reached over TCP, so that a lease stands for the witness."""
        return self.lockserver_socket.startswith(SCHEME)

    @property
    def active_lock(self) -> str:
        """The lock that says which engine stands for the model."""
        return lock_of(ACTIVE, self.model)

    @property
    def loader_lock(self) -> str:
        return lock_of(LOADER, self.model)

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
    engine, member = config["engine_id"], config["member"]
    address = config["lockserver_socket"] or lockserver_socket(directory)
    is_remote = address.startswith(SCHEME)
    _check_members(config, is_remote=is_remote)
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
        member=member,
        members=config["members"],
        # Other members serve nothing, even where they share an environment that sets it.
        service_address=_service_address(config["service_address"] if member == 0 else None),
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


def _check_members(config: Resolved, *, is_remote: bool) -> None:
    """Check the settings that belong to a lock server over TCP, and only there."""
    member, members = config["member"], config["members"]
    if member >= members:
        raise UsageError(
            "engine.bad_member",
            f"--member must be 0–{members - 1}, and is {member}: --members is {members}",
        )
    if members > 1 and config["backend"] in ONE_NODE_BACKENDS:
        raise UsageError(
            "engine.cannot_span",
            f"--members {members}: the {config['backend']} backend keeps all ranks of an engine on"
            " one node; leave --members out",
        )
    if is_remote:
        if config["model_name"] or config["goal"] != Tier.AWAKE:
            raise UsageError(
                "engine.only_on_one_host",
                "--model-name and --goal need a lock server on this host: leave them out, or leave"
                " out the tcp:// address of --lockserver-socket",
            )
        if member == 0 and config["service_address"] is None:
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
    if members > 1:
        raise UsageError(
            "engine.only_over_tcp",
            f"an engine of {members} members needs a lock server that all nodes reach: set"
            " --lockserver-socket tcp://HOST:PORT",
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
