"""`make test-vllm-full`: on both of vLLM's model runners, what is tried of resumed requests and of
adopted blocks, and takes too long for every change.

    python -m tests.vllm.full [--json FILE] [--run NAME]...

Exit code 1: one of the runs did not pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.vllm.about import ROOT, commit, machine

MATRIX = ("tests.vllm.resume_matrix", "--at-once=40")
KILLS = ("tests.vllm.kv_kills", "--backend=vllm", "--kills=36")
RUNS: dict[str, tuple[str, ...]] = {
    f"{runner} {name}": (command[0], f"--runner={runner}", *command[1:])
    for runner in ("v2", "v1")
    for name, command in {
        "sync": MATRIX,
        "async": (*MATRIX, "--async"),
        "two ranks": (*MATRIX, "--async", "--", "--tensor-parallel-size=2"),
        "8 at once": ("tests.vllm.resume_matrix", "--async"),
        "adapter": (*MATRIX, "--async", "--only=adapter"),
        "long": (*MATRIX, "--async", "--only=long"),
        "kills": KILLS,
    }.items()
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.full", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the report")
    parser.add_argument("--run", action="append", choices=RUNS, help="only this; repeatable")
    flags = parser.parse_args()
    found = {name: _run(*RUNS[name]) for name in flags.run or RUNS}
    if flags.json:
        report = {"commit": commit(), "machine": machine(), "runs": found}
        Path(flags.json).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for name, about in found.items():
        print(f"{name:16} {'passed' if about['passed'] else 'FAILED'}")
    return 0 if all(about["passed"] for about in found.values()) else 1


def _run(module: str, *given: str) -> dict[str, Any]:
    """The report of one run, without the parts that all have."""
    split = given.index("--") if "--" in given else len(given)
    with tempfile.TemporaryFile() as out:
        to_output = "--json" if "kv_kills" in module else "--json=-"
        command = [sys.executable, "-m", module, *given[:split], to_output, *given[split:]]
        print(" ".join(command[1:]), file=sys.stderr, flush=True)
        code = subprocess.run(command, cwd=ROOT, stdout=out, check=False).returncode
        out.seek(0)
        text = out.read().decode()
    try:
        report: dict[str, Any] = json.loads(text)
    except ValueError:
        return {"passed": False, "problem": f"no report: exit {code}"}
    for part in ("commit", "machine", "schema", "json"):
        report.pop(part, None)
    return report


if __name__ == "__main__":
    sys.exit(main())
