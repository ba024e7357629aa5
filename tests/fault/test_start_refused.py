"""Starts that cannot work: one sentence with cause and fix, an exit code, and no effect on
others."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from plumbing.errors import GivenUpError, UnderstudyError, UsageError
from tests.e2e.pods import AS_USERS_RUN_IT, Pod, PodHome, in_pod
from understudy.pod.ports import free_offset

BIN = Path(sys.executable).parent
FAILED, USAGE = UnderstudyError.exit_code, UsageError.exit_code
GIVEN_UP = GivenUpError.exit_code
REFUSED_WITHIN_S = 60.0
AT_ONCE = 3  # commands that run in parallel: more would only compete for two cores


@dataclass(frozen=True)
class Refusal:
    """A command, the exit code it must end with and the words that its message must contain."""

    command: Sequence[str]
    exit_code: int
    words: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)


async def refuse_all(refusals: Sequence[Refusal]) -> None:
    """Run all, a few at a time, and check each against its expected message."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(refusal: Refusal) -> None:
        async with turns:
            process = await asyncio.create_subprocess_exec(
                str(BIN / refusal.command[0]),
                *refusal.command[1:],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **AS_USERS_RUN_IT, **refusal.env},
            )
            try:
                printed = await asyncio.wait_for(process.stdout.read(), REFUSED_WITHIN_S)
            except TimeoutError:
                process.terminate()
                printed = await process.stdout.read()
                raise AssertionError(f"{refusal.command} runs: {printed.decode()}") from None
            await process.wait()
        output = printed.decode()
        assert process.returncode == refusal.exit_code, output
        assert "Traceback" not in output
        sentences = [line for line in output.splitlines() if line.startswith("error: ")]
        assert len(sentences) == 1, output
        assert sentences == output.splitlines()[-1:]
        for word in refusal.words:
            assert word in sentences[0]

    await asyncio.gather(*map(one, refusals))


@pytest.mark.slow
@in_pod
async def test_second_server_of_a_running_pod_is_refused_by_name(pod: Pod):
    """Goal: two servers of one kind cannot both run. Method: each command again on the pod's
    directory; the error names the pid that holds it, and the pod continues to serve."""
    before = await pod.whole()
    where = f"--dir={pod.directory}"
    engine = {"ENGINE_ID": "engine-0"}
    model = ("--", "--model", str(pod.local.model))

    def has(container: str, what: str = "holds") -> tuple[str, ...]:
        return (f"pid {pod.pid(container)} {what}", "already running", "stop it")

    in_pod = (f"pid {pod.pid('lockserver')} is lockserver", "[pod.already_running]")

    async with pod.load() as load:
        await refuse_all(
            [
                Refusal(("lockserver", "serve", where, "--http-port=0"), FAILED, has("lockserver")),
                Refusal(("gms", "serve", where, "--http-port=0"), FAILED, has("gms")),
                Refusal(
                    ("engine", "run", where, "--http-port=0", *model),
                    FAILED,
                    has("engine-0"),
                    engine,
                ),
                Refusal(("understudy", "up", where), FAILED, in_pod),
            ]
        )
        await load.answers()
        assert not load.lost()
        assert load.tokens() == {before.token}
    assert await pod.whole() == before


# ---------------------------------------------------------------------- checkpoints

Breaking = Callable[[Path], None]


def weights_cut(model: Path) -> None:
    path = next(model.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)


def other_weights(model: Path) -> None:
    path = next(model.glob("*.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[:-64] + bytes(byte ^ 1 for byte in content[-64:]))


# What else may be wrong with one: tests/engine/reference, by the same code.
BROKEN: dict[Breaking, tuple[int, Sequence[str]]] = {
    shutil.rmtree: (USAGE, ("rmtree/model is not a directory", "give the directory")),
    weights_cut: (USAGE, (".safetensors", "download")),
    other_weights: (GIVEN_UP, ("committed weights", "shards", "same checkpoint")),
}


@pytest.mark.slow
@in_pod
async def test_broken_checkpoint_ends_a_third_engine_with_one_clear_error(pod: Pod, tmp_path: Path):
    """Goal: cause and fix, no relaunch, no effect on others. Method: engines beside those of a
    serving pod, each with a checkpoint that is broken in its own way."""
    before = await pod.whole()
    refusals = []
    for number, (breaking, (code, words)) in enumerate(BROKEN.items(), start=2):
        model = tmp_path / breaking.__name__ / pod.local.model.name  # its name is its identity
        shutil.copytree(pod.local.model, model)
        breaking(model)
        run = ("engine", "run", f"--dir={pod.directory}", "--http-port=0")
        refusals.append(
            Refusal(
                (*run, "--", "--model", str(model)),
                code,
                words,
                {"ENGINE_ID": f"engine-{number}"},
            )
        )
    await refuse_all(refusals)
    async with pod.load() as load:
        await load.answers()
    assert load.tokens() == {before.token}
    assert await pod.whole() == before


# ---------------------------------------------------------------------- understudy up


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.slow
def test_up_that_cannot_work_is_one_clear_error(
    home: PodHome, tmp_path_factory: pytest.TempPathFactory, taken_port: int
):
    """Goal: a failed `up` explains what is wrong. Method: `up` with a model that is missing or too
    large, and with a port in use."""

    base = tmp_path_factory.mktemp("up")  # short: a socket's path has 107 bytes

    async def scenario(pod: Pod) -> None:
        model = f"--model={pod.local.model}"

        def up(name: str, *flags: str) -> tuple[str, ...]:
            offset = f"--port-offset={free_offset()}"
            return ("understudy", "up", f"--dir={base / name}", offset, *flags)

        in_use = (f"port {taken_port} ", "in use", "--port-offset")
        await refuse_all(
            [
                Refusal(
                    up("a", f"--model={base / 'none'}"),
                    USAGE,
                    ("none is not a directory", "--model"),
                ),
                Refusal(
                    up("c", model, "--device-bytes=256KiB"),
                    FAILED,
                    ("--device-bytes", "smaller model", "has 256.0 KiB"),
                ),
                Refusal(up("d", model, f"--service-port={taken_port}"), FAILED, in_use),
            ]
        )

    home.run(scenario)
