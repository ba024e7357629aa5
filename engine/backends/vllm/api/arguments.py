"""The command line after `--backend vllm --`: vLLM's own, less what the runtime must own.

Owns which flags are refused and why, which are set instead, and our own flags. Everything else is
passed to vLLM unchanged.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.backends.vllm import LOAD_FORMAT, PLUGIN, PRIVATE, REFUSE, versions
from engine.backends.vllm.api.kept_memory import GMS, OWN, KeptMemory
from engine.messages import RANKS_MAX
from gms.client import look_for_mps
from plumbing.errors import UsageError
from plumbing.service.config import size_bytes

PROG = "engine run --backend vllm --"

_SOCKET = "requests arrive through the lock server's socket: `lockserver serve --service active=…`"
_ONE = "one engine is one process of each kind, and the pod's other engines are its replicas"
_READ_ONLY = "weights are shared and read-only, so nothing may change them while they serve"
_CONNECTOR = "a connector's memory does not belong to the pod yet, and would delay the fence"
_KV = "--kv-cache-memory-bytes sets the size of the KV cache, on every engine of the pod"

# vLLM's flags that the runtime owns: one that differs from its default is refused for this reason.
OWNED: Mapping[str, str] = {
    "host": _SOCKET,
    "port": _SOCKET,
    "uds": _SOCKET,
    "headless": _ONE,
    "grpc": "a takeover needs an HTTP server",
    "api_server_count": _ONE,
    "data_parallel_size": _ONE,
    "data_parallel_size_local": _ONE,
    "data_parallel_rank": _ONE,
    "data_parallel_start_rank": _ONE,
    "data_parallel_external_lb": _ONE,
    "data_parallel_hybrid_lb": _ONE,
    "data_parallel_multi_port_external_lb": _ONE,
    "pipeline_parallel_size": "pipeline stages are not supported yet; use --tensor-parallel-size",
    "prefill_context_parallel_size": "it is not supported yet",
    "nnodes": "an engine is in one pod; more nodes are not supported",
    "node_rank": "an engine is in one pod; more nodes are not supported",
    "enable_sleep_mode": "the runtime parks the engine itself, without memory pools",
    "worker_cls": "the worker is ours: it takes weights and KV memory from the pod",
    "distributed_executor_backend": "every rank needs a process of its own, so it is `mp`",
    "gpu_memory_utilization": _KV,
    "num_gpu_blocks_override": _KV,
    "disable_log_stats": "hangs are detected from the engine's steps, which vLLM's stats count",
    "enable_fault_tolerance": "another engine takes over; an engine that continued without a rank "
    "would hold the lock and not serve",
    "enable_eplb": _READ_ONLY,
    "enable_elastic_ep": _READ_ONLY,
    "weight_transfer_config": _READ_ONLY,
    "kv_transfer_config": _CONNECTOR,
    "ec_transfer_config": _CONNECTOR,
}
# vLLM's environment variables that the runtime owns.
OWNED_VARIABLES: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "it overrides the size of the KV cache: pass"
    " --kv-cache-memory-bytes to every engine of the pod",
    "VLLM_SERVER_DEV_MODE": "its endpoints park and change an engine without the runtime knowing",
}
AUTO = "auto"
PLUGINS_ENV = "VLLM_PLUGINS"  # an allow-list of entry points, ours among them

SWITCH: Mapping[str, Any] = {"action": "store_true"}
# Our own flags: what each is for, and how it is parsed.
OURS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "--unshareable": (
        "what to do if the model's quantisation cannot be shared: "
        f"`{REFUSE}` to start (the default), or load a `{PRIVATE}` copy into every engine",
        {"choices": (REFUSE, PRIVATE), "default": REFUSE},
    ),
    "--body-bytes-max": (
        "the largest request body, such as 64MiB; the gateway refuses larger ones with 413,"
        " because parsing one blocks all others (the default depends on the model's length)",
        {"type": size_bytes},
    ),
    "--no-resume": (
        "end streams with their engine, instead of letting the next one continue them",
        SWITCH,
    ),
    "--no-sleep": ("never sleep; hand over by a relaunch", SWITCH),
    "--self-test": (
        "test resuming, KV blocks and a wake while the engine prepares, also on the CPU (default:"
        " on GPUs)",
        SWITCH,
    ),
    "--kv-memory": (
        f"where the KV cache lives: `{GMS}` (survives the engine; the next one reuses"
        f" its blocks), `{OWN}` (ends with the engine), or `{AUTO}` (default): `{OWN}` on GPUs,"
        f" until the fence was measured on one, and `{GMS}` on host memory",
        {"choices": (AUTO, GMS, OWN), "default": AUTO},
    ),
    "--no-kv-adoption": (
        "start with an empty cache, ignoring KV blocks of earlier engines",
        SWITCH,
    ),
    versions.OVERRIDE_FLAG: (
        f"run a vLLM outside {versions.supported_range()}, which is untested",
        SWITCH,
    ),
}


@dataclass(frozen=True, slots=True)
class ServeArguments:
    """`vllm` is vLLM's own namespace, complete; the rest are our own flags."""

    vllm: argparse.Namespace
    body_bytes_max: int | None
    no_resume: str  # why streams end with this engine
    no_sleep: str
    self_test: bool
    kv: KeptMemory


