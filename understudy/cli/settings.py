"""The settings of `understudy up`, `drill` and the commands that look at a pod, as data; the pod
that they ask for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from engine.backends.registry import BACKENDS, show_help
from engine.messages import RANKS_MAX
from plumbing.errors import UsageError
from plumbing.pod.paths import DIR
from plumbing.service.config import Option, Resolved, size_list
from plumbing.service.hosts import ALLOWED_HOST, PORT_MAX
from understudy.drill.targets import check_target
from understudy.pod.ports import POOL_PORT, SERVICE_PORT, UI_PORT, Ports
from understudy.pod.table import LocalPod
from understudy.up.models import checkpoint_of
from understudy.up.pods import GIVEN, Prepare, prepare_fleet, prepare_local, prepare_pool

PORT_OFFSET_MAX = 50_000  # leaves room for the ports of some thousand engines

REPLICAS_MAX = 8  # on one machine
POD_OPTIONS = (
    Option(
        "model",
        str,
        None,
        "The directory of a Hugging Face checkpoint; with --backend vllm also a model of the Hub,"
        " such as Qwen/Qwen3-8B. Default: a small random model.",
    ),
    Option("backend", str, "reference", "The inference backend of the engines.", choices=BACKENDS),
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
        "replicas",
        int,
        1,
        "Number of pods. Several have a front before them, which has the ports of the one pod, and"
        " continues a stream in another pod when its own is lost.",
        minimum=1,
        maximum=REPLICAS_MAX,
    ),
    Option("memory", str, "host", "The kind of memory for the weights.", choices=("host", "cuda")),
    Option("host", str, "127.0.0.1", "Address of the inference port."),
    Option("http_host", str, "127.0.0.1", "Address of probes and metrics."),
    ALLOWED_HOST,
    Option(
        "port_offset",
        int,
        0,
        "Add this number to each port, but not to --service-port, e.g. 100 for a second pod.",
        minimum=0,
        maximum=PORT_OFFSET_MAX,
    ),
    Option(
        "service_port",
        int,
        SERVICE_PORT,
        "Port for inference requests.",
        minimum=1,
        maximum=PORT_MAX,
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
        "lockserver, gms, gms-supervisor or gateway; stop:PROCESS freezes it; with --fleet also "
        "pod, stop:pod, leave, front. Default: each process of the active engine in turn; with "
        "--fleet pods, their engines and gateways.",
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
    Option("replicas", int, 3, "With --fleet: number of pods.", minimum=2, maximum=REPLICAS_MAX),
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

UI_OPTIONS = (
    DIR,
    Option("http_host", str, "127.0.0.1", "Address of the page."),
    Option("http_port", int, UI_PORT, "Port of the page.", minimum=0, maximum=PORT_MAX),
    ALLOWED_HOST,
)


def ports_of(config: Resolved) -> Ports:
    """The ports in `UP_OPTIONS`, with those of a pool and of the page."""
    moved = Ports(pool=POOL_PORT, ui=UI_PORT).moved(config["port_offset"])
    is_own = config.origin("service_port") != "default"
    return replace(moved, service=config["service_port"]) if is_own else moved


# ------------------------------------------------------------------ the pod that they ask for

backend_arguments = click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- BACKEND FLAGS]"
)


class BackendCommand(click.Command):
    """A command whose arguments after `--` go to the backends, and that takes no others."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:end])
        if stray := ctx.params["arguments"]:
            raise click.UsageError(
                f"Unexpected argument {stray[0]!r}: name a model with --model, and put the flags of"
                " the backend after `--`.",
                ctx,
            )
        ctx.params["arguments"] = tuple(args[end + 1 :])
        return rest


def pod_of(config: Resolved, arguments: tuple[str, ...]) -> Prepare:
    """What `understudy up` starts: a pod of one model or of a pool file, or several."""
    ports, port_offset = ports_of(config), config["port_offset"]
    if config["replicas"] > 1:
        return fleet_of(config, arguments, ports, port_offset)
    if config["pool"] is None:
        return partial(prepare_local, local_pod(config, arguments, replace(ports, pool=0)))
    given = {name for name in GIVEN if config.origin(name) != "default"}
    place = {"given": given, "port_offset": port_offset}
    return partial(prepare_pool, local_pod(config, (), ports), Path(config["pool"]), **place)


# What the fleet says of each pod itself.
_OF_FLEET = {"dir", "replicas", "host", "service_port", "port_offset"}


def fleet_of(
    config: Resolved, arguments: tuple[str, ...], ports: Ports, port_offset: int
) -> Prepare:
    """Several pods, each with the flags that were given, and a front with these ports."""
    flags = []
    for each in UP_OPTIONS:
        if each.name in config.keys() - _OF_FLEET and config.origin(each.name) == "flag":
            value = config[each.name]
            if isinstance(value, tuple) and not each.many:
                value = ",".join(map(str, value))
            flags += [f"{each.flag}={it}" for it in (value if each.many else (value,))]
    front = local_pod(config, arguments, ports)
    is_pool = config.get("pool") is not None
    return partial(prepare_fleet, front, config["replicas"], flags, port_offset, is_pool=is_pool)


def local_pod(config: Resolved, arguments: tuple[str, ...], ports: Ports) -> LocalPod:
    """The pod of `understudy up`, or of a drill, which has fewer flags."""
    show_help(config["backend"], arguments)
    model, hub_id = checkpoint_of(config["model"], config["backend"])
    pod = LocalPod(
        Path(),
        model,
        ports,
        hub_id=hub_id,
        backend=config["backend"],
        device_bytes=config["device_bytes"],
        tensor_parallel=config["tensor_parallel"],
        backend_args=arguments,
    )
    if "host" not in config:
        return pod
    return replace(
        pod,
        host=config["host"],
        memory=config["memory"],
        env={**_log_env(), ALLOWED_HOST.env_name: ",".join(config["http_allowed_host"])},
        http_host=config["http_host"],
    )


def _log_env() -> dict[str, str]:
    """Text logs on a terminal, unless LOG_FORMAT is set."""
    is_text = sys.stdout.isatty() and "LOG_FORMAT" not in os.environ
    return {"LOG_FORMAT": "text"} if is_text else {}


def given_flags(declared: Sequence[Option], config: Resolved) -> list[str]:
    """The flags that were used on the command line."""
    return [each.flag for each in declared if config.origin(each.name) == "flag"]


def refuse_flags(code: str, flags: Sequence[str], why: str) -> None:
    if flags:
        raise UsageError(code, f"{', '.join(flags)} cannot be used with {why}")
