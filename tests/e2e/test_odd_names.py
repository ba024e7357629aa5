"""A pod whose directory has a name that is not UTF-8: it runs, and every command names it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.pods import Pod, PodHome
from tests.e2e.test_inspection import checked, understudy

BIN = Path(sys.executable).parent
SHOWN = "odd-\\xff"


@pytest.fixture
def odd_home(model: Path):
    # Not pytest's directory, below which the path of an engine's socket would be too long.
    with tempfile.TemporaryDirectory(prefix="us-") as directory:
        os.mkdir(os.fsencode(directory) + b"/odd-\xff", 0o700)
        found = PodHome(Path(directory, os.fsdecode(b"odd-\xff")), model)
        try:
            yield found
        finally:
            found.close()


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=30) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_pod_in_a_directory_that_is_not_utf8_works_and_names_it(odd_home: PodHome):
    """Goal: no part ends, and each shows the name. Method: a whole pod, its pages and commands."""

    async def scenario(pod: Pod) -> None:
        await pod.whole()
        ports = pod.local.ports
        pages = [
            await asyncio.to_thread(page, port)
            for port in (ports.lockserver, ports.gms, ports.gateway, ports.engines[0])
        ]
        assert SHOWN in json.loads(pages[0])["server"]["dir"]
        for words in (("status",), ("status", "--json"), ("events",), ("doctor",)):
            _, out = await understudy(pod, *words)
            assert out
        _, checks = await checked(pod)
        assert checks["directory"]["status"] == "pass"
        for part in ("lockserver", "gms", "gateway", "engine"):
            for flags in ((), ("--json",)):
                process = await asyncio.create_subprocess_exec(
                    *(str(BIN / part), "status", f"--dir={pod.directory}"),
                    *flags,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
                out, err = await process.communicate()
                assert process.returncode == 0, (out, err)
                assert out.decode()
        await pod.whole()  # nothing ended meanwhile

    odd_home.run(scenario)
