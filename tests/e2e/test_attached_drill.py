"""`understudy drill --attach` as users run it: from outside a pod, and while it goes away."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.test_commands import ENVIRONMENT, UNDERSTUDY, free_offset, running_pod
from tests.helpers import auntil
from tests.plumbing.service.test_init import NAMESPACE, can_unshare
from tests.understudy.drill.outside import PREFIX, Outside
from understudy.drill.records import TARGETS

END_S = 30.0  # from the end of the pod to that of its drill, on a busy machine


async def drill(
    directory: Path, *words: str, wrapper: Sequence[str] = ()
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(
            *wrapper,
            UNDERSTUDY,
            "drill",
            "--attach",
            "--yes",
            f"--dir={directory}",
            "--json",
            *words,
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )


class Said:
    """What a running drill has written to standard error so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.text = bytearray()
        self._process, self._document = process, asyncio.create_task(process.stdout.read())
        self._reading = asyncio.create_task(self._read(process.stderr))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(4096):
            self.text.extend(piece)

    async def ended(self) -> tuple[bytes, bytes]:
        """All of its output, once it has ended."""
        await self._process.wait()
        await self._reading
        return await self._document, bytes(self.text)


@pytest.mark.slow
def test_drill_looks_from_where_users_are_and_ends_with_its_pod(
    tmp_path_factory: pytest.TempPathFactory,
):
    """Method: one pod of `up`. A drill where no process of the pod is visible, as under `kubectl
    exec`; one through a proxy that forwards all; one through a proxy that answers every fifth
    request with 503 after the first kill; one that waits for its second kill while `up` is killed.
    """
    base = tmp_path_factory.mktemp("up")
    directory, offset = base / "pod", free_offset()

    async def from_a_container() -> None:
        inside = await drill(directory, f"--kills={len(TARGETS)}", wrapper=NAMESPACE)
        out, err = await inside.communicate()
        assert inside.returncode == 0, err.decode()
        assert json.loads(out)["killed"] == dict.fromkeys(TARGETS, 1)

    async def through_proxy() -> None:
        async with Outside(8000 + offset) as outside:
            url = f"http://localhost:{outside.port}{PREFIX}"
            honest = await drill(directory, "--kills=1", f"--url={url}")
            out, err = await honest.communicate()
            assert honest.returncode == 0, err.decode()
            report = json.loads(out)
            assert report["url"] == url
            assert outside.requests > report["requests"] > 0

            refusing = await drill(directory, "--kills=2", f"--url={url}")
            said = Said(refusing)
            await auntil(lambda: b"kill 1/2" in said.text, "the first kill", 60.0)
            count = itertools.count(1)
            outside.refuses = lambda: "503" if next(count) % 5 == 0 else None
            out, err = await said.ended()
            assert refusing.returncode == 1, err.decode()
            report = json.loads(out)
            assert report["refused"] > 0
            assert report["lost_in_flight"] == 0
            assert f"{url} refused {report['refused']} of" in err.decode()

    async def while_the_pod_is_killed(up: subprocess.Popen[bytes]) -> None:
        waiting = await drill(directory, "--kills=2", "--duration-s=3600")
        said = Said(waiting)
        await auntil(lambda: b"kill 1/2" in said.text, "the first kill", 60.0)
        up.kill()
        out, err = await asyncio.wait_for(said.ended(), END_S)
        assert waiting.returncode == 1
        assert b"[drill.pod_gone]" in err
        assert b"Traceback" not in err
        assert not json.loads(out)["passed"]

    with running_pod(directory, base / "up.txt", [f"--port-offset={offset}"]) as up:
        if can_unshare():
            asyncio.run(from_a_container())
        asyncio.run(through_proxy())
        asyncio.run(while_the_pod_is_killed(up))
