"""Goal: the pool's manifest holds between real containers, each with its own PID namespace.

Method: the rendered overlay `pool-cpu`, run with podman as in `test_containers.py`; requests to all
models through the port of the Service, and kills of PID 1 from outside.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from plumbing.pod.observers import ask
from plumbing.pod.paths import pool_socket
from pool.messages import CATALOGUE, StatusMsg
from tests.deploy.image import why_not
from tests.deploy.podman_pod import PodmanPod
from tests.e2e.processes import kill
from tests.helpers import auntil

WAIT_S = 120.0
MODELS = ("chat", "coder", "batch")

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


class PoolHome:
    """The pod, on one event loop."""

    def __init__(self, image: str) -> None:
        self.pod = PodmanPod(image, "pool-cpu")
        self._loop = asyncio.Runner()
        self._loop.run(self.pod.start())

    def run(self, scenario: Callable[[PoolHome], Awaitable[None]]) -> None:
        async def use() -> None:
            try:
                await asyncio.wait_for(scenario(self), 2 * WAIT_S)
            except BaseException:
                for name in self.pod.names:
                    print(await self.pod.logs(name))
                raise

        self._loop.run(use())

    def close(self) -> None:
        try:
            assert self._loop.run(self.pod.close()) == []
        finally:
            self._loop.close()

    async def answer(self, model: str) -> tuple[str, str]:
        """The text, and the engine that made it."""
        return await asyncio.to_thread(self._answer, model)

    def _answer(self, model: str) -> tuple[str, str]:
        asked = {"model": model, "prompt": "one rainy day", "max_tokens": 8, "temperature": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self.pod.service_port, timeout=WAIT_S)
        json_type = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(asked), json_type)
        response = connection.getresponse()
        document = json.loads(response.read())
        connection.close()
        assert response.status == 200, document
        text = str(document["choices"][0]["text"])
        return text, str(response.headers["X-Understudy-Engine"])

    async def models(self) -> dict[str, dict[str, Any]]:
        path = pool_socket(str(self.pod.directory))
        answered = await ask(path, CATALOGUE, StatusMsg())
        found = getattr(answered.message, "document", {})["models"]
        return {each["model"]: each for each in found}


@pytest.fixture(scope="module")
def home(image: str) -> Iterator[PoolHome]:
    found = PoolHome(image)
    try:
        yield found
    finally:
        found.close()


def test_every_model_answers_and_one_is_awake(home: PoolHome):
    async def scenario(home: PoolHome) -> None:
        engines = [(await home.answer(model))[1] for model in MODELS]
        assert engines[1:] == ["coder-0", "batch-0"]
        assert engines[0] in ("chat-0", "chat-1")
        states = {name: each["state"] for name, each in (await home.models()).items()}
        assert states["batch"] == "awake"
        assert [*states.values()].count("awake") == 1

    home.run(scenario)


def test_killed_pool_is_back_with_what_it_knew(home: PoolHome):
    async def scenario(home: PoolHome) -> None:
        texts = {model: await home.answer(model) for model in MODELS}
        pids = {name: await home.pod.pid(name) for name in home.pod.names if name != "pool"}
        kill(await home.pod.pid("pool"))
        assert (await home.answer("batch"))[0] == texts["batch"][0]  # awake: nobody is asked
        await home.pod.restart("pool")
        assert {model: await home.answer(model) for model in MODELS} == texts
        assert {name: await home.pod.pid(name) for name in pids} == pids

    home.run(scenario)


def test_killed_engine_is_followed_by_its_shadow(home: PoolHome):
    """Goal: failover within a model between containers. Method: SIGKILL to PID 1 of the engine that
    answers for the model; the other one does, and the first comes back as its shadow."""

    async def scenario(home: PoolHome) -> None:
        text, engine = await home.answer("chat")
        other = {"chat-0": "chat-1", "chat-1": "chat-0"}[engine]
        await _standby(home, other)
        kill(await home.pod.pid(engine))
        assert await home.answer("chat") == (text, other)
        await home.pod.restart(engine)
        await _standby(home, engine)

    home.run(scenario)


async def _standby(home: PoolHome, engine: str) -> None:
    """Wait until `engine` can take over."""
    path = home.pod.directory / f"engine_{engine}.json"
    await auntil(
        lambda: json.loads(path.read_text())["engine"]["state"] == "standby",
        f"{engine} to stand by",
        WAIT_S,
    )
