"""The settings of `gateway serve`, checked before anything is started."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.events import QUEUE_MAX, GatewayRules, LaneRules
from gateway.core.sleep_door import SleepRules
from gateway.server.files import ApiKeys, certificate
from plumbing.errors import UsageError
from plumbing.pod.paths import DIR, runtime_dir
from plumbing.pod.supervision import DRAIN_MS
from plumbing.service.config import Option, Resolved, duration_s, size_bytes
from plumbing.service.hosts import http_options
from plumbing.text import split_address
from plumbing.wire.tcp import Renewed

DAY_S = 24 * 3600
# One answer without a stream is held whole, up to 64 MiB; with less nothing could be sent again.
MEMORY_BYTES_MIN = 64 << 20
RULES = GatewayRules()
DRAIN_S = DRAIN_MS // 1000  # as an engine's
# Each rest costs the KV cache and the next client a wake.
SLEEP_AFTER_S_MIN = 1
ON_REQUEST, MANUAL = "on-request", "manual"  # --wake
TAKEN = ("http_host", "tls_cert", "tls_key", "api_keys", "pods", "fleet_tls")  # as they are given


def sleep_after_s(text: str) -> float:
    """`off`, or a duration that is not too short.

    Raises:
        ValueError: it is neither.
    """
    found = 0.0 if text == "off" else duration_s(text)
    if 0 < found < SLEEP_AFTER_S_MIN:
        raise ValueError(
            f"at least {SLEEP_AFTER_S_MIN}s, or off: each rest drops the KV cache, and the next"
            " request waits for the wake"
        )
    return found


OPTIONS = (
    DIR,
    *http_options(9403),
    Option(
        "hold_ms",
        float,
        RULES.hold_ms,
        "How long new requests wait for an active engine before they get a 503.",
        minimum=0,
        maximum=DAY_S * 1000,
    ),
    Option(
        "park_timeout",
        duration_s,
        RULES.park_timeout_ms / 1000,
        "How long a paused stream waits to be resumed before it ends with an error, such as 5m.",
        minimum=0.001,
        maximum=DAY_S,
    ),
    Option(
        "drain_timeout",
        duration_s,
        DRAIN_S,
        "How long streams get to end after SIGTERM, such as 30s; keep it 2 s below the host's grace"
        " period.",
        minimum=0,
        maximum=DAY_S,
    ),
    Option(
        "resumes_max",
        int,
        RULES.resumes_max,
        "Most streams that are resumed at the same time, each until its first new token.",
        minimum=1,
        maximum=10_000,
    ),
    Option(
        "memory_bytes",
        size_bytes,
        RULES.memory_bytes_max,
        "Memory for journals, bodies and held answers; requests beyond it cannot be continued.",
        minimum=MEMORY_BYTES_MIN,
    ),
    Option(
        "keepalive_comments",
        duration_s,
        0,
        "Send a comment into a paused stream this often, such as 5s; off by default, because some"
        " clients cannot read comments.",
        minimum=0,
        maximum=DAY_S,
    ),
    Option(
        "sleep_after",
        sleep_after_s,
        0,
        "Put the engine to sleep and free its KV memory after this long without a request, such as"
        f" 5m; off, or at least {SLEEP_AFTER_S_MIN}s.",
        minimum=0,
        maximum=7 * DAY_S,
    ),
    Option(
        "wake",
        str,
        ON_REQUEST,
        "Wake a sleeping engine when a request arrives, or only by `understudy wake`.",
        choices=(ON_REQUEST, MANUAL),
    ),
    Option(
        "pool",
        os.path.abspath,
        None,
        "Pool file of a pod with several models; each request goes to the model that it names.",
    ),
    Option(
        "hop",
        str,
        None,
        "Also serve the fronts of a fleet at this address, such as 0.0.0.0:8443.",
    ),
    Option("pod_name", str, None, "The pod's name in reports to fronts; the host's by default."),
    Option(
        "pods",
        str,
        None,
        "Be a front before these pods, and serve no engine: NAME:PORT of their --hop, several with"
        " commas, or @FILE with one a line.",
    ),
    Option("listen", str, "0.0.0.0:8000", "Where a front accepts clients."),
    Option(
        "silent_ms",
        float,
        RULES.silent_ms,
        "A front moves a pod's streams after this long without a report.",
        minimum=500,
    ),
    Option(
        "choose",
        str,
        "prefix",
        "How a front chooses between pods: by the request's prefix, or the less loaded of two.",
        choices=("prefix", "least"),
    ),
    Option(
        "fleet_tls",
        str,
        None,
        "Directory with this process's certificate of the fleet's CA: tls.crt, tls.key, ca.crt."
        " Without it fronts and pods speak plain text, on loopback only.",
    ),
    Option("access_log", bool, False, "Log one line for each request, without its body."),
    Option("tls_cert", os.path.abspath, None, "Serve HTTPS with this certificate, a PEM file."),
    Option("tls_key", os.path.abspath, None, "The private key of this certificate, a PEM file."),
    Option(
        "api_keys",
        os.path.abspath,
        None,
        "Answer only requests with a key from this file, one key per line.",
    ),
)


@dataclass(frozen=True)
class GatewaySettings:
    """One gateway's, but for the defaults, which tests use. `lanes`, `aliases` and `queue_max` are
    of the pool file, in the order of its models."""

    directory: str
    http_host: str = "127.0.0.1"
    http_port: int = 0
    allowed_hosts: tuple[str, ...] = ()
    drain_ms: int = DRAIN_MS
    rest: SleepRules = field(default_factory=SleepRules)
    rules: GatewayRules = field(default_factory=GatewayRules)
    keepalive_comments_ms: int = 0  # a comment this often in a paused stream; 0: none
    access_log: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    api_keys: str = ""
    pool_file: str = ""
    lanes: Mapping[str, LaneRules] = field(default_factory=dict)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    queue_max: int = QUEUE_MAX  # requests that wait for any model
    hop: tuple[str, int] | None = None  # where fronts connect
    pod_name: str = ""
    pods: str = ""  # of a front
    listen: tuple[str, int] | None = None
    uses_keys: bool = True  # of a front: else each request goes to the less loaded of two pods
    fleet_tls: str = ""

    def open_files(self) -> tuple[ApiKeys | None, Renewed[ssl.SSLContext] | None]:
        """
        Raises:
            UsageError: `gateway.bad_tls`, `gateway.bad_api_keys`.
        """
        if bool(self.tls_cert) != bool(self.tls_key):
            missing, given = ("key", "cert") if self.tls_cert else ("cert", "key")
            raise UsageError("gateway.bad_tls", f"--tls-{given} requires --tls-{missing}")
        keys = ApiKeys(self.api_keys) if self.api_keys else None
        return keys, certificate(self.tls_cert, self.tls_key) if self.tls_cert else None

    def check_files(self) -> None:
        """Whether a gateway that starts now could use the files that users renew.

        Raises:
            UsageError: as `open_files`, or of the pool file.
        """
        self.open_files()
        read_lanes(self.pool_file)


def settle(config: Resolved) -> GatewaySettings:
    """The settings in `config`.

    Raises:
        UsageError: the directory or the pool file cannot be used, or `--sleep-after` is given with
            a pool file.
    """
    pool_file = config["pool"] or ""
    if pool_file and config["sleep_after"]:
        raise UsageError(
            "gateway.pool_decides",
            "the pool decides when engines sleep; remove --sleep-after, and set keep_alive in the"
            " pool file",
        )
    taken: dict[str, Any] = {name: config[name] or "" for name in TAKEN}
    return GatewaySettings(
        directory=runtime_dir(config["dir"]),
        **taken,
        http_port=config["http_port"],
        allowed_hosts=config["http_allowed_host"],
        drain_ms=round(config["drain_timeout"] * 1000),
        rest=SleepRules(config["sleep_after"] * 1000, config["wake"] == ON_REQUEST),
        rules=GatewayRules(
            config["hold_ms"],
            config["park_timeout"] * 1000,
            config["resumes_max"],
            config["memory_bytes"],
            config["silent_ms"],
        ),
        keepalive_comments_ms=round(config["keepalive_comments"] * 1000),
        access_log=config["access_log"],
        pool_file=pool_file,
        **read_lanes(pool_file),
        hop=_hop_address(config["hop"], config["fleet_tls"]) if config["hop"] else None,
        pod_name=config["pod_name"] or socket.gethostname(),
        listen=_address(config["listen"], "--listen"),
        uses_keys=config["choose"] == "prefix",
    )


def _hop_address(text: str, tls: str | None) -> tuple[str, int]:
    """
    Raises:
        UsageError: it is no address, or one that others reach without a certificate.
    """
    host, port = _address(text, "--hop")
    if not tls and not ipaddress.ip_address(host).is_loopback:
        raise UsageError(
            "gateway.insecure_hop",
            f"others reach {text}, where users' text is sent: give the certificates of the fleet"
            " (--fleet-tls), or an address of loopback",
        )
    return host, port


def _address(text: str, option: str) -> tuple[str, int]:
    try:
        host, port = split_address(text, 0)
        return str(ipaddress.ip_address(host)), port
    except ValueError as error:
        raise UsageError("gateway.bad_address", f"{error} ({option})") from None


def read_lanes(path: str) -> dict[str, Any]:
    """What a gateway needs of the pool file, as settings; nothing without one.

    Raises:
        UsageError: the file cannot be read, or a setting in it is wrong.
    """
    if not path:
        return {}
    from pool.pool_file import read_pool_file  # YAML, which only a pod with a pool needs

    pool = read_pool_file(path)
    lanes = {
        name: LaneRules(
            max_in_flight=model.max_in_flight,
            queue_max=pool.queue.per_model,
            wait_ms=pool.queue.wait_ms,
            starve_after_ms=pool.starve_after_ms,
            keep_alive_ms=model.keep_alive_ms,
            priority=model.priority,
            client_priority=model.client_priority,
        )
        for name, model in pool.models.items()
    }
    aliases = {name: model.aliases for name, model in pool.models.items()}
    return {"lanes": lanes, "aliases": aliases, "queue_max": pool.queue.max}
