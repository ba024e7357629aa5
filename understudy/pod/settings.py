"""The settings of `understudy up`, `drill` and the commands that look at a pod, as data."""

from __future__ import annotations

from engine.messages import RANKS_MAX
from understudy.pod.drill.records import check_target
from understudy.pod.local_pod import ENGINE_PORT, GMS_PORT, LOCKSERVER_PORT, SERVICE_PORT
from understudy.service.config import Option

DIRECTORY = "/run/understudy"  # DESIGN §9

DIR = Option("dir", str, DIRECTORY, "The directory that the pod's processes share.")


def _port(name: str, default: int, text: str) -> Option:
    return Option(name, int, default, text, minimum=1, maximum=65535)


POD_OPTIONS = (
    Option("model", str, None, "A Hugging Face checkpoint; a small random one unless given."),
    Option("backend", str, "reference", "Which inference backend the engines run."),
    Option("device_bytes", str, "4GiB", "How much memory each simulated device has."),
    Option(
        "tensor_parallel",
        int,
        1,
        "How many devices each engine's model is spread over.",
        minimum=1,
        maximum=RANKS_MAX,
    ),
)

UP_OPTIONS = (
    DIR,
    *POD_OPTIONS,
    Option("host", str, "127.0.0.1", "Where inference is served."),
    _port("service_port", SERVICE_PORT, "The port that requests go to."),
    _port("lockserver_port", LOCKSERVER_PORT, "Probes and metrics of the lock server."),
    _port("gms_port", GMS_PORT, "Probes and metrics of the GPU memory service."),
    _port("engine_port", ENGINE_PORT, "Probes and metrics of engine 0; engine n adds n."),
)

DRILL_OPTIONS = (
    DIR,
    *POD_OPTIONS,
    Option("kills", int, 20, "How many processes are killed, one after the other.", minimum=1),
    Option(
        "target",
        check_target,
        (),
        "What to kill: processes of the active engine (all in turn unless given), or gms.",
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

STATUS_OPTIONS = (DIR,)
