"""`understudy drill --attach` as users run it, from outside a pod. How it counts what an address
refuses, and how it ends with its pod: tests/understudy/drill/test_outside.py."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_commands import ENVIRONMENT, UNDERSTUDY, running_pod
from tests.plumbing.service.test_init import NAMESPACE, can_unshare
from tests.understudy.drill.outside import PREFIX, Outside
from understudy.drill.targets import TARGETS
from understudy.pod.ports import free_offset


async def drilled(directory: Path, *words: str, wrapper: Sequence[str] = ()) -> dict[str, Any]:
    """The document of a drill that passed."""
    process = await asyncio.create_subprocess_exec(
        *(*wrapper, UNDERSTUDY, "drill", "--attach", "--yes", f"--dir={directory}", "--json"),
        *words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.mark.slow
def test_drill_looks_from_where_users_are(tmp_path_factory: pytest.TempPathFactory):
    """Method: one pod of `up`. A drill where no process of the pod is visible, as under `kubectl
    exec`; one through a proxy that forwards all."""
    base = tmp_path_factory.mktemp("up")
    directory, offset = base / "pod", free_offset()

    async def drill() -> None:
        if can_unshare():
            inside = await drilled(directory, f"--kills={len(TARGETS)}", wrapper=NAMESPACE)
            assert inside["killed"] == dict.fromkeys(TARGETS, 1)
        async with Outside(8000 + offset) as outside:
            url = f"http://localhost:{outside.port}{PREFIX}"
            report = await drilled(directory, "--kills=1", f"--url={url}")
            assert report["url"] == url
            assert outside.requests > report["requests"] > 0

    with running_pod(directory, base / "up.txt", [f"--port-offset={offset}"]):
        asyncio.run(drill())
