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
from plumbing.service.config import Option, Resolved
from plumbing.service.hosts import ALLOWED_HOST
from understudy.cli.settings import UP_OPTIONS, given_address, port_of, ports_of
from understudy.pod.table import LocalPod
from understudy.up.models import HUB_BACKEND, is_hub_id
from understudy.up.pods import Prepare, prepare_local, prepare_pool

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
    """The pod to start, of one model or of a pool file."""
    if declared is UP_OPTIONS and config["pool"] is not None:
        pod, file = local_pod(config, declared, ()), Path(config["pool"])
        place = {"given": given_address(config), "port_offset": config["port_offset"]}
        return partial(prepare_pool, pod, file, port_of(config, "pool"), **place)
    return partial(prepare_local, local_pod(config, declared, arguments))


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
    )
    if declared is not UP_OPTIONS:
        return pod
    return replace(
        pod,
        ports=replace(ports_of(config), ui=port_of(config, "ui")),
        host=config["host"],
        memory=config["memory"],
        env={**_log_env(), ALLOWED_HOST.env_name: ",".join(config["http_allowed_host"])},
        http_host=config["http_host"],
        backoff_max_s=config["restart_backoff_max"],
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
