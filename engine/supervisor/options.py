"""The options of `engine run`, their defaults and the reasons for them.

Must not know how they are used: `settings.py` fills in what depends on others.
"""

from __future__ import annotations

from engine.core import health, patience, relaunch
from engine.core.loading import Role
from lockserver.client import messages as lock
from plumbing.pod.messages import Tier
from plumbing.pod.models import model_name
from plumbing.pod.paths import DIRECTORY
from plumbing.pod.supervision import DRAIN_MS as DRAIN_MS
from plumbing.service.config import Option
from plumbing.service.hosts import ALLOWED_HOST

MEMBERS_MAX = lock.MEMBERS_MAX
PORT_FIRST = 9410  # engine n serves its probes on 9410 + n
TERMINATION_LOG = "/dev/termination-log"  # where Kubernetes reads why a container ended

INIT_MS = 7_200_000  # the first load of a large model from a slow disk, behind another engine's
WAKING_MS = 60_000  # the old holder's memory may take half a minute to be freed
# Unmapping takes up to 63 ms per GiB of host memory, and waits for the step that runs.
RELEASE_MS = 30_000
REAP_MS = 10_000  # SIGKILL to gone; 243 GB of pinned memory took 26 s, such machines raise this


def duration(name: str, default_ms: int, text: str) -> Option:
    return Option(name, int, default_ms, text, minimum=1)


OPTIONS = (
    Option("backend", str, "reference", "The inference backend to run."),
    Option("dir", str, DIRECTORY, "The directory that the pod's processes share."),
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
        "The lock server's socket or tcp://HOST:PORT; lockserver.sock in --dir unless given.",
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
        "members",
        int,
        1,
        "Number of nodes that this engine spans, one supervisor each; above 1 requires TCP.",
        minimum=1,
        maximum=MEMBERS_MAX,
    ),
    Option(
        "member",
        int,
        0,
        "Which of these nodes this is, from 0; member 0 serves.",
        minimum=0,
        maximum=MEMBERS_MAX - 1,
    ),
    Option(
        "service_address",
        str,
        None,
        "HOST:PORT to serve on when active. Only with a lock server over TCP, and then required"
        " for member 0; a lock server on a Unix socket provides the listening socket.",
    ),
    Option(
        "gms_socket_dir",
        str,
        None,
        "The directory of the memory service's sockets; --dir unless given.",
        env="GMS_SOCKET_DIR",
    ),
    Option("http_host", str, "127.0.0.1", "Address of probes and metrics."),
    Option(
        "http_port",
        int,
        None,
        f"Port of probes and metrics; {PORT_FIRST} plus the engine's number unless given.",
        minimum=0,
        maximum=65535,
    ),
    ALLOWED_HOST,
    Option(
        "termination_log",
        str,
        None,
        f"File for the reason of exit; {TERMINATION_LOG} if it exists, unless given.",
    ),
    Option(
        "kv_change",
        bool,
        False,
        "Allow a KV cache of another size than that of the pod's other engines, for an upgrade.",
    ),
    duration("init_ms", INIT_MS, "Time limit from launch to standby."),
    duration("waking_ms", WAKING_MS, "Time limit from the grant to active."),
    duration(
        "drain_ms",
        DRAIN_MS,
        "Time limit for requests in flight when the engine drains: 2 s less than the host's grace.",
    ),
    duration(
        "release_ms", RELEASE_MS, "Time limit for KV memory to be given back when the engine rests."
    ),
    duration("reap_ms", REAP_MS, "Time limit for killed processes to exit."),
    duration(
        "answer_ms",
        health.ANSWER_MS,
        "How soon the backend must answer a health check while active; without an answer it counts"
        " as hung once --hang-ms has passed without a token, too.",
    ),
    duration(
        "hang_ms",
        patience.HANG_MS,
        "Longest time without a new token while requests are in flight; CPU pressure stretches it,"
        f" up to {patience.STRETCH_MAX:g} times.",
    ),
    duration(
        "hang_alone_ms",
        patience.HANG_ALONE_MS,
        "The same while no standby is ready, unless --hang-ms is longer.",
    ),
    duration(
        "idle_canary_ms",
        health.IDLE_CANARY_MS,
        "Interval of canary requests while active and idle.",
    ),
    duration("backoff_first_ms", relaunch.BACKOFF_FIRST_MS, "Shortest wait after a failed launch."),
    duration("backoff_max_ms", relaunch.BACKOFF_MAX_MS, "Longest wait after a failed launch."),
    duration("yield_ms", relaunch.YIELD_MS, "Longest wait for another engine to take over."),
    Option(
        "deaths_max",
        int,
        relaunch.DEATHS_MAX,
        "Number of deaths within --deaths-window-ms that count as a crash loop.",
        minimum=1,
    ),
    duration(
        "deaths_window_ms",
        relaunch.DEATHS_WINDOW_MS,
        "The time in which --deaths-max deaths count as a crash loop.",
    ),
)
