"""The documents that a pod prints, against the structs from which docs/cli_json.md is generated.

The pod is inspected after a failover, after its memory has been dropped, and from the files it
leaves on disk, so most of the optional keys occur here once.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import engine.cli
import gateway.cli
import gms.cli
import lockserver.cli
import understudy.cli.main
from gms.messages import OffloadMsg
from tests.documents import mismatches
from tests.e2e.pods import BIN, ENVIRONMENT, Pod, PodHome
from tests.gateway.gateways import GatewayProcess, LockServer
from tests.gms.bench import GmsProcess, kept
from tests.gms.test_gms_offload import Copies, digested
from understudy.http_get import get
from understudy.schema import DOCUMENTS

WAIT_S = 60.0
AT_ONCE = 2  # commands at a time: the pod has work to do meanwhile
UNREACHABLE = 3
DEGRADED = 4
PAGE = (Path(__file__).parents[2] / "docs/cli_json.md").read_text()
# Offline, or of a pool or a fleet: in tests/gateway, tests/pool, test_drills.py, test_fleet.py.
ELSEWHERE = ("gateway ", "pool ", "understudy drill --", "A ", "KV ", "No answer", "The ")
PROGRAMS = {
    "understudy": understudy.cli.main.main,
    "lockserver": lockserver.cli.main,
    "gms": gms.cli.main,
    "engine": engine.cli.main,
    "gateway": gateway.cli.main,
}


class Printed:
    """The documents that a pod and its commands have printed, by their section of the page."""

    def __init__(self) -> None:
        self.documents: dict[str, list[Any]] = {heading: [] for heading in DOCUMENTS}
        self._sections = {name: heading for heading in DOCUMENTS for name in heading.split(", ")}
        self._turn = asyncio.Semaphore(AT_ONCE)

    def add(self, name: str, *documents: Any) -> None:
        self.documents[self._sections[name]] += documents

    async def run(
        self,
        command: str,
        *flags: str,
        where: Path | None = None,
        codes: tuple[int, ...] = (0,),
    ) -> None:
        """Run `command --json` as a process."""
        words = command.split()
        place = [f"--dir={where}"] if where else []
        async with self._turn:
            process = await asyncio.create_subprocess_exec(
                *(str(BIN / words[0]), *words[1:], *flags, *place, "--json"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
            )
            out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
        assert process.returncode in codes, f"{command}: {err.decode()}"
        texts = out.splitlines() if words[1] == "events" else [out]
        self.add(command, *map(json.loads, texts))

    async def fetch(self, port: int, path: str, about: str) -> dict[str, Any]:
        document = (await get(f"http://127.0.0.1:{port}{path}")).json()
        assert document, f"{path} of {about}"
        self.add(about, document)
        return document


@pytest.fixture(scope="module")
def printed(home: PodHome, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Every document of a pod after a failover, of the files it leaves, and of no pod at all."""
    found = Printed()
    failures(found, tmp_path_factory.mktemp("none"))

    async def scenario(pod: Pod) -> None:
        directory = pod.directory
        targets = ("--target=backend-model", "--target=gms")
        flags = ("--attach", "--yes", "--kills=2", *targets)
        await found.run("understudy drill", *flags, where=directory)
        await pod.whole()
        await found.run("lockserver switchover", where=directory)
        await pod.whole()
        await found.run("understudy sleep", where=directory)
        await found.run("understudy wake", where=directory)
        await pod.whole()
        await commands(found, directory)
        await ports(found, pod)
        await remains(found, directory, tmp_path_factory.mktemp("off"))
        await asyncio.to_thread(no_engine_active, found, tmp_path_factory.mktemp("lock"))
        await asyncio.to_thread(no_kv_memory, found, tmp_path_factory.mktemp("kv"))
        await asyncio.to_thread(offloaded_weights, found, tmp_path_factory.mktemp("offload"))
        await found.run("gms drop", "--even-if-mapped", "--yes", where=directory)
        # Its weights are out of service: the exit code shows it, and a document is still printed.
        await found.run("understudy status", "--check", where=directory, codes=(DEGRADED,))
        await found.run("engine drain", "--engine-id=engine-0", where=directory)

    home.run(scenario)
    return found


def failures(found: Printed, nowhere: Path) -> None:
    """If there is no pod, a command reports that in one document."""
    for name, command in with_json():
        words = [word for word in ("--attach", "--yes") if has_option(command, word)]
        if has_option(command, "--dir") and name != "understudy doctor":  # which works everywhere
            result = CliRunner().invoke(command, [*words, f"--dir={nowhere}", "--json"])
            assert result.exit_code == UNREACHABLE, f"{name}: {result.output}"
            found.add("Errors", json.loads(result.stdout))