def help_text(argv: Sequence[str] = ()) -> str:
    """vLLM's own summary, and our flags in full. SystemExit if `argv` asks for a section of vLLM's
    help (`--help=ModelConfig`), which vLLM prints itself."""
    parser = _parser()
    if any(each.startswith("--help=") for each in argv):
        parser.parse_args(list(argv))
    flags = "\n".join(f"  {flag}: {text}" for flag, (text, _) in OURS.items())
    return f"{parser.format_help()}\nflags of understudy:\n{flags}\n"


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServeArguments:
    """Read the command line, refuse the flags that the runtime owns, and set them.

    Raises:
        UsageError: `vllm.arguments`, `vllm.owned_flag`, `vllm.unsupported_version`,
            `vllm.unsupported_platform`, `vllm.mps`.
    """
    versions.check_version(allow_any=versions.OVERRIDE_FLAG in argv)  # before its parser is asked
    parser = _parser()
    try:
        args = parser.parse_args(list(argv))
    except SystemExit as error:  # `--version` and the like print something and exit
        raise UsageError(
            "vllm.arguments",
            "these arguments only print something and start no engine; leave them out, or pass"
            " them to `vllm serve`",
        ) from error
    if args.model_tag is not None:
        args.model = args.model_tag
    _refuse(parser, args, environ)
    names = (flag.lstrip("-").replace("-", "_") for flag in OURS)
    ours = argparse.Namespace(**{name: vars(args).pop(name) for name in names})
    args.api_server_count = None
    try:
        versions.cli_args().validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise UsageError("vllm.arguments", f"vLLM refuses its arguments: {error}") from error
    return ServeArguments(
        args,
        ours.body_bytes_max,
        no_resume="it was started with --no-resume" if ours.no_resume else "",
        no_sleep="it was started with --no-sleep" if ours.no_sleep else "",
        self_test=ours.self_test,
        kv=_own(args, ours, environ),
    )


def _refuse(
    parser: argparse.ArgumentParser, args: argparse.Namespace, environ: Mapping[str, str]
) -> None:
    for name, why in OWNED.items():
        if getattr(args, name, None) != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                "vllm.owned_flag", f"{flag} is not allowed here: {why}; leave it out", flag=flag
            )
    for variable, why in OWNED_VARIABLES.items():
        if environ.get(variable, "0") not in ("", "0"):
            raise UsageError(
                "vllm.owned_flag", f"{variable} is set, and {why}; unset it", flag=variable
            )
    allowed = environ.get(PLUGINS_ENV)
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise UsageError(
            "vllm.owned_flag",
            f"{PLUGINS_ENV}={allowed} keeps vLLM from loading the plugin with which its processes"
            f" join the pod; add {PLUGIN} to it, or unset it",
            flag=PLUGINS_ENV,
        )
    if args.tensor_parallel_size > RANKS_MAX:
        raise UsageError(
            "vllm.owned_flag",
            f"--tensor-parallel-size {args.tensor_parallel_size} exceeds the limit of {RANKS_MAX}"
            " ranks per engine",
        )


def _own(
    args: argparse.Namespace, ours: argparse.Namespace, environ: Mapping[str, str]
) -> KeptMemory:
    """Set what the runtime owns; returns where the KV cache lives. By default that is private on
    GPUs: whether a write of a killed process can follow the fence there is measured by `make
    device-check`, which has not been done yet. On the host the kernel excludes it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        worker = "worker_cpu.CPUWorker"
    elif current_platform.is_cuda():
        worker = "worker_gpu.GPUWorker"
        # It sizes nothing, since the KV cache's size is given. But vLLM refuses to start unless
        # this part of the device is free, and beside a serving engine little is.
        args.gpu_memory_utilization = 0.01
        mps = look_for_mps(environ) if ours.kv_memory == GMS else None
        if mps is not None:
            raise UsageError(
                "vllm.mps",
                f"--kv-memory {GMS} is not safe under the Multi-Process Service ({mps}): a kernel"
                " of a killed engine may still write into memory that the next engine reads; run"
                f" the pod without MPS, or with --kv-memory {OWN}",
                flag="--kv-memory",
            )
    else:
        raise UsageError(
            "vllm.unsupported_platform",
            f"this vLLM is built for {current_platform.device_name}, but weights can be shared only"
            " on CUDA devices and, for tests, on the CPU",
        )
    args.model_loader_extra_config = {
        "load_format": args.load_format,
        "extra": args.model_loader_extra_config or {},
        "unshareable": ours.unshareable,
    }
    args.load_format = LOAD_FORMAT
    args.worker_cls = f"engine.backends.vllm.worker.{worker}"
    args.distributed_executor_backend = "mp"
    chosen = ours.kv_memory
    is_shared = current_platform.is_cpu() if chosen == AUTO else chosen == GMS
    return KeptMemory(is_shared=is_shared, may_adopt=not ours.no_kv_adoption)


def _parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError("vllm.arguments", f"vLLM refuses its arguments: {message}")

    parser = versions.cli_args().make_arg_parser(Parser(prog=PROG))
    ours = parser.add_argument_group("understudy", "Flags that the runtime adds to vLLM's own.")
    for flag, (text, how) in OURS.items():
        ours.add_argument(flag, help=text, **how)
    return parser
