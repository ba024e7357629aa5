"""The `understudy` command: starts a pod, drills it, shows it.

Owns flags and output. The commands that only look at a pod are in `look.py`.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

import pool.cli
import understudy
from plumbing.errors import UsageError
from plumbing.part.paths import runtime_dir
from plumbing.service.browsers import ALLOWED_HOST
from plumbing.service.cli import INTERRUPTED, options, plain_errors, run_async
from plumbing.service.config import Option, Resolved, resolve
from plumbing.text import to_json
from understudy.cli import look, rest
from understudy.cli.settings import (
    DRILL_OPTIONS,
    NOT_WITH_MANIFEST,
    NOT_WITH_POOL,
    POD_OPTIONS,
    UP_OPTIONS,
    given_address,
    ports_of,
)
from understudy.drill.kept import LENT_KV, NO_ADOPTION
from understudy.drill.page import check_destination
from understudy.drill.records import PARTS
from understudy.drill.report import print_report
from understudy.drill.run import DrillPlan
from understudy.host import machine
from understudy.kubelet.containers import QUICK
from understudy.manifest.values import Choices
from understudy.status.gather import require_pod
from understudy.up import manifest_pod, sessions
from understudy.up.local_pod import LocalPod
from understudy.up.manifest_pod import PodRequest
from understudy.up.pool_pod import prepare_pool
from understudy.up.sessions import Prepare
from understudy.up.terminal import Terminal

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
backend_arguments = click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- BACKEND FLAGS]"
)


@click.group()
@click.version_option(understudy.__version__, message="understudy %(version)s")
def main() -> None:
    """Understudy: failover for LLM inference, with one copy of the weights."""


look.attach(main)
rest.attach(main)
main.add_command(pool.cli.main, "pool")
main.add_command(pool.cli.lease)


@main.command()
@options(UP_OPTIONS, command="up")
@backend_arguments
def up(config: Resolved, arguments: tuple[str, ...]) -> None:
    """Start a pod on this machine and keep it running.

    The pod has a lock server, a GPU memory service, a gateway and two engines, or, with -f, the
    containers of a manifest. With --pool it has the engines of many models, and a pool that decides
    which of them are awake. Arguments after `--` go to both engines' backends.
    """
    directory = Path(runtime_dir(config["dir"]))
    if config["pool"] is not None:
        given = [*_given(NOT_WITH_POOL, config), *arguments[:1]]
        _refuse("pod.needless_flag", given, "--pool, where the pool file says it for each model")
    _check_manifest_flags(config, UP_OPTIONS, arguments)
    prepare = _pod(config, UP_OPTIONS, arguments)
    with Terminal() as terminal:
        run_async(lambda: sessions.stay_up(prepare, directory, terminal.say))


@main.command()
@options(DRILL_OPTIONS, command="drill")
@backend_arguments
@json_flag
@click.option("--attach", is_flag=True, help="Drill the running pod in --dir.")
@click.option("--yes", is_flag=True, help="With --attach, do not ask for confirmation.")
@click.option("--upgrade", is_flag=True, help="Instead of killing, upgrade both engines in turn.")
@click.option(
    "--kv-compare",
    is_flag=True,
    help="Use long prompts, and drill a second pod whose engines adopt no KV blocks.",
)
def drill(
    config: Resolved,
    arguments: tuple[str, ...],
    as_json: bool,
    attach: bool,
    yes: bool,
    upgrade: bool,
    kv_compare: bool,
) -> None:
    """Kill parts of a pod under load and report the result.

    Arguments after `--` go to the backends of the pod that it starts.
    """
    if kv_compare:
        _refuse_with_compare(config, attach=attach, upgrade=upgrade)
    expected = Path(config["expected"]) if config["expected"] else None
    if upgrade:
        _refuse_with_upgrade(config, attach=attach)
    plan = DrillPlan(
        config["kills"],
        config["target"],
        config["clients"],
        expected,
        also=() if config["file"] is None else PARTS,
        is_upgrade=upgrade,
        burn=config["burn"],
        duration_s=config["duration_s"],
        has_long_prompts=kv_compare,
    )
    page = Path(config["report"]) if config["report"] else None
    if page is not None:
        check_destination(page)
    say = partial(click.echo, err=True)
    _check_manifest_flags(config, DRILL_OPTIONS, arguments, attach=attach)
    if attach:
        _refuse(
            "drill.needless_flag",
            [*_given(POD_OPTIONS, config), *arguments[:1]],
            "--attach: the pod in --dir is already running; remove them, or remove --attach",
        )
        directory = Path(os.path.abspath(config["dir"]))
        run_async(lambda: require_pod(directory), as_json=as_json)  # before anybody is asked
        _ask_first(directory, plan, yes=yes)
        result = run_async(
            lambda: sessions.drill_running_pod(directory, plan, say), as_json=as_json
        )
    elif config.origin("dir") == "flag":
        raise UsageError(
            "drill.needless_flag",
            "--dir requires --attach: without it, a drill starts its own pod in a new directory; "
            "remove --dir, or add --attach",
        )
    elif kv_compare:
        flags = [(*LENT_KV, *more, *arguments) for more in ((), NO_ADOPTION)]
        pods = [_pod(config, DRILL_OPTIONS, each) for each in flags]
        adopting, empty = (partial(sessions.drill_new_pod, each, plan, say) for each in pods)
        both = partial(sessions.compare_adoption, adopting, empty, say)
        result = run_async(both, as_json=as_json)
    else:
        prepare = _pod(config, DRILL_OPTIONS, arguments)
        result = run_async(lambda: sessions.drill_new_pod(prepare, plan, say), as_json=as_json)
    if result is None:
        sys.exit(INTERRUPTED)
    backend = result.backend or config["backend"]
    if as_json:
        document = result.report.to_dict(backend, machine()) | result.conditions
        click.echo(to_json(document))
    else:
        from rich.console import Console

        print_report(result.report, Console(), backend, result.usages, result.conditions)
    for problem in result.report.problems:
        click.echo(f"error: {problem}", err=True)
    if page is not None:
        result.write_page(page, backend)
        click.echo(f"report written to {page}", err=True)
    sys.exit(0 if result.report.passed else 1)


@main.command()
@json_flag
@plain_errors
def config(as_json: bool) -> None:
    """Print every setting of `up` and `drill` and its source."""
    file = os.environ.get("UNDERSTUDY_CONFIG")
    described = {
        command: resolve(declared, {}, os.environ, file, command=command)
        for command, declared in {"up": UP_OPTIONS, "drill": DRILL_OPTIONS}.items()
    }
    if as_json:
        document = {command: resolved.describe() for command, resolved in described.items()}
        click.echo(to_json(document))
        return
    for command, resolved in described.items():
        click.echo(f"[{command}]")
        for setting in resolved.describe():
            click.echo(_setting_line(setting))


@main.command()
@json_flag
def version(as_json: bool) -> None:
    """Print the version."""
    about = {"version": understudy.__version__, "python": platform.python_version()}
    click.echo(json.dumps(about) if as_json else f"understudy {about['version']}")


def _setting_line(setting: dict[str, Any]) -> str:
    value = "-" if setting["value"] in (None, ()) else setting["value"]
    return f"  {setting['name']:<19} {value!s:<20} {setting['origin']:<12} {setting['env']}"


def _model(given: str | None) -> Path | None:
    """The absolute path of the checkpoint, which the engine validates."""
    if given is None:
        return None
    path = Path(os.path.abspath(given))
    if not path.is_dir():
        raise UsageError(
            "pod.no_model", f"{path} is not a directory; --model must be a Hugging Face checkpoint"
        )
    return path


def _log_env() -> dict[str, str]:
    """Text logs on a terminal, unless LOG_FORMAT is set."""
    is_text = sys.stdout.isatty() and "LOG_FORMAT" not in os.environ
    return {"LOG_FORMAT": "text"} if is_text else {}


def _check_manifest_flags(
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
    needless = _given([each for each in declared if each.name in NOT_WITH_MANIFEST], config)
    needless += ["--attach"] if attach else []
    _refuse(
        "pod.needless_flag",
        [*needless, *arguments[:1]],
        "-f, where the manifest says what runs; use --set instead, or remove -f",
    )


def _pod(config: Resolved, declared: Sequence[Option], arguments: tuple[str, ...]) -> Prepare:
    """The pod to start: a manifest's if -f is given."""
    if declared is UP_OPTIONS and config["pool"] is not None:
        pod, file = _local_pod(config, declared, ()), Path(config["pool"])
        return partial(prepare_pool, pod, file, config["pool_port"], given=given_address(config))
    if config["file"] is None:
        return partial(sessions.prepare_local, _local_pod(config, declared, arguments))
    choices = Choices.of(config["set"])
    backoff_max_s = config["restart_backoff_max"] if declared is UP_OPTIONS else None
    request = PodRequest(
        Path(config["file"]), choices, config["pid_namespaces"], backoff_max_s, _log_env()
    )
    return partial(manifest_pod.prepare, request)


