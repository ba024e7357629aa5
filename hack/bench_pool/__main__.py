"""What switching between models costs, and who waits how long for it.

    python -m hack.bench_pool [--json] [--quick] [--backend reference|vllm] [--only S1,S3]
        [--peers llama.cpp,stock-vllm] [--llama-server PATH]

Seven scenarios, each on a pod of `understudy up --pool` that is started for it: S1 two models in
turn, S2 many in turn, S3 one request beside a saturated model, S4 few popular models and many that
are not, S5 switches through streams that last far longer than a turn, S6 clients who leave while
they wait, S7 every process killed in every phase of a switch. Then what the pool itself costs.
Every answer is compared with the one that was given alone. Exits 1 if one was lost, refused, cut or
wrong, or if a wait was longer than its bound. Other programs (--peers) run S1, S3 and S6 where they
can. Compare figures of one run, and between programs only those that are less one direct first
token. With vLLM, run it with the Python of .venv-vllm. The goals hold for an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from hack.bench_pool import report
from hack.bench_pool.ours import Ours
from hack.bench_pool.peers import PEERS, PeerRun, run_peers
from hack.bench_pool.plan import PARTS, SCENARIOS, Plan, plan_of
from hack.bench_pool.pods import BACKENDS, Interrupted
from hack.kept_logs import run_below
from plumbing.errors import UsageError
from plumbing.service.cli import fail
from plumbing.service.signals import SignalInbox


async def everything(
    plan: Plan, only: tuple[str, ...], peers: tuple[str, ...], llama_server: str | None, base: Path
) -> dict[str, Any]:
    """All figures; a signal ends it early, with those that there are."""
    inbox, found = SignalInbox(), dict[str, Any]()
    ours = Ours(plan, base, inbox, _say)
    try:
        for name in only:
            await ours.run(name)
        found = await run_peers(peers, PeerRun(plan, only, base, llama_server, _say))
    except Interrupted:
        ours.problems.append("interrupted by a signal; what is missing was not measured")
    finally:
        inbox.close()
    return report.document(plan, ours.found, ours.problems, found)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _names(text: str, known: tuple[str, ...], flag: str) -> tuple[str, ...]:
    named = tuple(each for each in text.split(",") if each)
    for each in named:
        if each not in known:
            raise UsageError("bench.unknown", f"{flag} {each}: known are {', '.join(known)}")
    return named


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hack.bench_pool",
        description="what switching between models costs, and who waits how long for it",
        epilog="With the reference backend it takes 40 minutes on two idle cores, --quick three.",
    )
    everything_ours = (*SCENARIOS, *PARTS)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="reference")
    parser.add_argument(
        "--only", default=",".join(everything_ours), help="scenarios [default: %(default)s]"
    )
    parser.add_argument("--peers", default="", help=f"others to run: {', '.join(PEERS)}")
    parser.add_argument("--llama-server", metavar="PATH", help="the program of llama.cpp")
    parser.add_argument("--quick", action="store_true", help="fewer models, switches and kills")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    try:
        only = _names(flags.only, everything_ours, "--only")
        peers = _names(flags.peers, PEERS, "--peers")
    except UsageError as error:
        fail(error)
    plan = plan_of(flags.backend, is_quick=flags.quick)
    found = run_below("bench-pool-", partial(everything, plan, only, peers, flags.llama_server))
    print(json.dumps(found, indent=1) if flags.json else "\n".join(report.lines(found)))
    for problem in found["problems"]:
        _say(f"problem: {problem}")
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
