"""The backend as a process: its command line, its start, and a client that leaves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.backends.reference.config import Settings, read_config
from engine.backends.reference.decoder import KVCache
from engine.backends.reference.kv_blocks import DEFAULT_CONTEXT, size_kv
from plumbing.errors import UsageError
from plumbing.pod.paths import engine_http_socket
from tests.engine.pod import Engine, Pod, environment
from tests.engine.stub_lock import StubLock
from tests.gms.bench import GmsProcess
from tests.helpers import run_command, until
from understudy.pod.table import program as console_script

URL = "http://engine/v1/completions"


@pytest.mark.parametrize("words", ["engine run", "understudy up", "understudy drill"])
def test_help_of_the_backend_is_printed_and_nothing_is_started(tmp_path: Path, words: str):
    """Goal: a question is answered. Method: ask in a place for no pod."""
    nowhere, (name, *more) = tmp_path / "nowhere", words.split()
    command = [*console_script(name), *more, "--backend=reference", "--", "--help"]
    done = run_command(command, env={**environment(), "UNDERSTUDY_DIR": str(nowhere)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "--tensor-parallel" in done.stdout
    assert not nowhere.exists()


def test_start_by_hand_names_the_command_to_use():
    """A backend without a supervisor is one sentence on stderr and exit code 2, no stack trace."""
    command = [sys.executable, "-m", "engine.backends.reference.main", "--model", "m"]
    ended = run_command(command)
    assert ended.returncode == 2
    assert "engine run" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "device_kib", "words"),
    [
        (("--model", "MODEL", "--slots", "0"), 64, "slots"),
        (("--model", "MODEL", "--max-context", "4096"), 64, "engine.context_too_long"),
        (("--model", "MODEL", "--slots", "1024"), 64, "gms.larger_than_device"),
        (("--model", "MODEL", "--slots", "1024"), 2048, "gms.kv_too_large"),
    ],
)
def test_fault_that_no_relaunch_can_fix_ends_the_engine(
    pod: Pod, lock: StubLock, directory: Path, model: Path, arguments: Any, device_kib, words: str
):
    """Goal: one sentence that names the cause. Method: what the command line, the model and the
    memory service refuse."""
    gms = GmsProcess(str(directory), device_bytes=device_kib << 10).start()
    filled = [str(model) if argument == "MODEL" else argument for argument in arguments]
    engine = pod.engine("e-0", backend=("reference", *filled))
    assert engine.wait() in (2, 69)
    assert words in engine.errors.read_text().splitlines()[-1]
    gms.stop()


def until_in_flight(engine: Engine, count: int) -> None:
    until(lambda: (engine.status() or {}).get("inflight") == count, f"{count} in flight")


async def test_client_that_leaves_frees_its_slot(
    pod: Pod, lock: StubLock, directory: Path, model: Path
):
    """Goal: no tokens for a client that has left. Method: one slot, a stream of half an hour that
    is cut, and a whole answer without a client; then another request."""
    gms = GmsProcess(str(directory)).start()
    arguments = ("--model", str(model), "--slots", "1", "--token-interval-ms", "100")
    engine = pod.active("e-0", backend=("reference", *arguments))
    long = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True}
    connector = aiohttp.UnixConnector(engine_http_socket(str(directory), "e-0"))
    async with aiohttp.ClientSession(connector=connector) as client:
        async with client.post(URL, json={**long, "stream": True}) as response:
            await response.content.readline()
            response.close()
        waiting = asyncio.ensure_future(client.post(URL, json=long))
        await asyncio.to_thread(until_in_flight, engine, 1)
        waiting.cancel()
        async with client.post(URL, json={"prompt": "hello", "max_tokens": 2}) as response:
            assert response.status == 200, await response.text()
    gms.stop()


def test_context_is_what_was_asked_or_what_the_model_allows(model: Path):
    """Goal: the context's length never surprises, and the cache is as large as the slots. Method:
    a model of 2048 positions."""
    config = read_config(str(model))
    position_bytes, block_bytes = (KVCache.bytes_needed(config, 1, each) for each in (1, 8))
    assert config.max_position == 2048 < DEFAULT_CONTEXT
    for asked, tokens, context, blocks in (
        (None, None, 2048, 1024),
        (100, None, 100, 50),
        (100, 0, 100, 0),
        (100, 7, 100, 0),
        (100, 320, 100, 40),
    ):
        slots_bytes = 4 * context * position_bytes
        size = context, blocks, slots_bytes, slots_bytes + blocks * block_bytes
        assert size_kv(config, Settings("dir", 4, asked, tokens)) == size
    with pytest.raises(UsageError):
        size_kv(config, Settings("dir", 4, 4096))
