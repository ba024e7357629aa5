"""Goal: the pool's process does what its core decides, and its death costs nobody anything.

Method: `pool serve` as a process between stand-ins on the real sockets; SIGKILL, and a second one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from plumbing.pod.cli import ask_status
from plumbing.pod.paths import pool_socket
from plumbing.service.clock import SystemClock
from pool.messages import CATALOGUE
from tests.helpers import auntil
from tests.pool.neighbours import MIB, World, pool_process

FILE = """\
devices: [HOST-0]
margin: 1MiB
defaults: {min_runtime: 0s, max_wait: 0s, keep_alive: never, backend: reference}
models:
  chat: {model: /models/chat, memory: {weights: 10MiB, kv: 20MiB, base: 1MiB}}
  coder: {model: /models/coder, memory: {weights: 10MiB, kv: 20MiB, base: 1MiB}}
"""
ROOM = 50 * MIB  # both at rest and one awake


@pytest.fixture
def place(tmp_path):
    tmp_path.chmod(0o700)
    file = tmp_path / "pool.yaml"
    file.write_text(FILE)
    return str(tmp_path), str(file)


def now_ms():
    return SystemClock().now_ms()


def command(directory, *words):
    done = subprocess.run(
        [sys.executable, "-m", "pool.cli", *words, "--dir", directory],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def status(directory):
    document = ask_status(pool_socket(directory), CATALOGUE)
    return {each["model"]: each["state"] for each in document["models"]}


def test_second_pool_of_a_directory_cannot_run(place):
    """Goal: one decider. Method: a second process beside one that runs, then one after SIGKILL."""
    directory, file = place

    async def scene():
        async with World(directory, ("chat", "coder"), ROOM) as world:
            with pool_process(directory, file) as pool:
                await auntil(lambda: world.doors, "the pool to run")
                words = ("serve", "--file", file, "--http-port", "0")
                code, _, errors = await asyncio.to_thread(command, directory, *words)
                assert (code, "[wire.address_in_use]" in errors) == (1, True)
                assert f"pid {pool.process.pid}" in errors
                pool.kill()
                await world.loses_the_pool()
                pool.start()
                await auntil(lambda: world.doors, "another pool to run")

    asyncio.run(scene())


def test_dead_engine_is_known_by_its_witness_alone(place):
    """Goal: memory of processes that may live stays booked. Method: an order to unload; the engine
    says that it is dead while a process of it still holds the witness, whose name the lock server
    has removed already."""
    directory, file = place

    async def scene():
        async with World(directory, ("chat", "coder"), ROOM) as world:
            with pool_process(directory, file):
                world.ask("chat", now_ms())
                await world.until_open("chat")
                engine = world.engines["chat"]
                survivor = os.dup(engine.witness_fd)
                os.unlink(os.path.join(directory, engine.ref.name))
                code, out, _ = await asyncio.to_thread(command, directory, "unload", "chat")
                assert code == 0, out
                await auntil(lambda: engine.state == "dead", "the engine to obey")
                await auntil(
                    lambda: (
                        world.memory["chat", "weights"].held == 0
                        or status(directory)["chat"] == "unloading"
                    ),
                    "the pool to wait for its processes",
                )
                assert status(directory)["chat"] != "cold"
                os.close(survivor)
                await auntil(lambda: status(directory)["chat"] == "cold", "chat to be cold")

    asyncio.run(scene())
