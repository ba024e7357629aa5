"""Every kind of request, cut after several numbers of tokens and resumed: is it the same answer?

    python -m tests.vllm.resume_matrix [--runner v1|v2] [--async] [--at-once N] [--beside N]
        [--only long|adapter] [--row NAME]… [--cuts N] [--json FILE] [-- vLLM's flags]

With vLLM's CPU build, a random model in float32, through vLLM's own HTTP layer and the backend's
gate, as a gateway would. Exit code 1: something resumed is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hack import v2_on_cpu
from plumbing.gateway_protocol import Journal
from tests.figures import commit, machine
from tests.vllm.resume_matrix.client import Answer, ask, journal_of, running_engine
from tests.vllm.resume_matrix.compare import difference
from tests.vllm.resume_matrix.engine import ASYNC_FLAG, BLOCK_TOKENS, LORA_FLAG
from tests.vllm.resume_matrix.rows import (
    COMPLETIONS,
    Row,
    adapter_rows,
    all_rows,
    first_row,
    long_rows,
    unseeded_row,
)

AT_ONCE, CUTS_MAX = 8, 9
ASKED_MAX = 20  # until an answer is not merged
LONG_TOKENS = 8000


def main() -> int:
    flags, began = _flags(), time.monotonic()
    rows, apart = _apart(flags)
    vllm = [*apart, *([ASYNC_FLAG] * flags.is_async), *flags.vllm]
    with (
        running_engine(vllm, v2_on_cpu.environment(flags.runner)) as engine,
        _beside(engine.path, flags.beside),
    ):
        found = try_rows(engine.path, rows, flags.row, flags.at_once, flags.cuts)
    out = sys.stderr if flags.json == "-" else sys.stdout
    for name, about in found.items():
        total, wrong = len(about["cuts"]), about["wrong"]
        line = f"{about['tokens']:4} tokens, {total - len(wrong)}/{total} resumed"
        print(f"{name:32} {'class none' if about['class'] == 'none' else line}", file=out)
        for cut, what in wrong.items():
            print(f"    behind {cut} tokens: {what}", file=out)
    resumed = sum(len(about["cuts"]) for about in found.values())
    wrongs = sum(len(about["wrong"]) for about in found.values())
    report = {
        "commit": commit(),
        "machine": machine(),
        "only": flags.only,
        "runner": v2_on_cpu.name_of(flags.runner),
        "async": flags.is_async,
        "at_once": flags.at_once,
        "beside": flags.beside,
        "vllm_flags": flags.vllm,
        "seconds": round(time.monotonic() - began, 1),
        "passed": bool(found) and not wrongs,
        "resumed": resumed,
        "resumed_right": resumed - wrongs,
    }
    print(report, file=out)
    text = json.dumps({**report, "rows": found}, indent=1, ensure_ascii=False) + "\n"
    if flags.json == "-":
        print(text, end="")
    elif flags.json:
        Path(flags.json).write_text(text, encoding="utf-8")
    return 0 if report["passed"] else 1


def _apart(flags: argparse.Namespace) -> tuple[dict[str, Row], tuple[str, ...]]:
    """The rows that have engines of their own, and what vLLM must be told for them."""
    if flags.only == "long":
        tokens = flags.long_tokens
        return long_rows(tokens), (
            f"--max-model-len={tokens + 1000}",
            "--max-num-batched-tokens=512",
            f"--kv-cache-memory-bytes={(64 << 20) + (tokens << 12)}",
        )
    return (adapter_rows(), (LORA_FLAG,)) if flags.only else ({}, ())


@contextlib.contextmanager
def _beside(path: str, streams: int) -> Iterator[None]:
    """Run this number of unseeded streams meanwhile; their answers are not compared."""
    row, ending = unseeded_row(), threading.Event()

    def run() -> None:
        while not ending.is_set():
            ask(path, row.url, row.body)

    threads = [threading.Thread(target=run) for _ in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join()


def cuts(row: Row, total: int, most: int) -> list[int]:
    """Behind none, one, two, half, all but one and all of the tokens, and where exactly one token
    is left to compute behind whole blocks, which vLLM runs as if it were made, not read. `most`:
    so many of these, the last ones first."""
    half, prompt = total // 2, row.body.get("prompt")
    wanted = [0, 2, 1, total, total - 1, half]
    if isinstance(prompt, list):
        wanted.append((1 - len(prompt)) % BLOCK_TOKENS)
    possible = [cut for cut in dict.fromkeys(wanted[::-1]) if 0 <= cut <= total]
    return sorted(possible[:most])


def _ask(path: str, row: Row, journal: Journal | None = None) -> Answer:
    """An answer that can be compared. vLLM merges outputs if its client is late, and its parsers of
    reasoning put another text beside the end of a thought that is merged with other tokens: so even
    two uninterrupted answers may differ. A replay repeats what was merged; here nothing is."""
    found = ask(path, row.url, row.body, journal)
    for _ in range(ASKED_MAX):
        if row.url == COMPLETIONS or set(found.chunks) <= {1}:
            break
        found = ask(path, row.url, row.body, journal)
    return found


def try_rows(
    path: str,
    rows: Mapping[str, Row] = {},
    names: Collection[str] | None = None,
    at_once: int = AT_ONCE,
    cuts_max: int = CUTS_MAX,
) -> dict[str, Any]:
    """Each row's answer, and what is wrong with each that was resumed. `rows`: by default all that
    need no engine of their own. `names`: only these."""
    if not rows:
        first = ask(path, *first_row()[:2])
        text = "".join(event["choices"][0]["text"] for event in first.events if event["choices"])
        rows = all_rows(first.tokens, text)
    wanted = {name: row for name, row in rows.items() if not names or name in names}
    found: dict[str, Any] = {}
    jobs = []
    with ThreadPoolExecutor(at_once) as pool:
        firsts = {name: pool.submit(_ask, path, row) for name, row in wanted.items()}
        for name, row in wanted.items():
            first = firsts[name].result()
            about = found[name] = {"tokens": len(first.tokens), "class": first.continuation}
            about["cuts"], about["wrong"] = [], {}
            if not row.is_resumed:
                if first.continuation != "none":
                    about["wrong"]["0"] = f"its class is {first.continuation}"
                continue
            if first.continuation not in ("state", "exact") or not first.is_whole:
                about["wrong"]["0"] = f"it has no end: {first.status} {first.body[-300:]!r}"
                continue
            about["cuts"] = cuts(row, len(first.tokens), cuts_max)
            for cut in about["cuts"]:
                resumed = pool.submit(_ask, path, row, journal_of(first, cut))
                jobs.append((about["wrong"], first, cut, resumed))
    for wrong, first, cut, resumed in jobs:
        if what := difference(first, resumed.result(), cut):
            wrong[str(cut)] = what
    return found


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.resume_matrix", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the report; -: to the output")
    parser.add_argument(
        "--runner",
        choices=v2_on_cpu.RUNNERS,
        help="vLLM's model runner [default: what vLLM chooses on a GPU]",
    )
    parser.add_argument(
        "--async", action="store_true", dest="is_async", help="let steps overlap, as on GPUs"
    )
    parser.add_argument(
        "--at-once", type=int, default=AT_ONCE, help="how many streams [default: %(default)s]"
    )
    parser.add_argument(
        "--beside", type=int, default=0, help="how many unseeded streams run all the while"
    )
    parser.add_argument(
        "--only", choices=("long", "adapter"), help="long prompts, or requests with a LoRA adapter"
    )
    parser.add_argument(
        "--long-tokens", type=int, default=LONG_TOKENS, help="[default: %(default)s]"
    )
    parser.add_argument("--row", action="append", metavar="NAME", help="only this kind; repeatable")
    parser.add_argument(
        "--cuts", type=int, default=CUTS_MAX, help="at most, per kind [default: all]"
    )
    parser.add_argument("vllm", nargs="*", metavar="FLAG", help="for vLLM")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
