"""Goal: the pool's process does what its core decides and operators ask, keeps it over its death,
or refuses it with the reason.

Method: `pool serve` as a process between stand-ins on the real sockets; SIGKILL, and a second one;
the commands as users run them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from plumbing.pod.cli import ask_status
from plumbing.pod.paths import pool_socket
from plumbing.service.clock import SystemClock
from pool.messages import CATALOGUE
from pool.schema import ExplainDocument, OrderDocument, PoolStatus
from pool.status_text import explained
from tests.documents import mismatches
from tests.helpers import auntil
from tests.pool.neighbours import MIB, World, pool_process
from tests.understudy.pools import model as a_model
from tests.understudy.pools import pool as a_pool

FILE = """\
devices: [HOST-0]
margin: 1MiB
defaults: {min_runtime: 0s, max_wait: 0s, keep_alive: never, backend: reference}
models:
  chat: {model: /models/chat, memory: {weights: 10MiB, kv: 20MiB, base: 1MiB}}
  coder: {model: /models/coder, memory: {weights: 10MiB, kv: 20MiB, base: 1MiB}}
"""
ROOM = 50 * MIB  # both at rest and one awake
TIGHT = 40 * MIB


@pytest.fixture
def place(tmp_path):
    tmp_path.chmod(0o700)
    file = tmp_path / "pool.yaml"
    file.write_text(FILE)
    return str(tmp_path), str(file)


async def command(directory, *words):
    """Exit code, stdout and stderr of `pool WORDS`."""
    line = [sys.executable, "-m", "pool.cli", words[0], "--dir", directory, *words[1:]]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*line, stdout=pipe, stderr=pipe)
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


def document(directory):
    return ask_status(pool_socket(directory), CATALOGUE)


def outside(directory):
    return document(directory)["devices"][0]["outside_bytes"]


def model(directory, name):
    return next(each for each in document(directory)["models"] if each["model"] == name)


async def test_second_pool_of_a_directory_cannot_run(place):
    """Goal: one decider. Method: a second process beside one that runs, then one after SIGKILL."""
    directory, file = place
    async with World(directory, ("chat", "coder"), ROOM) as world:
        with pool_process(directory, file) as pool:
            await auntil(lambda: world.doors, "the pool to run")
            words = ("serve", "--file", file, "--http-port", "0")
            code, _, errors = await command(directory, *words)
            assert (code, "[wire.address_in_use]" in errors) == (1, True)
            assert f"pid {pool.process.pid}" in errors
            pool.kill()
            await world.loses_the_pool()
            pool.start()
            await auntil(lambda: world.doors, "another pool to run")


async def test_dead_engine_is_known_by_its_witness_alone(place):
    """Goal: memory of processes that may live stays booked. Method: an order to unload; the engine
    says that it is dead while a process of it still holds the witness."""
    directory, file = place
    async with World(directory, ("chat", "coder"), ROOM) as world:
        with pool_process(directory, file):
            world.ask("chat", SystemClock().now_ms())
            await world.until_open("chat")
            engine = world.engines["chat"]
            survivor = os.dup(engine.witness_fd)
            code, out, _ = await command(directory, "unload", "chat")
            assert code == 0, out
            await auntil(lambda: engine.state == "dead", "the engine to obey")
            await auntil(
                lambda: (
                    world.memory["chat"].weights.held == 0
                    or model(directory, "chat")["state"] == "unloading"
                ),
                "the pool to wait for its processes",
            )
            assert model(directory, "chat")["state"] != "cold"
            os.close(survivor)
            await auntil(lambda: model(directory, "chat")["state"] == "cold", "chat to be cold")


@pytest.mark.slow  # a dozen commands, each a process
async def test_orders_are_obeyed_kept_and_refused(place):
    """Goal: a pin and a setting outlive the pool; a pinned model is not unloaded by mistake."""
    directory, file = place
    async with World(directory, ("chat", "coder"), TIGHT) as world:
        with pool_process(directory, file) as pool:
            await auntil(lambda: world.doors, "the pool to run")
            # Nothing was loaded: the budgets of the loads would say hours.
            code, out, _ = await command(directory, "explain", "chat")
            assert (code, "cannot be estimated" in out, "at most" in out) == (0, True, False)
            code, out, _ = await command(directory, "explain", "chat", "--json")
            assert model(directory, "chat")["measured_bound_ms"] is None
            assert model(directory, "chat")["bound_ms"] is not None  # the guarantee
            code, out, _ = await command(directory, "pin", "chat", "--json")
            assert code == 0
            assert mismatches(json.loads(out), OrderDocument) == []
            code, out, _ = await command(directory, "load", "chat")
            assert code == 0
            await world.until_open("chat")
            code, _, errors = await command(directory, "unload", "chat")
            assert (code, "[pool.pinned]" in errors, "--force" in errors) == (1, True, True)
            words = ("set", "--model", "coder", "min_runtime=7s")
            assert (await command(directory, *words))[0] == 0
            for setting in ("priority=3", "client_priority=-2"):
                assert (await command(directory, *words[:-1], setting))[0] == 0
            await auntil(
                lambda: world.doors["coder"].rules.client_priority == -2,
                "the gateway to be told",
            )
            assert world.doors["coder"].rules.priority == 3
            code, _, errors = await command(directory, "set", "min_runtme=7s", "--model", "chat")
            assert (code, "did you mean 'min_runtime'?" in errors) == (1, True)
            code, _, errors = await command(directory, "set", "margin=40MiB")
            assert (code, "[pool.bad_setting]" in errors) == (1, True)  # all of the device

            pool.kill()
            await world.loses_the_pool()
            pool.start()
            await world.until_open("chat")
            assert model(directory, "chat")["pinned"]
            assert document(directory)["changed"] == {
                "coder": {"min_runtime": "7s", "priority": "3", "client_priority": "-2"}
            }

            # Nothing can take the room of a pinned model: its neighbour is told who has it.
            world.ask("coder", SystemClock().now_ms())
            await auntil(
                lambda: getattr(world.doors["coder"].door, "code", "") == "pool.no_room",
                "the refusal",
            )
            assert "chat" in world.doors["coder"].door.sentence
            code, out, _ = await command(directory, "explain", "coder", "--json")
            assert (code, "pinned" in out) == (0, True)
            # No bound: no wait would make room.
            assert "at most" not in out
            assert mismatches(json.loads(out), ExplainDocument) == []
            assert mismatches(document(directory), PoolStatus) == []
            code, _, errors = await command(directory, "load", "nobody")
            assert (code, "[model_not_found]" in errors) == (1, True)


def test_explain_names_no_engine_that_is_dead():
    """Goal: nobody is sent to a dead engine. Method: the door stays open over a failover."""
    door = {"type": "open", "engine": "chat-0", "token": 7}
    for state, is_named in (("awake", True), ("loading", False)):
        lines = explained(a_pool(), a_model("chat", state, door=door))
        assert any("chat-0" in line for line in lines) is is_named


@pytest.mark.slow
async def test_lease_lasts_as_long_as_any_of_its_processes(place):
    """Goal: training shares the books: a model yields for it, and comes back when its last process
    is dead, whoever died before. Method: a command that leaves a process behind, and a pool that
    is killed and loses its file meanwhile."""
    directory, file = place
    go_on = os.path.join(directory, "go_on")
    os.mkfifo(go_on)
    # The survivor opens the fifo, so it lives until the test has written to it.
    script = f"SECRET=7; cat {go_on} > /dev/null 2>&1 & exit $SECRET"
    async with World(directory, ("chat", "coder"), TIGHT) as world:
        with pool_process(directory, file) as pool:
            world.ask("chat", SystemClock().now_ms())
            await world.until_open("chat")
            words = (
                "lease",
                "--device",
                "HOST-0",
                "--bytes",
                "20MiB",
                "--",
                "/bin/sh",
                "-c",
                script,
            )
            code, _, errors = await command(directory, *words)
            assert code == 7, errors
            assert "waiting for 20.0 MiB of HOST-0" in errors
            assert world.engines["chat"].state != "active"
            found = document(directory)
            assert [each["granted"] for each in found["leases"]] == [True]
            assert mismatches(found, PoolStatus) == []
            # Its arguments may hold secrets, and are nowhere: status is on an open port.
            assert found["leases"][0]["command"] == "sh"
            assert found["leases"][0]["pid"] > 0
            # What it uses is booked already. Twice 16 MiB are another program's.
            used = (10 + 1 + 20 + 32) * MIB
            world.memory["chat"].weights.used_bytes = used
            await auntil(lambda: outside(directory) == 32 * MIB, "the stranger's memory", 30)
            world.memory["chat"].weights.used_bytes = 0
            await auntil(lambda: not outside(directory), "the stranger's end", 30)
            _, explained, _ = await command(directory, "explain")
            file_bytes = Path(directory, "pool.json").read_bytes()
            assert b"SECRET" not in file_bytes + explained.encode() + json.dumps(found).encode()

            pool.kill()
            await world.loses_the_pool()
            Path(directory, "pool.json").write_bytes(b"")  # a grant is in the lease's own file
            pool.start()
            await auntil(lambda: world.doors, "another pool to run")
            (lease,) = document(directory)["leases"]
            assert (lease["granted"], lease["command"], lease["bytes"]) == (True, "sh", 20 * MIB)
            await asyncio.to_thread(Path(go_on).write_text, "\n")
            await auntil(lambda: not document(directory)["leases"], "the lease to end")
            world.ask("chat", SystemClock().now_ms())
            await world.until_open("chat")

            words = ("lease", "--device", "HOST-0", "--bytes", "9" * 20, "--", "true")
            code, _, errors = await command(directory, *words)
            assert (code, "no memory is as large as that" in errors) == (2, True), errors

            code, _, errors = await command(f"{directory}/none", *words[:4], "1", "--", "true")
            assert (code, "[pool.offline]" in errors) == (3, True), errors

            words = ("lease", "--device", "HOST-0", "--bytes", "1GiB", "--", "true")
            code, _, errors = await command(directory, *words)
            assert (code, "[pool.no_room]" in errors) == (1, True), errors
            assert not [each for each in os.listdir(directory) if each.startswith("lease_")]
