"""What a client sees of a fleet on a bad network, and in a rollout. As root:

    python -m tests.e2e.fleet_figures (--cut-offs N | --busy-s SECONDS | --rollout-s SECONDS)

Each pod is in a network namespace of its own, and the front outside of them (`NetworkFleet`). Every
answer is compared with one that was not disturbed. One JSON document:

    cut_offs   one pod of two is cut off, in turns. pause_ms: the longest gap then in the text of
               each of its streams
    busy       two pods, 1 % of all packets lost and two busy loops per CPU. longest_gap_ms: of each
               answer; silent: how often the front has called a pod so
    rollout    each of three pods leaves and is replaced, under 64 streams that last so long.
               gap_ms: the longest of each stream meanwhile; gap_before_ms: in as long a time before
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.test_fleet_network import FAST, PROMPTS, NetworkFleet, made_namespaces, why_not
from tests.figures import Figures, document, report
from understudy.drill.clients import clock, send
from understudy.drill.outcomes import classify, spread
from understudy.drill.records import Exchange, Outcome, Prompt
from understudy.host import output_of
from understudy.pod.table import program
from understudy.status.gather import part_of, status_of

STREAMS, TOKENS = 64, 2000  # of a rollout; the model's context holds them
SEEN_MS = 3000.0  # after a pod is cut off
CLIENTS, LOSS, LOOPS_PER_CPU = 4, 0.01, 2  # of a busy fleet
LEAVE_WITHIN_S = 90.0
SPIN = (sys.executable, "-c", "while True: pass")


def gaps_ms(answer: Exchange, begin_ms: float, end_ms: float) -> list[float]:
    """Between two texts, of which the second came after `begin_ms`, and the first before the
    end."""
    times = answer.text_ms
    return [b - a for a, b in itertools.pairwise(times) if b > begin_ms and a < end_ms]


def outcomes(answers: Sequence[Exchange], fleet: NetworkFleet) -> dict[str, int]:
    return Counter(str(classify(each, fleet.expected)) for each in answers)


async def cut_offs(base: Path, count: int) -> Figures:
    pauses_ms: list[float] = []
    with made_namespaces(2) as namespaces:
        fleet = NetworkFleet(base, namespaces, *FAST)
        try:
            await fleet.start()
            for number in range(count):
                async with fleet.streams() as running:
                    victim = namespaces[number % 2]
                    cut_ms = clock.now_ms()
                    victim.drop()
                    there = f"pod-{victim.number}"
                    await fleet.until(lambda pods, it=there: pods[it]["streams"] == 0, "moved")
                victim.heal()
                answers = [task.result() for task in running]
                pauses_ms += [
                    max(gaps_ms(each, cut_ms, cut_ms + SEEN_MS))
                    for each in answers
                    if each.pod == there and each.text_ms[-1] > cut_ms
                ]
                await fleet.all_ready()
        finally:
            await fleet.runner.stop()
    return {"count": count, "paused": len(pauses_ms), "pause_ms": spread(pauses_ms)}


async def busy(base: Path, for_s: float) -> Figures:
    answers: list[Exchange] = []
    with made_namespaces(2) as namespaces:
        fleet = NetworkFleet(base, namespaces, *FAST)
        loops: list[asyncio.subprocess.Process] = []
        try:
            await fleet.start()
            for each in namespaces:
                for chain, side in (("INPUT", "-i"), ("OUTPUT", "-o")):
                    lost = ("-m", "statistic", "--mode", "random", f"--probability={LOSS}")
                    each("iptables", "-A", chain, side, f"{each.name}i", *lost, "-j", "DROP")
            count = LOOPS_PER_CPU * (os.cpu_count() or 1)
            loops = [await asyncio.create_subprocess_exec(*SPIN) for _ in range(count)]
            end_s = time.monotonic() + for_s

            async def client(number: int) -> None:
                while time.monotonic() < end_s:
                    answers.append(await send(fleet.target, PROMPTS[number % len(PROMPTS)]))
                    number += CLIENTS

            await asyncio.gather(*map(client, range(CLIENTS)))
            front = await status_of(part_of(fleet.directory, "gateway"))
            load = os.getloadavg()[0]
        finally:
            for process in loops:
                process.kill()
                await process.wait()
            await fleet.runner.stop()
    return {
        "for_s": for_s,
        "load_1min": load,
        "answers": outcomes(answers, fleet),
        "longest_gap_ms": spread([max(gaps_ms(each, 0, 1e18), default=0) for each in answers]),
        "losses": front["losses"],
        "silent": (fleet.log / "front.log").read_text().count("→ silent"),
    }


async def rollout(base: Path, for_s: float) -> Figures:
    body = {**PROMPTS[0].body, "max_tokens": TOKENS}
    prompts = [
        Prompt(str(number), "/v1/completions", {**body, "prompt": f"Scene {number}:"})
        for number in range(STREAMS)
    ]
    pace = f"--token-interval-ms={1000 * for_s / TOKENS:g}"
    windows: list[tuple[float, float]] = []  # in which a pod leaves
    with made_namespaces(3) as namespaces:
        alone = NetworkFleet(base / "alone", namespaces[:1], "--slots=16")
        fleet = NetworkFleet(base / "fleet", namespaces, pace, f"--slots={STREAMS}")
        try:
            await alone.start(prompts)
            await alone.runner.stop()
            await fleet.start(())
            fleet.expected = alone.expected
            running = [asyncio.create_task(send(fleet.target, each)) for each in prompts]
            for number, pod in enumerate(fleet.namespaces):
                await asyncio.sleep(for_s * (0.2 if number == 0 else 0.1))
                begin_ms = clock.now_ms()
                leave = (*program("gateway"), "leave", f"--within={LEAVE_WITHIN_S:g}s")
                code, _, said = await output_of(*leave, f"--dir={base / 'fleet' / pod}")
                assert code == 0, said
                windows.append((begin_ms, clock.now_ms()))
                await fleet.runner.restart(pod)
                await fleet.all_ready()
            answers = await asyncio.gather(*running)
            front = await status_of(part_of(fleet.directory, "gateway"))
        finally:
            await alone.runner.stop()
            await fleet.runner.stop()
    meanwhile = [max(gaps_ms(a, *each), default=0.0) for a in answers for each in windows]
    before = [
        max(gaps_ms(a, begin - (end - begin), begin), default=0.0)
        for a in answers
        for begin, end in windows
    ]
    return {
        "streams": STREAMS,
        "pods": len(windows),
        "interval_ms": 1000 * for_s / TOKENS,
        "lasted_s": round((max(each.ended_ms for each in answers) - answers[0].sent_ms) / 1000),
        "answers": outcomes(answers, fleet),
        "moves": front["moves"],
        "losses": front["losses"],
        "leave_ms": [round(end - begin) for begin, end in windows],
        "gap_ms": spread(meanwhile),
        "gap_before_ms": spread(before),
    }


async def measured(name: str, size: Any, base: Path) -> Figures:
    figures = await {"cut_offs": cut_offs, "busy": busy, "rollout": rollout}[name](base, size)
    problems = [each for each in figures.get("answers", ()) if each != Outcome.OK]
    return document({name: figures}, problems)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fleet_figures")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--cut-offs", type=int, dest="cut_offs")
    group.add_argument("--busy-s", type=float, dest="busy")
    group.add_argument("--rollout-s", type=float, dest="rollout")
    ((name, size),) = ((name, it) for name, it in vars(parser.parse_args()).items() if it)
    if why := why_not():
        sys.exit(why)
    report(partial(measured, name, size))
