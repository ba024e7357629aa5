"""The backend's main process: vLLM's API server, embedded.

    python -m engine.backends.vllm.api.main MODEL [vLLM's own flags]

Started by `engine run --backend vllm -- …`. Owns the start: witness first, then vLLM, whose
processes join through the plugin. It runs until the supervisor kills it or it reports a failure.

Surprising: every process that multiprocessing spawns from here imports this module again, under
another name. So its top level imports nothing slow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from engine.backends import process
from engine.backends.process import BackendProcess
from engine.backends.registry import asks_for_help
from engine.backends.vllm import process_tuning
from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.log import configure
from plumbing.service.process import raise_fd_limit
from plumbing.service.signals import blocked_in_children

if TYPE_CHECKING:
    import socket

    from engine.backends.vllm.api.arguments import ServeArguments
    from engine.backends.vllm.api.features import Features

logger = logging.getLogger(__name__)

NAME = "api"
DIRECTORY_ENV = "UNDERSTUDY_DIR"  # the pod's

# For all of vLLM's processes. Spawned, because a forked engine core would keep our sockets open. A
# reader may wait for another engine's load, and vLLM's default timeout is ten minutes. And tensors
# of up to 32 MiB stay in glibc's heap after they are freed unless they are mapped, so the writer of
# weights would need twice the memory (mallopt(3), M_MMAP_THRESHOLD).
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ENGINE_READY_TIMEOUT_S": str(2 * 3600),
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


def main() -> int:
    if asks_for_help("vllm", sys.argv[1:]):
        from engine.backends.vllm.api import arguments

        sys.stdout.write(arguments.help_text(sys.argv[1:]))
        return 0
    configure("backend-api")
    try:
        sock = process.take_channel()
        member = process.enter(NAME)
    except UnderstudyError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    try:
        # Python 3.11 to 3.13 unblocks SIGTERM and SIGINT in the thread that starts this helper, and
        # vLLM's processes would inherit that.
        with blocked_in_children():
            resource_tracker.ensure_running()
        os.environ.update(ENVIRONMENT)
        keep_compiled()
        process_tuning.tune()
        raise_fd_limit()
        import uvloop

        from engine.backends.vllm.api import arguments

        parsed = arguments.parse(sys.argv[1:])
        _fit_cpu(parsed.vllm.tensor_parallel_size)
    except Exception as error:
        member.end(error)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(parsed, sock, member))
    raise AssertionError("the backend returned while the process lives")


async def _run(parsed: ServeArguments, sock: socket.socket, member: BackendProcess) -> None:
    from engine.backends.channel import Channel

    channel, args = Channel(sock), parsed.vllm
    # Named after the engine, not the incarnation: the next one replaces a killed one's socket.
    trial = f"trial_{os.environ[process.ENGINE_ID_ENV]}.sock"
    try:
        from engine.backends.vllm.api.backend import StepCounter, VllmBackend
        from engine.backends.vllm.api.continuation import continuing
        from engine.backends.vllm.api.http import Front, bind

        steps = StepCounter(member.counts)
        listener = bind(args, os.path.join(os.environ[DIRECTORY_ENV], trial))
        engine, features = make_engine(parsed, steps)
        front = await Front.start(engine, args, listener, parsed.body_bytes_max)
        find = partial(continuing, engine, args)
        backend = VllmBackend(engine, front, features, parsed.kv, member.seat, find)
        prepared = await backend.prepare()
        for warning in prepared.warnings:
            logger.warning("%s", warning)
        channel.prepared(backend, prepared)
        await backend.watch(member.end)
    except Exception as error:
        member.end(error)


def make_engine(parsed: ServeArguments, steps: Any) -> tuple[Any, Features]:
    """Start the engine core and its workers; blocks until they have their weights.

    Raises:
        UsageError: `vllm.configuration`, `vllm.no_kv_size`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    from engine.backends.vllm import contracts, kv_size
    from engine.backends.vllm.api import features

    args, usage = parsed.vllm, UsageContext.OPENAI_API_SERVER
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        config = engine_args.create_engine_config(usage_context=usage)
    except ValueError as error:  # also pydantic's
        raise UsageError(
            "vllm.configuration", f"vLLM refuses its configuration: {error}"
        ) from error
    if args.kv_cache_memory_bytes is None:
        raise kv_size.refusal(config)
    can = features.Features.find(
        config,
        contracts.installed(),
        resume=parsed.no_resume,
        sleep=parsed.no_sleep,
        keep_kv="" if parsed.kv.is_shared else "its KV memory is private",
    )
    engine = can.install(config).from_vllm_config(
        config,
        usage_context=usage,
        stat_loggers=[steps.factory],
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
    )
    engine.progressed = steps.record
    is_unproven = not current_platform.is_cpu() and any(map(can.has, features.PROVEN))
    can.is_tested = parsed.self_test or is_unproven
    can.warnings = tuple(kv_size.warnings(config))
    return engine, can


def keep_compiled() -> None:
    """What torch compiles is a cache, and our TMPDIR is removed with this engine."""
    place = os.path.join(os.path.dirname(tempfile.gettempdir()), f"torchinductor_{os.geteuid()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", place)


def _fit_cpu(ranks: int) -> None:
    """On the CPU vLLM binds each rank to its own memory node, and fails if there are too few; then
    each rank gets its share of the cores, unless the user has configured that."""
    from vllm.platforms import current_platform

    nodes = len([name for name in os.listdir("/sys/devices/system/node") if name[4:].isdigit()])
    if current_platform.is_cpu() and ranks > max(1, nodes):
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "__mp_main__":  # the engine core, or a worker
    process_tuning.tune()
