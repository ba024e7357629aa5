"""What `up` and `drill` share: the pod that their flags ask for, and refusals of flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from plumbing.errors import UsageError
from plumbing.service.browsers import ALLOWED_HOST
from plumbing.service.config import Option, Resolved
from understudy.cli.settings import NOT_WITH_MANIFEST, UP_OPTIONS, given_address, port_of, ports_of
from understudy.kubelet.containers import QUICK
from understudy.manifest.values import Choices
from understudy.up import manifest_pod, sessions
from understudy.up.hub_model import HUB_BACKEND, is_hub_id
from understudy.up.local_pod import LocalPod
from understudy.up.manifest_pod import PodRequest
from understudy.up.pool_pod import prepare_pool
from understudy.up.sessions import Prepare

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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


def pod_of(config: Resolved, declared: Sequence[Option], arguments: tuple[str, ...]) -> Prepare:
    """The pod to start: a manifest's if -f is given."""
    if declared is UP_OPTIONS and config["pool"] is not None:
        pod, file = local_pod(config, declared, ()), Path(config["pool"])
        place = {"given": given_address(config), "port_offset": config["port_offset"]}
        return partial(prepare_pool, pod, file, port_of(config, "pool"), **place)
    if config["file"] is None:
        return partial(sessions.prepare_local, local_pod(config, declared, arguments))
    choices = Choices.of(config["set"])
    is_up = declared is UP_OPTIONS
    request = PodRequest(
        Path(config["file"]),
        choices,
        config["pid_namespaces"],
        config["restart_backoff_max"] if is_up else None,
        _log_env(),
        config["port_offset"] if is_up else 0,
    )
    return partial(manifest_pod.prepare, request)


def local_pod(config: Resolved, declared: Sequence[Option], arguments: tuple[str, ...]) -> LocalPod:
    model, hub_id = _model(config["model"], config["backend"])
    pod = LocalPod(
        Path(),
        model,
        hub_id=hub_id,
        backend=config["backend"],
        device_bytes=config["device_bytes"],
        tensor_parallel=config["tensor_parallel"],
        backend_args=arguments,
        is_direct=config["direct"],
    )
    if declared is not UP_OPTIONS:
        return pod
    return replace(
        pod,
        ports=ports_of(config),
        host=config["host"],
        memory=config["memory"],
        env={**_log_env(), ALLOWED_HOST.env_name: ",".join(config["http_allowed_host"])},
        http_host=config["http_host"],
        pace=QUICK.up_to(config["restart_backoff_max"]),
    )


def check_manifest_flags(
    config: Resolved,
    declared: Sequence[Option],
    arguments: tuple[str, ...],
    *,
    attach: bool = False,
) -> None:
    """Refuse flags that contradict -f, or that require it."""
    if config["file"] is None:
        if config["set"]:
            raise UsageError("pod.needless_flag", "--set requires a manifest; add -f FILE")
        return
    needless = given_flags([each for each in declared if each.name in NOT_WITH_MANIFEST], config)
    needless += ["--attach"] if attach else []
    refuse_flags(
        "pod.needless_flag",
        [*needless, *arguments[:1]],
        "-f, where the manifest says what runs; use --set instead, or remove -f",
    )


def _model(given: str | None, backend: str) -> tuple[Path | None, str | None]:
    """The absolute path of the checkpoint, which the engine validates, or its id at the Hub. As
    for vLLM, a directory wins over a model of the Hub with the same name."""
    if given is None:
        return None, None
    path = Path(os.path.abspath(given))
    if path.is_dir():
        return path, None
    if backend == HUB_BACKEND and is_hub_id(given):
        return None, given
    wanted = "a Hugging Face checkpoint"
    if backend == HUB_BACKEND:
        wanted += ", or a model of the Hugging Face Hub, owner/name"
    elif is_hub_id(given):
        wanted += f" on this machine; the {backend} backend downloads nothing, --backend vllm does"
    raise UsageError("pod.no_model", f"{path} is not a directory; --model must be {wanted}")


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
