"""The settings of `engine run`, as data, and what follows from them.

Owns defaults and their reasons. Must not know what they are used for beyond that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.core import health, relaunch
from engine.core.events import State
from engine.core.loading import Role
from understudy.service.config import Option, Resolved

PORT_FIRST = 9410  # engine n serves its probes on 9410 + n
TERMINATION_LOG = "/dev/termination-log"  # where Kubernetes reads why a container ended
TERMINATION_LOG_BYTES_MAX = 4096  # what the kubelet keeps of it

INIT_MS = 7_200_000  # the first load of a large model from a slow disk, behind another engine's
WAKING_MS = 60_000  # the old holder's memory may take half a minute to be freed
DRAIN_MS = 30_000
REAP_MS = 10_000  # SIGKILL to gone; 243 GB of pinned memory took 26 s, such machines raise this


def duration(name: str, default_ms: int, text: str) -> Option:
    return Option(name, int, default_ms, text, minimum=1)


OPTIONS = (
    Option("backend", str, "reference", "Which inference backend to run."),
    Option("dir", str, "/run/understudy", "The directory that the pod's processes share."),
    Option("engine_id", str, "engine-0", "The name of this engine in the pod.", env="ENGINE_ID"),
    Option(
        "role",
        str,
        Role.AUTO.value,
        "Who may write weights; never who is active.",
        env="ENGINE_ROLE",
        choices=tuple(Role),
    ),
    Option(
        "lockserver_socket",
        str,
        None,
        "The lock server's socket, lockserver.sock in --dir unless given.",
        env="LOCKSERVER_SOCKET",
    ),
    Option(
        "gms_socket_dir",
        str,
        None,
        "Where the sockets of the GPU memory service are, --dir unless given.",
        env="GMS_SOCKET_DIR",
    ),
    Option("http_host", str, "127.0.0.1", "Where probes and metrics are served."),
    Option(
        "http_port",
        int,
        None,
        f"Their port; {PORT_FIRST} plus the number that ends the engine's id unless given.",
        minimum=0,
        maximum=65535,
    ),
    Option(
        "termination_log",
        str,
        None,
        f"Where to write why this process ends; {TERMINATION_LOG} where that exists.",
    ),
    Option(
        "kv_change",
        bool,
        False,
        "Allow a KV cache of another size than the pod's other engines have: an upgrade is meant.",
    ),
    duration("init_ms", INIT_MS, "Budget from launch to standby."),
    duration("waking_ms", WAKING_MS, "Budget from the grant to active."),
    duration("drain_ms", DRAIN_MS, "Budget for requests in flight when told to end."),
    duration("reap_ms", REAP_MS, "Budget for a killed tree to be gone."),
    duration("answer_ms", health.ANSWER_MS, "Active: the backend answers within this."),
    duration("hang_ms", health.HANG_MS, "Active, with requests in flight: a token within this."),
    duration("idle_canary_ms", health.IDLE_CANARY_MS, "Active and idle: a canary this often."),
    duration("backoff_first_ms", relaunch.BACKOFF_FIRST_MS, "First wait after a failed launch."),
    duration("backoff_max_ms", relaunch.BACKOFF_MAX_MS, "Longest wait after a failed launch."),
    duration("yield_ms", relaunch.YIELD_MS, "Longest wait for another engine to take over."),
    Option("deaths_max", int, relaunch.DEATHS_MAX, "So many deaths are a crash loop …", minimum=1),
    duration("deaths_window_ms", relaunch.DEATHS_WINDOW_MS, "… within this."),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a supervisor is told, resolved: paths absolute, defaults filled in."""

    config: Resolved
    command: tuple[str, ...]
    backend: str
    directory: str
    engine: str
    role: Role
    lockserver_socket: str
    gms_socket_dir: str
    http_port: int
    budgets_ms: Mapping[State, int]

    @property
    def control_path(self) -> str:
        return control_path(self.directory, self.engine)


def control_path(directory: str, engine: str) -> str:
    return os.path.join(directory, f"engine_{engine}.sock")


def settle(config: Resolved, command: list[str], directory: str) -> Settings:
    """Fill in what depends on other settings. `directory` is the checked shared directory."""
    engine = config["engine_id"]
    port = config["http_port"]
    return Settings(
        config=config,
        command=tuple(command),
        backend=config["backend"],
        directory=directory,
        engine=engine,
        role=Role(config["role"]),
        lockserver_socket=config["lockserver_socket"] or os.path.join(directory, "lockserver.sock"),
        gms_socket_dir=config["gms_socket_dir"] or directory,
        http_port=port if port is not None else PORT_FIRST + number_of(engine),
        budgets_ms={
            State.INIT: config["init_ms"],
            State.WAKING: config["waking_ms"],
            State.DRAINING: config["drain_ms"],
            State.DEAD: config["reap_ms"],
        },
    )


def number_of(engine: str) -> int:
    """The number that ends the id of an engine (`engine-1` → 1), 0 if none does."""
    found = re.search(r"\d{1,3}$", engine)
    return int(found.group()) if found else 0