def _local_pod(
    config: Resolved, declared: Sequence[Option], arguments: tuple[str, ...]
) -> LocalPod:
    pod = LocalPod(
        Path(),
        _model(config["model"]),
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


def _refuse_with_upgrade(config: Resolved, *, attach: bool) -> None:
    """An upgrade has no kills, and can relaunch only containers that the drill started."""
    needless = [f"--{name}" for name in ("kills", "target") if config.origin(name) == "flag"]
    needless += ["--duration-s"] if config.origin("duration_s") == "flag" else []
    needless += ["--attach"] if attach else []
    needless += ["-f"] if config.origin("file") == "flag" else []
    _refuse(
        "drill.needless_flag",
        needless,
        "--upgrade, which starts its own pod and has no kills; to upgrade a running pod, follow "
        "docs/operations.md",
    )


def _refuse_with_compare(config: Resolved, *, attach: bool, upgrade: bool) -> None:
    """It starts two pods of its own, and kills in both."""
    needless = ["--attach"] if attach else []
    needless += ["--upgrade"] if upgrade else []
    needless += ["-f"] if config.origin("file") == "flag" else []
    _refuse(
        "drill.needless_flag",
        needless,
        "--kv-compare, which starts two pods and kills in both; remove one of the two",
    )


def _given(declared: Sequence[Option], config: Resolved) -> list[str]:
    """The flags that were used on the command line."""
    return [each.flag for each in declared if config.origin(each.name) == "flag"]


def _refuse(code: str, flags: Sequence[str], why: str) -> None:
    if flags:
        raise UsageError(code, f"{', '.join(flags)} cannot be used with {why}")


def _ask_first(directory: Path, plan: DrillPlan, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "drill.unconfirmed", "--attach kills engines that may be in use: add --yes to confirm"
        )
    what = ", ".join(plan.targets) or "the active engine"
    question = f"Kill {what} of the pod in {directory} {plan.kills} times?"
    try:
        is_meant = click.confirm(question, err=True)
    except click.Abort:  # Ctrl-C; click would exit with the code of a failed drill
        click.echo(err=True)
        sys.exit(INTERRUPTED)
    if not is_meant:
        raise UsageError("drill.declined", "nothing was killed")


if __name__ == "__main__":
    main()
