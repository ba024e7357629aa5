"""`understudy drill`: kills parts of a pod under load, and reports the result.

Owns its flags and its output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from plumbing.errors import UsageError
from plumbing.pod.cli import INTERRUPTED, options, run_async
from plumbing.service.config import Resolved
from plumbing.text import to_json
from understudy.cli.pods import (
    BackendCommand,
    backend_arguments,
    given_flags,
    json_flag,
    local_pod,
    pod_of,
    refuse_flags,
)
from understudy.cli.settings import DRILL_OPTIONS, NOT_WITH_POOL, POD_OPTIONS
from understudy.drill.clients import outside_target
from understudy.drill.page import check_destination
from understudy.drill.run import LENT_KV, NO_ADOPTION, DrillPlan
from understudy.drill.targets import is_only_in_pool
from understudy.host import machine
from understudy.status.gather import require_pod
from understudy.up import sessions
from understudy.up.pods import Prepare, prepare_pool, prepare_random_pool
from understudy.up.sessions import DrillResult

say = partial(click.echo, err=True)
Work = Callable[[], Coroutine[Any, Any, DrillResult | None]]

# Drills of a pod that they start in their own way: the options that they do not take, and why.
ALONE = {
    "--pool": (
        {*(each.name for each in NOT_WITH_POOL), "url"},
        "which starts its own pod, whose models are in the pool file",
    ),
    "--upgrade": (
        {"kills", "target", "duration_s"},
        "which starts its own pod and has no kills; to upgrade a running pod, follow"
        " docs/operations.md",
    ),
    "--kv-compare": (set[str](), "which starts two pods and kills in both; remove one of the two"),
}


@click.command(cls=BackendCommand)
@options(DRILL_OPTIONS)
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
@click.option(
    "--pool",
    "pool_file",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Start the pod of a pool file and drill it; default: three small random models.",
)
def drill(
    config: Resolved,
    arguments: tuple[str, ...],
    as_json: bool,
    attach: bool,
    yes: bool,
    upgrade: bool,
    kv_compare: bool,
    pool_file: str | None,
) -> None:
    """Kill parts of a pod under load and report the result.

    Arguments after `--` go to the backends of the pod that the drill starts.
    """
    page = Path(config["report"]) if config["report"] else None
    if page is not None:
        check_destination(page)
    kinds = {"--pool": pool_file is not None, "--upgrade": upgrade, "--kv-compare": kv_compare}
    kinds["--attach"] = attach
    _refuse_together(config, [name for name, is_set in kinds.items() if is_set], arguments)
    if config["url"] is not None and not attach:
        raise UsageError(
            "drill.needless_flag",
            "--url works only with --attach: a pod that the drill starts has no external address",
        )
    plan = DrillPlan(
        config["kills"],
        config["target"],
        config["clients"],
        is_upgrade=upgrade,
        burn=config["burn"],
        duration_s=config["duration_s"],
        has_long_prompts=kv_compare,
        outside=outside_target(config["url"]) if config["url"] is not None else None,
        switches=config["switches"],
    )
    if attach:
        work = _of_running_pod(config, arguments, plan, as_json=as_json, yes=yes)
    else:
        work = _of_new_pod(config, arguments, plan, pool_file, is_compared=kv_compare)
    result = run_async(work, as_json=as_json)
    if result is None:
        sys.exit(INTERRUPTED)
    backend = result.backend or config["backend"]
    if as_json:
        click.echo(to_json(result.report.to_dict(backend, machine())))
    else:
        from rich.console import Console

        result.print(Console(), backend)
    for problem in result.report.problems:
        click.echo(f"error: {problem}", err=True)
    if page is not None:
        result.write_page(page, backend)
        click.echo(f"report written to {page}", err=True)
    sys.exit(0 if result.report.passed else 1)


def _of_running_pod(
    config: Resolved, arguments: tuple[str, ...], plan: DrillPlan, *, as_json: bool, yes: bool
) -> Work:
    refuse_flags(
        "drill.needless_flag",
        [*given_flags(POD_OPTIONS, config), *arguments[:1]],
        "--attach: the pod in --dir is already running; remove them, or remove --attach",
    )
    directory = Path(os.path.abspath(config["dir"]))
    run_async(lambda: require_pod(directory), as_json=as_json)  # before anybody is asked
    _ask_first(directory, plan, yes=yes)
    return partial(sessions.drill_running_pod, directory, plan, say)


def _of_new_pod(
    config: Resolved,
    arguments: tuple[str, ...],
    plan: DrillPlan,
    pool_file: str | None,
    *,
    is_compared: bool,
) -> Work:
    if config.origin("dir") == "flag":
        raise UsageError(
            "drill.needless_flag",
            "--dir requires --attach: without it, a drill starts its own pod in a new directory; "
            "remove --dir, or add --attach",
        )
    if pool_file is not None:
        pod = local_pod(config, DRILL_OPTIONS, ())
        prepare: Prepare = partial(prepare_random_pool, pod)
        if pool_file:
            prepare = partial(prepare_pool, pod, Path(os.path.abspath(pool_file)), 0)
        return partial(sessions.drill_new_pod, prepare, plan, say)

    def drilled(*more: str) -> Work:
        pod = pod_of(config, DRILL_OPTIONS, (*more, *arguments))
        return partial(sessions.drill_new_pod, pod, plan, say)

    if not is_compared:
        return drilled()
    return partial(
        sessions.compare_adoption, drilled(*LENT_KV), drilled(*LENT_KV, *NO_ADOPTION), say
    )


def _refuse_together(config: Resolved, kinds: Sequence[str], arguments: tuple[str, ...]) -> None:
    """Refuse flags that the first of these kinds of a drill does not take, and those of a pool's
    drill without one.

    Raises:
        UsageError: `drill.needless_flag`, `drill.needs_pool`.
    """
    kind, *others = kinds or [""]
    if kind in ALONE:
        names, why = ALONE[kind]
        declared = [each for each in DRILL_OPTIONS if each.name in names]
        given = [*others, *given_flags(declared, config)]
        given += arguments[:1] if kind == "--pool" else ()
        refuse_flags("drill.needless_flag", given, f"{kind}, {why}")
    if kind != "--pool":
        named = [f"--target {each}" for each in config["target"] if is_only_in_pool(each)]
        named += ["--switches"] if config.origin("switches") == "flag" else []
        if named:
            raise UsageError("drill.needs_pool", f"{named[0]} requires --pool")


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
