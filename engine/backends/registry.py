"""Backends by name: each is a command line, so that supervisors do not import their libraries."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from plumbing.errors import UsageError

HELP = frozenset({"-h", "--help"})
BACKENDS = ("reference", "vllm", "command")


def show_help(backend: str, arguments: Sequence[str]) -> None:
    """Print the backend's own help and exit, if the user asks for it."""
    if asks_for_help(backend, arguments):
        sys.exit(subprocess.run(command_line(backend, arguments), check=False).returncode)


def asks_for_help(backend: str, arguments: Sequence[str]) -> bool:
    """Whether the user asks for the backend's own help; not of a program of their own."""
    wants = any(each in HELP or each.startswith("--help=") for each in arguments)
    return backend != "command" and wants


def command_line(backend: str, arguments: Sequence[str]) -> list[str]:
    """What to execute for `backend` with the user's `arguments`.

    Any program with the channel's protocol: `engine run --backend command -- PROGRAM ARGS…`.

    Raises:
        UsageError: `engine.no_vllm`, `engine.no_command`, `engine.unknown_backend`.
    """
    match backend:
        case "reference":
            return [sys.executable, "-m", "engine.backends.reference.main", *arguments]
        case "vllm":
            if importlib.util.find_spec("vllm") is not None:  # looks for it without importing it
                return [sys.executable, "-m", "engine.backends.vllm.api.main", *arguments]
            raise UsageError(
                "engine.no_vllm",
                f"--backend vllm needs vLLM for {sys.executable}: run `pip install '.[vllm,cuda]'`"
                " in a copy of the repository, or see docs/vllm.md for a machine without a GPU",
            )
        case "command" if arguments and not arguments[0].startswith("-"):
            return list(arguments)
        case "command":
            raise UsageError("engine.no_command", "--backend command needs a program, after `--`")
    what = f"unknown backend {backend!r}; available: {', '.join(BACKENDS)}"
    raise UsageError("engine.unknown_backend", what)


def model_arguments(backend: str, model: str, ranks: int) -> tuple[str, ...]:
    """How `backend` is told what to serve, and over how many devices.

    One rank is every backend's default, also of those that do not know the flag. The user's own
    arguments say everything to another program.
    """
    if backend == "command":
        return ()
    if backend == "vllm":
        return (model, *(("--tensor-parallel-size", str(ranks)) if ranks > 1 else ()))
    return ("--model", model, *(("--tensor-parallel", str(ranks)) if ranks > 1 else ()))
