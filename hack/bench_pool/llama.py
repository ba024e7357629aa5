"""llama.cpp's router: `llama-server` with a directory of models, of which one may be loaded.

It is built from a source package by whoever runs this (docs/pool.md says how), and told with
`--llama-server PATH`. Its models are those of the reference backend.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hack.bench_pool import streaming, switching, waiting
from hack.bench_pool.gguf_model import write_gguf
from hack.bench_pool.plan import Plan
from hack.bench_pool.programs import Figures, Program
from plumbing.errors import UnderstudyError, UsageError
from understudy.drill.clients import Target
from understudy.host import output_of
from understudy.kubelet.containers import Container, Restart, quick_startup
from understudy.kubelet.runner import PodRunner
from understudy.up.ports import free_ports

MODELS = ("m0", "m1")
START_S = 60.0
VERSION_S = 20.0


async def run(
    server: str | None, base: Path, plan: Plan, only: Sequence[str], say: Callable[[str], None]
) -> Figures:
    """
    Raises:
        UsageError: `bench.no_llama_server`.
    """
    if server is None or not os.access(server, os.X_OK):
        where = "no --llama-server was given" if server is None else f"{server} cannot be run"
        text = f"{where}; docs/pool.md says how it is built from a source package"
        raise UsageError("bench.no_llama_server", text)
    (base / "models").mkdir(parents=True)
    for number, name in enumerate(MODELS):
        await asyncio.to_thread(write_gguf, base / "models" / f"{name}.gguf", number)
    _, told, errors = await output_of(server, "--version", timeout_s=VERSION_S)
    version = (told + errors).strip().splitlines()[:1]
    found: Figures = {"version": version, "scenarios": {}}
    for name in ("S1", "S3", "S5", "S6"):
        if name not in only:
            continue
        say(f"llama.cpp, {name} …")
        try:
            found["scenarios"][name] = await _scenario(server, base, plan, name)
        except UnderstudyError as error:
            found["scenarios"][name] = {"ended_early": str(error)[:500]}
    return found


async def _scenario(server: str, base: Path, plan: Plan, name: str) -> Figures:
    (port,) = free_ports(1)
    command = (
        *(server, "--models-dir", str(base / "models"), "--models-max", "1", "--host", "127.0.0.1"),
        *("--port", str(port), "--ctx-size", str(4 * 2048), "--parallel", "4"),
    )
    startup = quick_startup(f"http://127.0.0.1:{port}/health", START_S)
    container = Container("llama", command, {}, startup, restart=Restart.NEVER)
    runner = PodRunner([container], base / f"log-{name}")
    program = Program("llama.cpp", Target("127.0.0.1", port), MODELS)
    try:
        await runner.start()
        await program.learn([*program.short.values(), *program.mixed[MODELS[0]]])
        match name:
            case "S1":
                return await switching.in_turn(program, MODELS, plan.s1_switches, plan.pause_s)
            case "S3":
                return await waiting.beside_saturated(program, plan)
            case "S5":
                return await streaming.contending(program, plan)
            case _:
                return await waiting.leavers(program, plan)
    finally:
        await runner.stop()
