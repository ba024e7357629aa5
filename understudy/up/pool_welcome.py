"""Says how to use the pod of a pool, once requests to it can be answered.

No engine needs to be active for that: a request raises its model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.part.paths import pool_socket
from plumbing.part.peers import ask
from pool.messages import CATALOGUE, StatusMsg
from understudy.kubelet.containers import Container
from understudy.status.gateway_view import is_open
from understudy.status.gather import gather
from understudy.up.local_pod import program, reachable

POOL = "pool"  # the program that only such a pod runs
DEADLINE_S = 60.0  # all containers have started; only their connections are missing
POLL_S = 0.05


def has_pool(containers: Sequence[Container]) -> bool:
    return any(Path(each.command[0]).name == POOL for each in containers)


async def pool_welcome(directory: Path) -> list[str]:
    """A request to copy, and commands to look at the pod.

    Raises:
        WaitTimeoutError: `pod.pool_not_ready`, with what is missing.
    """
    url, models = await _wait_ready(directory)
    command, body = " ".join(program("understudy")), {"prompt": "Hello", "max_tokens": 16}
    return [
        "",
        f"Models: {', '.join(models)}; each is awake when it is asked for. Send requests to {url};"
        " Ctrl-C stops the pod. Try:",
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps({'model': models[-1], **body})}'",
        f"  {command} pool status --dir {directory}",
        f"  {command} pool explain --dir {directory}",
        "",
    ]


async def _wait_ready(directory: Path) -> tuple[str, list[str]]:
    """Where requests go, and the names that they may have."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + DEADLINE_S
    while True:
        view = await gather(directory)
        try:
            answered = await ask(pool_socket(str(directory)), CATALOGUE, StatusMsg())
            document = getattr(answered.message, "document", {})
            missing = "" if document.get("gateways") else "no gateway is connected to the pool"
        except UnderstudyError as error:
            document, missing = {}, error.message
        service = (view["lockserver"].get("service") or {}).get("active") or {}
        if not missing and is_open(view["gateway"]) and service.get("address"):
            host, _, port = str(service["address"]).rpartition(":")
            names = [str(each["model"]) for each in document["models"]]
            return f"http://{reachable(host.strip('[]'))}:{port}", names
        if loop.time() > end_s:
            why = missing or "; ".join(view["problems"]) or "the gateway does not accept"
            raise WaitTimeoutError(
                "pod.pool_not_ready",
                f"requests could not be answered within {DEADLINE_S:g} s of the start: {why}",
            )
        await asyncio.sleep(POLL_S)
