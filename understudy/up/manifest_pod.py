"""The pod of a manifest: keep it running, or drill it.

Owns the wiring of manifest, placement and runner. Files of an existing pod are touched only after a
check that it is not running. Prints only through `say`.
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

DRILL_BACKOFF_MAX_S = 1.0  # kills are not crashes, and twenty of them should take minutes


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The pod that the user asks for. `backoff_max_s`: the longest restart delay, if not the "
    "default."""

    file: Path
    choices: Choices
    pid_namespaces: str = "auto"
    backoff_max_s: float | None = None
    env: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PreparedPod:
    """A pod that can be started. `runtime`: the directory its parts share, if they are ours."""

    containers: list[Container]
    runtime: Path | None
    has_pid_namespaces: bool


async def stay_up(request: PodRequest, directory: Path, say: Say) -> None:
    """Run the pod in `directory` until a signal."""
    ready = await _prepare(request, directory, say)
    await keep_up(ready.containers, directory / "log", ready.runtime, say)


async def drill(request: PodRequest, plan: DrillPlan, say: Say) -> DrillResult | None:
    """Start the pod in a new directory and on free ports, drill it, stop it. None: interrupted.

    By default every process of the active engine is killed in turn, and then the other parts.
    """
    directory = Path(tempfile.mkdtemp(prefix="understudy-"))
    request = replace(request, backoff_max_s=DRILL_BACKOFF_MAX_S)
    plan = replace(plan, also=(LOCKSERVER, GMS, GMS_SUPERVISOR))
    is_worth_keeping = False
    try:
        ready = await _prepare(request, directory, say, has_own_ports=True)
        if ready.runtime is None:
            raise UsageError(
                "drill.no_directory",
                f"no container of {request.file} has UNDERSTUDY_DIR, so there is nothing to "
                "drill; pass "
                "the manifest of an Understudy pod",
            )
        runner = PodRunner(ready.containers, directory / "log")
        is_worth_keeping = True
        say(f"starting the pod of {request.file} in {directory}")
        result = await run_drill(Drill(ready.runtime, plan, say, runner), runner, plan, say)
        if result is not None:
            result.conditions = {
                "manifest": str(request.file),
                "restart_backoff_max_s": DRILL_BACKOFF_MAX_S,
                "pid_namespaces": ready.has_pid_namespaces,
            }
        is_worth_keeping = result is not None and not result.report.passed
        return result
    finally:
        if is_worth_keeping:
            say(f"the containers' logs are kept in {directory / 'log'}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def _prepare(
    request: PodRequest, directory: Path, say: Say, *, has_own_ports: bool = False
) -> PreparedPod:
    """Everything but the start. `say` gets what is ignored on this machine."""
    manifest, choices, env = (
        await load_manifest(request.file),
        request.choices,
        dict(request.env or {}),
    )
    model = directory / "random-model" if needs_model(manifest, choices) else None
    if model is not None:
        _refuse_other_backends(manifest, choices)
        choices = replace(choices, volume={**choices.volume, MODEL: str(model)})
        env |= {name: os.environ.get(name, value) for name, value in ONE_THREAD.items()}
    first = free_ports(max(1, len(manifest.ports())))[0] if has_own_ports else None
    has_pid_namespaces = await namespaces.wanted(request.pid_namespaces)
    place = Placement(
        place_volumes(manifest, directory, choices),
        place_ports(manifest, choices, first),
        pod_fields(manifest, str(uuid.uuid4()), socket.gethostname()),
        choices,
        env,
        KUBELET.up_to(request.backoff_max_s),
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
    return PreparedPod(containers, runtime, has_pid_namespaces)


def _refuse_other_backends(manifest: PodManifest, choices: Choices) -> None:
    """Only the reference backend can serve a random model without further flags."""
    words = [word for spec in manifest.specs for word in spec.command]
    for word in words:
        name, _, backend = word.removeprefix("--").partition("=")
        if name == "backend" and choices.flag.get(name, backend) != "reference":
            raise UsageError(
                "pod.no_model",
                f"the {backend} backend needs a model; choose a Hugging Face checkpoint with "
                f"--set volume.{MODEL}=PATH",
            )
