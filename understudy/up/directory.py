"""The directory of a pod before its start: which pod runs there, and what another one has left.

`understudy up` holds `up.lock` for as long as it runs, so a second one knows whose pod it meets,
even before the first part of that pod is up. Files of another pod are moved, never deleted: a
socket or a state file with a foreign name would make every status show parts that are gone.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from plumbing.errors import UnderstudyError
from plumbing.pod.paths import engine_state, up_guard
from plumbing.text import duration
from plumbing.wire.server import PathGuard, guard_holder
from understudy.pod.table import Container
from understudy.status.gather import gather, pids_of
from understudy.status.view import is_reachable

ASIDE = "aside"  # newer files replace older ones of the same name, so it cannot grow without end
NAMED_MAX = 4  # of the files that were moved; the folder has them all
ASK_S = 1.0  # a part answers in milliseconds, and the user waits
# How long the parts of a killed `up` may take to exit: the kernel frees their memory first.
DYING_S = 5.0
POLL_S = 0.05
POOL = "pool"  # the program that only the pod of a pool file runs
SERVE = "serve"  # what every program but an engine is started with

# Files that are named after an engine or a model; `plumbing.pod.paths` names most of them.
ENGINE_FILE = re.compile(
    r"(?:engine|leftovers)_(.+?)(?:\.http)?\.(?:json|sock|lock|queue)(?:\..+)?"
)
GMS_FILE = re.compile(r"gms_[A-Za-z0-9-]+(?:\.([^_]+))?_(?:weights|kv)[._]")
LAYOUT_FILE = re.compile(r"kv_layout(?:_(.+))?\.json")


async def claim(directory: Path) -> PathGuard:
    """Make `directory` this process's, until the guard is closed or the process ends.

    Raises:
        UnderstudyError: `pod.already_running`, with the pod that runs there.
    """
    try:
        return PathGuard(up_guard(str(directory)), "understudy up")
    except UnderstudyError as error:
        if error.code != "wire.address_in_use":
            raise
        pid = str(error.details.get("holder") or "an unknown process").removeprefix("pid ")
        raise await _already_running(directory, pid) from error


async def refuse_second_pod(directory: Path) -> None:
    """Raise if parts of a pod run in `directory`, whatever started them.

    Raises:
        UnderstudyError: `pod.already_running`.
    """
    end_s = time.monotonic() + DYING_S
    while held := _held_guards(directory):
        if is_reachable(await gather(directory, ASK_S)) or time.monotonic() > end_s:
            named = ", ".join((await pids_of(directory)).named()) or f"{', '.join(held)} are locked"
            raise UnderstudyError(
                "pod.already_running",
                f"parts of a pod are running in {directory}: {named}; {_ways_out(directory)}",
            )
        await asyncio.sleep(POLL_S)


async def _already_running(directory: Path, pid: str) -> UnderstudyError:
    began_s = Path(up_guard(str(directory))).stat().st_mtime  # its holder has written its pid then
    began = datetime.fromtimestamp(began_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    ago = duration(max(0.0, time.time() - began_s) * 1000)
    view = await gather(directory, ASK_S)
    service = (view["lockserver"].get("service") or {}).get("active") or {}
    address = f", and takes requests at {service['address']}" if service.get("address") else ""
    return UnderstudyError(
        "pod.already_running",
        f"a pod is already running in {directory}: `understudy up` with pid {pid} has run it since"
        f" {began} ({ago} ago){address}; {_ways_out(directory, pid)}",
        dir=str(directory),
        pid=pid,
    )


def _ways_out(directory: Path, pid: str = "") -> str:
    stop = f"stop it with `kill {pid}`" if pid.isdigit() else "stop it"
    return (
        f"look at it with `understudy status --dir {directory}`, {stop}, or start another one with"
        " --dir OTHER --port-offset 100"
    )


def _held_guards(directory: Path) -> list[str]:
    """The lock files of parts that a living process has locked."""
    own = up_guard(str(directory))
    found = (each for each in sorted(directory.glob("*.lock")) if str(each) != own)
    return [path.name for path in found if guard_holder(str(path)) is not None]


def put_leftovers_aside(directory: Path, containers: Sequence[Container]) -> list[str]:
    """Move what belongs to no part of the pod of `containers` to the folder `aside`; a sentence if
    anything was moved. Call it while no part runs.

    Raises:
        UnderstudyError: `pod.leftovers`, a file cannot be moved.
    """
    if not directory.is_dir():  # of a manifest that was never started here
        return []
    own = _Own(containers)
    moved = [path for path in sorted(directory.iterdir()) if own.is_foreign(path.name)]
    moved.sort(key=lambda path: not path.name.startswith("pool."))  # the most telling ones
    if not moved:
        return []
    aside = directory / ASIDE
    try:
        aside.mkdir(mode=0o700, exist_ok=True)
        for path in moved:
            path.replace(aside / path.name)
    except OSError as error:
        raise UnderstudyError(
            "pod.leftovers",
            f"cannot move the files of another pod to {aside}: {error.strerror}; move"
            f" {', '.join(path.name for path in moved)} yourself, or choose another --dir",
        ) from error
    named = ", ".join(path.name for path in moved[:NAMED_MAX])
    more = f" and {len(moved) - NAMED_MAX} more" if len(moved) > NAMED_MAX else ""
    return [f"{directory} has files of another pod: moved {named}{more} to {aside}"]


def forget_engines(directory: Path, containers: Sequence[Container]) -> None:
    """Remove what the engines of `containers` wrote about themselves in the previous pod."""
    for engine in _engines_of(containers):
        Path(engine_state(str(directory), engine)).unlink(missing_ok=True)


def _engines_of(containers: Sequence[Container]) -> set[str]:
    return {each.env["ENGINE_ID"] for each in containers if "ENGINE_ID" in each.env}


class _Own:
    """The parts of a pod, as their files are named after them."""

    def __init__(self, containers: Sequence[Container]) -> None:
        served = [word for each in containers if SERVE in each.command for word in each.command]
        self._engines = _engines_of(containers)
        self._models = {word.partition("=")[2] for word in served if word.startswith("--model=")}
        self._has_pool = has_pool(containers)

    def is_foreign(self, name: str) -> bool:
        """Whether a file of this name is of a part that this pod does not have. Witnesses and
        serving files never are: the lock server judges whether their processes are gone."""
        if name.startswith("pool."):
            return not self._has_pool
        if found := ENGINE_FILE.fullmatch(name):
            return found[1] not in self._engines
        if found := GMS_FILE.match(name) or LAYOUT_FILE.fullmatch(name):
            return (found[1] or "") not in (self._models or {""})
        return False


def has_pool(containers: Sequence[Container]) -> bool:
    """Whether this is the pod of a pool file."""
    return any(
        SERVE in each.command and POOL in (Path(word).name for word in each.command)
        for each in containers
    )
