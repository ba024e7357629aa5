"""`understudy drill --attach` as users run it: from outside a pod, and while it goes away."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_commands import ENVIRONMENT, UNDERSTUDY, running_pod
from tests.e2e.test_up import free_offset
from tests.helpers import auntil
from tests.understudy.drill.outside import PREFIX, Outside

LEARNED = 60  # more requests than answers are learned from
END_S = 30.0  # from the end of the pod to that of its drill, on a busy machine


async def drill(directory: Path, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(UNDERSTUDY, "drill", "--attach", "--yes", f"--dir={directory}", "--json", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )


@pytest.mark.slow
def test_drill_looks_from_where_users_are_and_ends_with_its_pod(
    tmp_path_factory: pytest.TempPathFactory,
):
    """Method: one pod of `up`. A drill through a proxy that forwards all, one through a proxy that
    answers every tenth request with 503; one that waits for its second kill while `up` is
    killed."""
    base = tmp_path_factory.mktemp("up")
    directory, offset = base / "pod", free_offset()

    async def through_proxy() -> None:
        async with Outside(8000 + offset) as outside:
            url = f"http://localhost:{outside.port}{PREFIX}"
            honest = await drill(directory, "--kills=1", f"--url={url}")
            out, err = await honest.communicate()
            assert honest.returncode == 0, err.decode()
            report = json.loads(out)
            assert report["url"] == url
            assert outside.requests > report["requests"] > 0

            count = itertools.count(1)
            outside.refuses = lambda: (
                "503" if (number := next(count)) > LEARNED and number % 10 == 0 else None
            )
            refusing = await drill(directory, "--kills=1", f"--url={url}")
            out, err = await refusing.communicate()
            assert refusing.returncode == 1, err.decode()
            report = json.loads(out)
            assert report["refused"] > 0
            assert report["lost_in_flight"] == 0
            assert f"{url} refused {report['refused']} of" in err.decode()

    async def while_the_pod_is_killed(up: subprocess.Popen[bytes]) -> None:
        waiting = await drill(directory, "--kills=2", "--duration-s=3600")
        said = bytearray()
        assert waiting.stdout is not None
        assert waiting.stderr is not None

        async def read(stream: asyncio.StreamReader) -> None:
            while piece := await stream.read(4096):
                said.extend(piece)

        reading = asyncio.create_task(read(waiting.stderr))
        document = asyncio.create_task(waiting.stdout.read())
        await auntil(lambda: b"kill 1/2" in said, "the first kill", 60.0)
        up.kill()
        assert await asyncio.wait_for(waiting.wait(), END_S) == 1
        await reading
        assert b"[drill.pod_gone]" in said
        assert b"Traceback" not in said
        assert not json.loads(await document)["passed"]

    with running_pod(directory, base / "up.txt", [f"--port-offset={offset}"]) as up:
        asyncio.run(through_proxy())
        asyncio.run(while_the_pod_is_killed(up))
