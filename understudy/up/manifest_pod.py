"""The two long sessions of a manifest's pod: one that stays up, and a drill of one.

Owns the wiring of manifest, place and runner, and the order of it: nothing of a pod that runs is
touched before it is certain that none does. Prints only through `say`.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from plumbing.errors import UsageError
from understudy.drill.records import GMS, GMS_SUPERVISOR, LOCKSERVER
from understudy.drill.run import Drill, DrillPlan
from understudy.kubelet import namespaces
from understudy.kubelet.containers import KUBELET, Container
from understudy.kubelet.runner import PodRunner
from understudy.manifest.files import load_manifest, make_volumes
from understudy.manifest.placement import (
    MODEL,
    Placement,
    ignored_parts,
    needs_model,
    place_containers,
    place_ports,
    place_volumes,
    runtime_directory,
)
from understudy.manifest.spec import PodManifest
from understudy.manifest.values import Choices, pod_fields
from understudy.up.local_pod import program
from understudy.up.ports import ANYWHERE, check_port, free_ports
from understudy.up.random_model import ONE_THREAD, make_random_model
from understudy.up.sessions import DrillResult, Say, keep_up, refuse_second_pod, run_drill

DRILL_BACKOFF_MAX_S = 1.0  # a drill's kills are not crashes, and twenty of them are to take minutes


@dataclass(frozen=True, slots=True)
class Asked:
    """Which pod people want. `backoff_max_s`: the longest wait before a restart, if it matters."""

    file: Path
    choices: Choices
    pid_namespaces: str = "auto"
    backoff_max_s: float | None = None
    env: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A pod that can be started. `runtime`: the directory that its parts share, if it is ours."""

    containers: list[Container]
    runtime: Path | None
    has_pid_namespaces: bool


async def stay_up(asked: Asked, directory: Path, say: Say) -> None:
    """Run the pod in `directory` until a signal."""
    ready = await _prepare(asked, directory, say)
    await keep_up(ready.containers, directory / "log", ready.runtime, say)


async def drill(asked: Asked, plan: DrillPlan, say: Say) -> DrillResult | None:
    """Start the pod in a directory and on ports of its own, drill it, stop it. None: interrupted.

    Without targets every process of the active engine is killed in turn, and then the other parts.
    """
    directory = Path(tempfile.mkdtemp(prefix="understudy-"))
    asked = replace(asked, backoff_max_s=DRILL_BACKOFF_MAX_S)
    plan = replace(plan, also=(LOCKSERVER, GMS, GMS_SUPERVISOR))
    is_worth_keeping = False
    try:
        ready = await _prepare(asked, directory, say, has_own_ports=True)
        if ready.runtime is None:
            raise UsageError(
                "drill.no_directory",
                f"no container of {asked.file} has UNDERSTUDY_DIR, so that there is nothing to "
                "drill; name the manifest of a pod of Understudy",
            )
        runner = PodRunner(ready.containers, directory / "log")
        is_worth_keeping = True
        say(f"starting the pod of {asked.file} in {directory}")
        result = await run_drill(Drill(ready.runtime, plan, say, runner), runner, plan, say)
        if result is not None:
            result.conditions = {
                "manifest": str(asked.file),
                "restart_backoff_max_s": DRILL_BACKOFF_MAX_S,
                "pid_namespaces": ready.has_pid_namespaces,
            }
        is_worth_keeping = result is not None and not result.report.passed
        return result
    finally:
        if is_worth_keeping:
            say(f"what the containers wrote is kept in {directory / 'log'}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def _prepare(
    asked: Asked, directory: Path, say: Say, *, has_own_ports: bool = False
) -> Ready:
    """Everything but the start. `say` gets what the manifest says and this machine does not do."""
    manifest, choices, env = await load_manifest(asked.file), asked.choices, dict(asked.env or {})
    model = directory / "random-model" if needs_model(manifest, choices) else None
    if model is not None:
        _refuse_other_backends(manifest, choices)
        choices = replace(choices, volume={**choices.volume, MODEL: str(model)})
        env |= {name: os.environ.get(name, value) for name, value in ONE_THREAD.items()}
    first = free_ports(max(1, len(manifest.ports())))[0] if has_own_ports else None
    has_pid_namespaces = await namespaces.wanted(asked.pid_namespaces)
    place = Placement(
        place_volumes(manifest, directory, choices),
        place_ports(manifest, choices, first),
        pod_fields(manifest, str(uuid.uuid4()), socket.gethostname()),
        choices,
        env,
        KUBELET.up_to(asked.backoff_max_s),
        has_pid_namespaces,
    )
    containers = place_containers(manifest, place, program)
    runtime = runtime_directory(containers)
    if runtime is not None:
        await refuse_second_pod(runtime)
    for name, port in place.ports.items():
        check_port(port, ANYWHERE, f"--set port.{name}=NUMBER")
    if model is not None:
        await make_random_model(model)
    make_volumes(manifest, place.volumes, choices)
    for line in ignored_parts(manifest):
        say(line)
    return Ready(containers, runtime, has_pid_namespaces)


def _refuse_other_backends(manifest: PodManifest, choices: Choices) -> None:
    """A random model is one that the reference backend serves as it is."""
    words = [word for spec in manifest.specs for word in spec.command]
    for word in words:
        name, _, backend = word.removeprefix("--").partition("=")
        if name == "backend" and choices.flag.get(name, backend) != "reference":
            raise UsageError(
                "pod.no_model",
                f"the {backend} backend is given no model; name a Hugging Face checkpoint with "
                f"--set volume.{MODEL}=PATH",
            )