async def commands(found: Printed, directory: Path) -> None:
    looks = (
        *("understudy status", "understudy events", "lockserver status", "lockserver events"),
        "gms status",
    )
    await asyncio.gather(
        *(found.run(each, where=directory) for each in looks),
        *(found.run("engine status", f"--engine-id=engine-{n}", where=directory) for n in (0, 1)),
        # The digest may not be there yet, and the machine may have faults of its own.
        found.run("gms verify", where=directory, codes=(0, DEGRADED)),
        found.run("understudy doctor", where=directory, codes=(0, 1)),
    )


async def ports(found: Printed, pod: Pod) -> None:
    """Every part's answers over HTTP."""
    numbers = pod.local.ports
    named = {"the lock server": numbers.lockserver, "gms": numbers.gms}
    for part, port in {**named, "an engine": numbers.engines[0]}.items():
        await found.fetch(port, "/status", f"/status of {part}")
        paths = (await found.fetch(port, "/", "Ports"))["paths"]
        assert [path for path in paths if f"`{path}`" not in PAGE] == []
        for path in {"/startup", "/live", "/ready", "/serving"} & set(paths):
            await found.fetch(port, path, "Probes")
    recorded = (await get(f"http://127.0.0.1:{numbers.lockserver}/events")).json()
    found.add("/events", *recorded["events"])


async def remains(found: Printed, directory: Path, copy: Path) -> None:
    """The offline views: the state files alone; then with one engine that answers there."""
    for path in directory.glob("*.json"):
        shutil.copy(path, copy)
    commands = ("lockserver status", "gms status", "gms verify")
    code = (UNREACHABLE,)
    await asyncio.gather(
        found.run("engine status", "--engine-id=engine-0", where=copy, codes=code),
        *(found.run(each, where=copy, codes=code) for each in commands),
    )
    (copy / "engine_engine-0.sock").symlink_to(directory / "engine_engine-0.sock")
    (copy / "engine_engine-1.sock").touch()  # no process listens there
    (copy / "gms_HOST-0_weights.sock").touch()
    await found.run("understudy status", where=copy)


def no_engine_active(found: Printed, directory: Path) -> None:
    """A gateway beside a lock server that no engine has asked for a lock."""
    server = LockServer(str(directory))
    server.start()
    gateway = GatewayProcess(server, "--hold-ms", "0")
    try:
        gateway.start()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models", timeout=WAIT_S)
        found.add("No active engine", json.load(refused.value))
    finally:
        gateway.close()
        server.close()


def no_kv_memory(found: Printed, directory: Path) -> None:
    """A device whose KV memory nobody has asked for."""
    (directory / "gms_HOST-0_weights.json").touch()  # by which a device is known
    server = GmsProcess(str(directory)).start()
    try:
        words = ["drop-kv", f"--dir={directory}", "--yes", "--json"]
        found.add("gms drop-kv", json.loads(CliRunner().invoke(gms.cli.main, words).stdout))
    finally:
        server.stop()


def offloaded_weights(found: Printed, directory: Path) -> None:
    """A device whose weights are only in host memory."""
    device = GmsProcess(str(directory)).start()
    copies = GmsProcess(str(directory), device="OFFLOAD-0").start()
    keeper = Copies(device)
    try:
        with device.load() as reader, kept(reader):
            digested(device)
            keeper.settle()
        with device.client() as asker:
            asker.request(OffloadMsg())
        words = ["status", f"--dir={directory}", "--json"]
        found.add("gms status", json.loads(CliRunner().invoke(gms.cli.main, words).stdout))
    finally:
        keeper.close()
        copies.stop()
        device.stop()


@pytest.mark.slow
@pytest.mark.parametrize("heading", [each for each in DOCUMENTS if not each.startswith(ELSEWHERE)])
def test_page_and_output_have_the_same_keys(printed: Printed, heading: str):
    """Goal: scripts can rely on the page. Method: compare the keys and value types of every
    document with the struct that describes it."""
    documents = printed.documents[heading]
    assert documents
    assert [each for it in documents for each in mismatches(it, DOCUMENTS[heading])] == []


def test_every_command_with_json_has_a_section():
    """Goal: no command is undocumented. Method: the commands of every program that have their own
    `--json`, and a heading that names each."""
    named = {name for heading in DOCUMENTS for name in heading.split(", ")}
    found = {name for name, _ in with_json()}
    assert len(found) >= 14
    assert found - named == set()


def every_command() -> list[tuple[str, click.Command]]:
    return [
        (f"{program} {name}", command)
        for program, group in PROGRAMS.items()
        for name, command in group.commands.items()
        if not command.hidden  # an older name of another one
    ]


def with_json() -> list[tuple[str, click.Command]]:
    """The commands that print JSON."""
    return [
        (name, command)
        for name, command in every_command()
        for option in command.params
        if "--json" in option.opts
    ]


def has_option(command: click.Command, name: str) -> bool:
    return any(name in option.opts for option in command.params)
