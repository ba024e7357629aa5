"""`understudy drill`: kills parts of a pod under load, and reports the result.

Owns its flags, its output, and the wiring of pod, runner and drill.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import click

from plumbing.errors import UnderstudyError, UsageError
from plumbing.pod.cli import INTERRUPTED, json_flag, options, run_async
from plumbing.pod.paths import pool_socket
from plumbing.service.config import Resolved
from plumbing.text import to_json
from understudy.cli.settings import (
    DRILL_OPTIONS,
    NOT_WITH_POOL,
    POD_OPTIONS,
    BackendCommand,
    backend_arguments,
    fleet_of,
    given_flags,
    local_pod,
    refuse_flags,
)
from understudy.drill.clients import Target, outside_target
from understudy.drill.fleet import FleetDrill
from understudy.drill.killer import Say
from understudy.drill.page import check_destination, page_data, write_page
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.targets import needed_flag
from understudy.drill.verdict import DrillReport, judge, text_of
from understudy.pod.ports import Ports, free_offset, free_pod_ports
from understudy.pod.runner import PodRunner, run_pod
from understudy.status.gather import require_pod
from understudy.up.models import TOKEN_INTERVAL_MS
from understudy.up.pods import Prepare, prepare_local, prepare_pool, prepare_random_pool

say = partial(click.echo, err=True)

# Options that a kind of drill does not take, and why.
NOT_TAKEN: dict[str, tuple[set[str], str]] = {
    "--fleet": ({"url", "dir"}, "which starts its own pods"),
    "--pool": (
        {*(each.name for each in NOT_WITH_POOL), "url", "dir", "replicas"},
        "which starts its own pod, whose models are in the pool file",
    ),
    "--attach": (
        {"replicas", *(each.name for each in POD_OPTIONS)},
        "the pod in --dir is already running",
    ),
    "a new pod": (
        {"url", "dir", "replicas"},
        "add --attach for --url and --dir, or --fleet for --replicas",
    ),
}


@click.command(cls=BackendCommand)
@options(DRILL_OPTIONS)
@backend_arguments
@json_flag
@click.option("--attach", is_flag=True, help="Drill the running pod in --dir.")
@click.option("--yes", is_flag=True, help="With --attach, do not ask for confirmation.")
@click.option("--fleet", is_flag=True, help="Start several pods and a front, and kill whole pods.")
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
    fleet: bool,
    pool_file: str | None,
) -> None:
    """Kill parts of a pod under load and report the result.

    Arguments after `--` go to the backends of the pod that the drill starts.
    """
    page = Path(config["report"]) if config["report"] else None
    if page is not None:
        check_destination(page)
    kinds = {"--pool": pool_file is not None, "--fleet": fleet, "--attach": attach}
    _refuse_others(config, [name for name, is_set in kinds.items() if is_set], arguments)
    plan = DrillPlan(
        config["kills"],
        config["target"],
        config["clients"],
        duration_s=config["duration_s"],
        outside=outside_target(config["url"]) if config["url"] is not None else None,
    )
    if attach:
        directory = Path(os.path.abspath(config["dir"]))
        run_async(lambda: require_pod(directory), as_json=as_json)  # before anybody is asked
        _ask_first(directory, plan, yes=yes)
        work = partial(drill_running_pod, directory, plan, say)
    else:
        prepare = _prepare(config, arguments, pool_file, fleet=fleet)
        work = partial(drill_new_pod, prepare, plan, say)
    report = run_async(work, as_json=as_json)
    if report is None:
        sys.exit(INTERRUPTED)
    click.echo(to_json(report.to_dict()) if as_json else "\n".join(text_of(report)))
    for problem in report.problems:
        click.echo(f"error: {problem}", err=True)
    if page is not None:
        write_page(page, page_data(report))
        click.echo(f"report written to {page}", err=True)
    sys.exit(INTERRUPTED if report.is_interrupted else 0 if report.passed else 1)


def _prepare(
    config: Resolved, arguments: tuple[str, ...], pool_file: str | None, *, fleet: bool
) -> Prepare:
    """What the drill starts, on free ports."""
    if fleet:
        offset = free_offset(config["replicas"] + 1)
        if config["backend"] == "reference":  # so that a kill meets streams
            arguments = (f"--token-interval-ms={TOKEN_INTERVAL_MS}", *arguments)
        return fleet_of(config, arguments, Ports().moved(offset), offset)
    pod = local_pod(config, arguments, free_pod_ports(has_pool=pool_file is not None))
    if pool_file is None:
        return partial(prepare_local, pod)
    if pool_file:
        return partial(prepare_pool, pod, Path(os.path.abspath(pool_file)))
    return partial(prepare_random_pool, pod)


def _refuse_others(config: Resolved, kinds: Sequence[str], arguments: tuple[str, ...]) -> None:
    """Refuse flags that the first of these kinds of a drill does not take, and targets that it has
    not.

    Raises:
        UsageError: `drill.needless_flag`, `drill.needs_pool`, `drill.needs_fleet`.
    """
    kind, *others = kinds or ["a new pod"]
    names, why = NOT_TAKEN[kind]
    given = [*others, *given_flags([it for it in DRILL_OPTIONS if it.name in names], config)]
    given += arguments[:1] if kind in ("--pool", "--attach") else ()
    refuse_flags("drill.needless_flag", given, f"{kind}, {why}")
    for target in config["target"]:
        if (needed := needed_flag(target)) not in (None, kind):
            raise UsageError(f"drill.needs_{needed[2:]}", f"--target {target} requires {needed}")


def _ask_first(directory: Path, plan: DrillPlan, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "drill.unconfirmed", "--attach kills engines that may be in use: add --yes to confirm"
        )
    what = ", ".join(plan.targets) or "the active engine"
    question = f"Kill {what} of the pod in {directory} {plan.kills} times?"
    if not click.confirm(question, err=True):
        click.echo("nothing was killed", err=True)
        sys.exit(INTERRUPTED)


# ------------------------------------------------------------------ pod, runner and drill


async def drill_new_pod(prepare: Prepare, plan: DrillPlan, say: Say) -> DrillReport | None:
    """Start a pod in a new directory and on free ports, drill it, stop it. None: interrupted before
    the first kill.

    The directory, with the containers' logs, is kept if the drill was started and fails.
    """
    directory = Path(tempfile.mkdtemp(prefix="understudy-"))
    is_kept = False
    try:
        pod = await prepare(directory, say)
        runner = PodRunner(pod.containers, directory / "log")
        drill = (
            FleetDrill(directory, plan, say, runner, pod.replicas)
            if pod.replicas
            else Drill(directory, plan, say, runner, pod.file)
        )
        is_kept = True
        say(f"starting {pod.title} in {directory}")
        result = await run_drill(drill)
        is_kept = result is not None and not (result.passed or result.is_interrupted)
        return result
    finally:
        if is_kept:
            say(f"the logs are kept in {directory / 'log'}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def drill_running_pod(directory: Path, plan: DrillPlan, say: Say) -> DrillReport | None:
    """Drill the running pod in `directory`, which keeps running."""
    if os.path.exists(pool_socket(str(directory))):
        raise UsageError(
            "drill.is_pool",
            f"the pod in {directory} has a pool, and this drill needs one awake engine with a"
            " standby; use `understudy drill --pool FILE` with its pool file, which starts a pod"
            " of its own",
        )
    return await run_drill(Drill(directory, plan, say))


async def run_drill(
    drill: Drill, look: Callable[[Target], Awaitable[None]] | None = None
) -> DrillReport | None:
    """Start the containers of the drill's runner, drill them, stop them. None: interrupted before
    the first kill; afterwards the report is of what was measured.

    `look` is awaited once the pod is ready and idle, before the first kill.
    """
    failure: list[str] = []

    async def body() -> bool:
        target = await drill.prepare()
        if look is not None:
            await look(target)
        try:
            await drill.run(target)
        except UnderstudyError as error:
            failure.append(f"the drill ended early: {error}")
        return True

    is_interrupted = not await run_pod(drill.runner, body, drill.say)
    if is_interrupted and not drill.records.kills:
        return None
    report = judge(drill.records, drill.plan.kills, drill.backend)
    report.problems += failure
    if is_interrupted:
        report.is_interrupted = True
        report.problems.insert(0, "the drill was interrupted")
    return report
