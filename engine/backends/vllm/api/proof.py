"""The proof that this engine, on this device, continues requests correctly: the result of the
self-test, filed so that it runs once.

On GPUs an engine continues streams, publishes KV blocks and sleeps only with a proof. On the CPU
`tests/vllm` prove the same, so an engine there is tested only with `--self-test`.

The file is in the pod's directory, and results are by everything on which they depend: devices,
driver, vLLM, runner and settings. A lock lets one engine test at a time, so the second one of a
new pod finds the first one's result. An attempt is filed before it begins: an engine that dies in
its self-test would otherwise be launched again and again, only to die in it.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct
from vllm.platforms import current_platform

from engine.backends.vllm import runners, versions
from plumbing.service.files import write_atomic
from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

NAME = "vllm_self_test.json"
SELF_TEST = 1  # of what is tested; a change makes results of the past worthless
ATTEMPTS_MAX = 3
RESULTS_MAX = 32
FILE_BYTES_MAX = 1 << 20
DRIVER = "/proc/driver/nvidia/version"
# Another engine's test: that takes seconds, or it fails after three waits of `self_test.WAIT_S`.
TURN_S, TURN_POLL_S = 600.0, 0.1

Run = Callable[[], Awaitable[str]]
Prove = Callable[[Run], Awaitable[str]]


class Result(Struct, frozen=True):
    """Of one kind of engine. `problem` is None while no attempt has ended."""

    about: dict[str, Any]
    attempts: int = 0
    problem: str | None = None
    seconds: float = 0.0


def is_needed() -> bool:
    return not current_platform.is_cpu()


def about(config: Any) -> dict[str, Any]:
    """On what the result depends, of an engine with this `VllmConfig`."""
    cache, scheduler = config.cache_config, config.scheduler_config
    ranks = range(config.parallel_config.world_size)
    return {
        "self_test": SELF_TEST,
        "devices": [_device(rank) for rank in ranks],
        "driver": _driver(),
        "vllm": versions.vllm_version(),
        "torch": versions.torch_version(),
        "runner": runners.in_use(config),
        "noise": "fp64" if getattr(config.model_config, "use_fp64_gumbel", False) else "fp32",
        "computation": config.compute_hash(),  # vLLM's own digest: model, kernels, graphs, ranks
        "async": bool(scheduler.async_scheduling),
        "block_tokens": cache.block_size,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }


def _device(rank: int) -> str:
    return (
        platform.machine() if current_platform.is_cpu() else current_platform.get_device_name(rank)
    )


def _driver() -> str:
    try:
        with open(DRIVER, encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return platform.release()


class Proof:
    """The result for one engine, in `directory`; `forced`: test whatever is filed."""

    def __init__(self, directory: str, about: dict[str, Any], *, forced: bool) -> None:
        self._path = os.path.join(directory, NAME)
        self._about, self._forced = about, forced
        text = json.dumps(about, sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]

    async def obtain(self, run: Run) -> str:
        """Why nothing is proved, or nothing. `run` is the self-test, which says the same.

        Raises:
            UnderstudyError: `run`'s; the attempt is filed.
        """
        try:
            fd = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return f"its self-test cannot be filed: {error}"
        with OwnedFd(fd):
            if not await _locked(fd):
                return f"another engine holds {self._path}.lock for {TURN_S:g} s: it tests itself"
            return await self._obtain(run)

    async def _obtain(self, run: Run) -> str:
        filed = self._read().get(self._key)
        attempts = filed.attempts if filed is not None else 0
        if filed is not None and not self._forced:
            if filed.problem is not None:
                logger.info(
                    "the self-test of %s is filed: %s", self._key, filed.problem or "passed"
                )
                return self._sentence(filed.problem)
            if attempts >= ATTEMPTS_MAX:
                return self._sentence(f"{attempts} engines ended in the middle of it")
        self._file(Result(self._about, attempts + 1))
        began = time.monotonic()
        problem = await run()
        seconds = round(time.monotonic() - began, 3)
        self._file(Result(self._about, attempts + 1, problem, seconds))
        logger.info("the self-test took %.1f s: %s", seconds, problem or "passed")
        return self._sentence(problem)

    def _sentence(self, problem: str) -> str:
        if not problem:
            return ""
        return (
            f"the self-test on this device failed: {problem}; to repeat it, remove {self._path} or"
            " start with --self-test"
        )

    def _read(self) -> dict[str, Result]:
        try:
            with open(self._path, "rb") as file:
                return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=dict[str, Result])
        except (OSError, msgspec.MsgspecError):
            return {}  # then it is tested again

    def _file(self, result: Result) -> None:
        results = {key: each for key, each in self._read().items() if key != self._key}
        results[self._key] = result  # the newest last
        kept = dict([*results.items()][-RESULTS_MAX:])
        try:
            write_atomic(self._path, msgspec.json.format(msgspec.json.encode(kept), indent=1))
        except OSError as error:  # the next engine tests itself again
            logger.warning("the result of the self-test is not filed: %s", error)


async def _locked(fd: int) -> bool:
    """Whether the lock was taken within `TURN_S`. It ends with the descriptor."""
    end = time.monotonic() + TURN_S
    while time.monotonic() < end:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            await asyncio.sleep(TURN_POLL_S)
    return False
