"""A pod of a pool file for tests: the product's own processes, and clients that stream from it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plumbing.pod.cli import ask_status
from plumbing.pod.paths import pool_socket
from plumbing.service.procfs import children
from plumbing.wire.blocking import BlockingClient
from pool.core.events import Order
from pool.messages import CATALOGUE, OrderMsg
from tests.e2e.pods import AS_USERS_RUN_IT
from understudy.pod.ports import free_pod_ports
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.up.models import make_random_model
from understudy.up.pods import prepare_pool

WAIT_S = 60.0


class RunningPool:
    """A pod in `directory` that serves at `port`; `runner` where the test has started it."""

    def __init__(self, directory: Path, port: int, runner: PodRunner | None = None) -> None:
        self.directory, self.port = directory, port
        # A parked stream is silent for as long as others have their turns.
        self.silence_s = 3 * WAIT_S
        self._runner = runner

    @property
    def runner(self) -> PodRunner:
        assert self._runner is not None
        return self._runner

    # ------------------------------------------------------------------ looking

    def status(self) -> dict[str, Any]:
        return ask_status(pool_socket(str(self.directory)), CATALOGUE)

    def states(self) -> dict[str, str]:
        """Of all models."""
        return {each["model"]: each["state"] for each in self.status()["models"]}

    def engines(self) -> dict[str, dict[str, Any]]:
        """What each engine's state file says of it."""
        return {
            path.stem.removeprefix("engine_"): json.loads(path.read_text())["engine"]
            for path in self.directory.glob("engine_*.json")
        }

    def incarnations(self) -> dict[str, str]:
        return {name: each["incarnation"] for name, each in self.engines().items()}

    def in_state(self, state: str, model: str) -> list[str]:
        """The engines of a model that are in this state."""
        found = self.engines().items()
        return [
            name for name, each in found if name.startswith(f"{model}-") and each["state"] == state
        ]

    def model_process(self, engine: str) -> int:
        """A process of an engine's backend, without which it is dead."""
        return children(self.runner.pids()[engine])[-1]

    # ------------------------------------------------------------------ asking

    def order(self, model: str, order: Order, *, is_forced: bool = False) -> None:
        with BlockingClient(pool_socket(str(self.directory)), CATALOGUE) as client:
            client.request(OrderMsg(model, order, is_forced), timeout_s=WAIT_S)

    def ask(self, model: str, prompt: str = "one rainy day", **more: Any) -> tuple[int, str]:
        """The status and the body of one answer."""
        with self._asked(model, prompt, **more) as response:
            return response.status, response.read().decode()

    def stream(
        self,
        model: str,
        prompt: str = "one rainy day",
        begun: threading.Event | None = None,
        **more: Any,
    ) -> str:
        """The text of one stream, which must be whole. `begun` is set at its first token."""
        with self._asked(model, prompt, stream=True, **more) as response:
            assert response.status == 200, response.read().decode()
            text, last = "", ""
            while raw := response.readline():
                line = raw.decode().strip().removeprefix("data: ")
                last = line or last
                if line and line != "[DONE]":
                    text += json.loads(line)["choices"][0]["text"]
                    if begun is not None:
                        begun.set()
        assert last == "[DONE]", last
        return text

    @contextmanager
    def _asked(self, model: str, prompt: str, **more: Any) -> Iterator[http.client.HTTPResponse]:
        asked = {"model": model, "prompt": prompt, "temperature": 0, **more}
        headers = {"Content-Type": "application/json"}
        made = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.silence_s)
        with closing(made) as connection:
            connection.request("POST", "/v1/completions", json.dumps(asked), headers)
            yield connection.getresponse()


@asynccontextmanager
async def running_pool(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    device_bytes: str | tuple[int, ...],
    model: Path | None = None,
) -> AsyncIterator[RunningPool]:
    """The pod of the pool file `text`, in which MODEL is the directory of a small model."""
    for name, value in AS_USERS_RUN_IT.items():
        monkeypatch.setenv(name, value)
    model = model or await make_random_model(directory / "model")
    path = directory / "pool.yaml"
    path.write_text(text.replace("MODEL", str(model)))
    local = LocalPod(Path(), None, free_pod_ports(has_pool=True), device_bytes=device_bytes)
    pod = await prepare_pool(local, path, directory, print)
    port = int(next(w for w in pod.containers[0].command if "service=" in w).rpartition(":")[2])
    # Without inits: tests stop processes, and the runner restarts what dies.
    containers = [replace(each, init=()) for each in pod.containers]
    runner = PodRunner(containers, directory / "log")
    try:
        await runner.start()
        yield RunningPool(directory, port, runner)
    finally:
        await runner.stop()
