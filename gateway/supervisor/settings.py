"""The settings of `gateway serve`, checked before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gateway.core.events import QUEUE_MAX
from gateway.core.sleep import SleepRules
from gateway.messages import ConfigureGatewayMsg
from gateway.server.files import open_api_keys, open_certificate
from gateway.server.tracing import MODES, OFF, check_tracing
from gateway.supervisor.pool_config import LaneSettings, read_lanes
from plumbing.errors import UsageError
from plumbing.pod.paths import DIRECTORY, runtime_dir
from plumbing.pod.supervision import DRAIN_MS
from plumbing.service.config import Option, Resolved, duration_s, size_bytes
from plumbing.service.hosts import ALLOWED_HOST

DAY_S = 24 * 3600
# One answer without a stream is held whole, up to 64 MiB; with less nothing could be sent again.
MEMORY_BYTES_MIN = 64 << 20
MEMORY_BYTES = 1 << 30  # a few thousand streams of long contexts, or a dozen of the largest answers
RESUMES_MAX = 32  # at once: more prefills than that delay each other and every new request
PARK_S = 300  # a relaunch of a large model; clients give up after ten minutes or so
DRAIN_S = DRAIN_MS // 1000  # as an engine's
# Each rest costs the KV cache and the next client a wake, and children beat twice a second.
SLEEP_AFTER_S_MIN = 1
ON_REQUEST, MANUAL = "on-request", "manual"  # --wake


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


DIR = Option("dir", str, DIRECTORY, "The directory that the pod's processes share.")
OPTIONS = (
    DIR,
    Option(
        "service",
        str,
        "active",
        "Accept clients on the service address of this lock, as in the lock server's --service.",
        env="UNDERSTUDY_GATEWAY_SERVICE",  # UNDERSTUDY_SERVICE is the lock server's, with addresses
    ),
    Option("http_host", str, "127.0.0.1", "Address of probes, status and metrics."),
    Option("http_port", int, 9403, "Port of probes, status and metrics.", minimum=0, maximum=65535),
    ALLOWED_HOST,
    Option(
        "hold_ms",
        float,
        10_000.0,
        "How long new requests wait for an active engine before they get a 503.",
        minimum=0,
        maximum=DAY_S * 1000,
    ),
    Option(
        "park_timeout",
        duration_s,
        PARK_S,
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
        RESUMES_MAX,
        "Most requests that are resumed at the same time.",
        minimum=1,
        maximum=10_000,
    ),
    Option(
        "memory_bytes",
        size_bytes,
        MEMORY_BYTES,
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
        str,
        None,
        "Pool file of a pod with several models; each request goes to the model that it names.",
    ),
    Option("access_log", bool, False, "Log one line for each request, without its body."),
    Option(
        "tracing",
        str,
        OFF,
        "Send spans to OpenTelemetry: of requests that were paused, or of all of them.",
        choices=MODES,
    ),
    Option("tls_cert", str, None, "Serve HTTPS with this certificate, a PEM file."),
    Option("tls_key", str, None, "The private key of this certificate, a PEM file."),
    Option(
        "api_keys", str, None, "Answer only requests with a key from this file, one key per line."
    ),
)


@dataclass(frozen=True)
class GatewaySettings:
    """One gateway's: `child` is what its serving process is told."""

    directory: str
    lock: str
    http_host: str
    http_port: int
    allowed_hosts: tuple[str, ...]
    drain_ms: int
    rest: SleepRules
    child: ConfigureGatewayMsg


def settle(config: Resolved) -> GatewaySettings:
    """The settings in `config`.

    Raises:
        UsageError: the directory, a certificate, its key or the file of keys cannot be used; or
            what `--tracing` needs is not installed.
    """
    directory = runtime_dir(config["dir"])
    cert, key = (_absolute(config[name]) for name in ("tls_cert", "tls_key"))
    keys = _absolute(config["api_keys"])
    open_certificate(cert, key)
    open_api_keys(keys)
    check_tracing(config["tracing"])
    pool = _lanes(config)
    return GatewaySettings(
        directory=directory,
        lock=config["service"],
        http_host=config["http_host"],
        http_port=config["http_port"],
        allowed_hosts=config["http_allowed_host"],
        drain_ms=round(config["drain_timeout"] * 1000),
        rest=SleepRules(config["sleep_after"] * 1000, config["wake"] == ON_REQUEST),
        child=ConfigureGatewayMsg(
            directory=os.fsencode(directory),
            hold_ms=round(config["hold_ms"]),
            park_timeout_ms=round(config["park_timeout"] * 1000),
            resumes_max=config["resumes_max"],
            memory_bytes=config["memory_bytes"],
            keepalive_comments_ms=round(config["keepalive_comments"] * 1000),
            access_log=config["access_log"],
            tls_cert=cert,
            tls_key=key,
            api_keys=keys,
            tracing=config["tracing"],
            lanes=pool.lanes,
            aliases=pool.aliases,
            queue_max=pool.queue_max,
        ),
    )


def _lanes(config: Resolved) -> LaneSettings:
    """Of the pool file; none without one.

    Raises:
        UsageError: the file cannot be used, or `--sleep-after` is given as well.
    """
    if not config["pool"]:
        return LaneSettings({}, {}, QUEUE_MAX)
    if config["sleep_after"]:
        raise UsageError(
            "gateway.pool_decides",
            "the pool decides when engines sleep; remove --sleep-after, and set keep_alive in the"
            " pool file",
        )
    return read_lanes(config["pool"])


def _absolute(path: str | None) -> str:
    return os.path.abspath(path) if path else ""
