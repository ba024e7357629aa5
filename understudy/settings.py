"""The settings of `understudy up`, `drill` and the commands that look at a pod, as data."""

from __future__ import annotations

from engine.messages import RANKS_MAX
from plumbing.service.config import Option
from understudy.drill.records import check_target
from understudy.manifest.values import read_choice
from understudy.up.ports import ENGINE_PORT, GMS_PORT, LOCKSERVER_PORT, SERVICE_PORT

DIRECTORY = "/run/understudy"  # DESIGN §9

DIR = Option("dir", str, DIRECTORY, "The directory that the pod's processes share.")


def _port(name: str, default: int, text: str) -> Option:
    return Option(name, int, default, text, minimum=1, maximum=65535)


POD_OPTIONS = (
    Option("model", str, None, "A Hugging Face checkpoint; a small random one unless given."),
    Option("backend", str, "reference", "Which inference backend the engines run."),
    Option(
        "device_bytes",
        str,
        None,
        "What one device may hold (default: 4GiB of host memory; all that a GPU has).",
    ),
    Option(
        "tensor_parallel",
        int,
        1,
        "How many devices each engine's model is spread over.",
        minimum=1,
        maximum=RANKS_MAX,
    ),
)

# A pod from its manifest instead of from the flags above.
MANIFEST_OPTIONS = (
    Option(
        "file",
        str,
        None,
        "A pod's manifest: a rendered file, or a directory of Kustomize.",
        short="-f",
    ),
    Option(
        "set",
        read_choice,
        (),
        "With -f, what differs here: volume.NAME=PATH, env.NAME=VALUE, config.NAME=VALUE, "
        "port.NAME=NUMBER, flag.NAME=VALUE.",
        many=True,
    ),
    Option(
        "pid_namespaces",
        str,
        "auto",
        "With -f: each container in a PID namespace of its own; auto: where that is possible.",
        choices=("auto", "yes", "no"),
    ),
)

UP_OPTIONS = (
    DIR,
    *POD_OPTIONS,
    *MANIFEST_OPTIONS,
    Option(
        "restart_backoff_max",
        float,
        None,
        "The longest wait in seconds before a dead part is started again; 30, and 300 with -f "
        "unless given.",
        minimum=0,
    ),
    Option("memory", str, "host", "What the weights are kept in.", choices=("host", "cuda")),
    Option("host", str, "127.0.0.1", "Where inference is served."),
    Option("http_host", str, "127.0.0.1", "Where probes and metrics are served."),
    _port("service_port", SERVICE_PORT, "The port that requests go to."),
    _port("lockserver_port", LOCKSERVER_PORT, "Probes and metrics of the lock server."),
    _port("gms_port", GMS_PORT, "Probes and metrics of the GPU memory service."),
    _port("engine_port", ENGINE_PORT, "Probes and metrics of engine 0; engine n adds n."),
)

DRILL_OPTIONS = (
    DIR,
    *POD_OPTIONS,
    *MANIFEST_OPTIONS,
    Option("kills", int, 20, "How many processes are killed, one after the other.", minimum=1),
    Option(
        "target",
        check_target,
        (),
        "What to kill: processes of the active engine (all in turn unless given, and with -f the "
        "other parts, too), lockserver, gms or gms-supervisor.",
        many=True,
    ),
    Option("clients", int, 4, "How many clients stream without pause.", minimum=1, maximum=256),
    Option(
        "expected",
        str,
        None,
        "A file of prompts and the answers they must have; learnt from the pod unless given.",
    ),
    Option("report", str, None, "Where to write the report as a page, FILE.html."),
)

# What says which pod is started: with -f the manifest says it.
NOT_WITH_MANIFEST = frozenset(
    each.name
    for each in (*POD_OPTIONS, *UP_OPTIONS)
    if each is not DIR and each.name != "restart_backoff_max" and each not in MANIFEST_OPTIONS
)

STATUS_OPTIONS = (DIR,)
