"""`lockserver switchover` of a pod of real processes, and its drain held open in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.e2e.pods import AS_USERS_RUN_IT, Load, Pod
from tests.e2e.processes import continue_all
from tests.helpers import POLL_S
from understudy.drill.killer import Whole

LOCKSERVER = str(Path(sys.executable).parent / "lockserver")
DEADLINE_S = 60.0
OK, REFUSED, UNREACHABLE, TIMEOUT = 0, 1, 3, 5


class Command:
    """`lockserver switchover --json`, running."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, pod: Pod, *flags: str) -> Command:
        command = (LOCKSERVER, "switchover", f"--dir={pod.directory}", "--json", *flags)
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, **AS_USERS_RUN_IT}
        return cls(await asyncio.create_subprocess_exec(*command, stdout=pipe, env=environment))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def end(self) -> tuple[int, dict[str, Any]]:
        """Its exit code, and its document or error."""
        out, _ = await asyncio.wait_for(self._process.communicate(), DEADLINE_S)
        document = json.loads(out)
        assert self._process.returncode is not None
        return self._process.returncode, document.get("error", document)


async def switch(pod: Pod, *flags: str) -> tuple[int, dict[str, Any]]:
    return await (await Command.start(pod, *flags)).end()


async def state_of(pod: Pod, engine: str) -> str:
    """The state that the engine reports; "" if it does not answer."""
    return str((await pod.engine(engine)).get("engine", {}).get("state", ""))


async def until_so(look: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until the condition on the pod holds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_S
    while not await look():
        assert loop.time() < end, f"waited in vain for {what}"
        await asyncio.sleep(POLL_S)


async def until_state(pod: Pod, engine: str, state: str) -> None:
    async def look() -> bool:
        return await state_of(pod, engine) == state

    await until_so(look, f"{engine} to be {state}")


async def waiting(pod: Pod, engine: str) -> list[dict[str, Any]]:
    """The engine's place in the queue, if it has one; [] while the lock server does not answer."""
    waiters = (await pod.lock()).get("waiters", [])
    return [waiter for waiter in waiters if waiter["engine"] == engine]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        continue_all([pid])


@asynccontextmanager
async def stopped_model(pod: Pod, engine: str) -> AsyncIterator[None]:
    """No request that `engine` has started can finish while this lasts."""
    *_, model = await pod.engine_tree(engine)
    with stopped(model):
        yield


@asynccontextmanager
async def draining(pod: Pod, load: Load, *flags: str) -> AsyncIterator[tuple[Whole, Command]]:
    """A switchover in its middle: the active engine drains, and cannot finish before this ends.

    Behind a gateway it would leave its streams to the next engine, and not drain (`--drain`)."""
    before = await pod.whole()
    await load.answers()
    async with stopped_model(pod, before.engine):
        command = await Command.start(pod, "--drain", *flags)
        await until_state(pod, before.engine, "draining")
        yield before, command


def nothing_lost(load: Load) -> None:
    assert not load.lost()
    assert not load.refused()
