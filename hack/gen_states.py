"""Write docs/states.md from the transition tables; `--check` fails if the page is stale.

The program enforces these tables, so the page cannot be wrong about what may happen.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.core import lifecycle, probes
from engine.core.events import State
from gateway.core import client_request as gateway_states
from gms.core import region
from lockserver.core import lock
from plumbing.transitions import Edge
from plumbing.transitions import page as page_of
from pool.core import model

PAGE = Path(__file__).resolve().parent.parent / "docs/states.md"

HEAD = """# States

Generated from the transition tables by `make docs`; `.ci/run` fails if this page is stale.
An event that is not named for the current state is refused and changes nothing.
"""


def engine_edges() -> list[Edge]:
    found = lifecycle.TRANSITIONS.items()
    return [
        (str(source), event.__name__, str(row.target))
        for (source, event), first in found
        for row in first.all()
    ]


def ignored_by_engines() -> list[str]:
    """The events that are ignored in each state."""
    lines = [
        f"{state}: {', '.join(sorted(event.__name__ for event in events))}"
        for state, events in lifecycle.IGNORED.items()
    ]
    return [f"Ignored, as is every event about another incarnation: {'; '.join(lines)}.", ""]


def session_edges() -> list[Edge]:
    return [
        (str(source), getattr(event, "__name__", str(event)).removesuffix("Msg"), str(target))
        for source, event, target in region.SESSIONS
    ]


def phase_table() -> list[str]:
    """A model's states follow from facts, so there are no transitions to list."""
    return [
        "The pool derives a model's state after every event. The first line that holds counts.",
        "",
        "| state | when |",
        "|---|---|",
        *(f"| {state} | {when} |" for state, when in model.PHASES.items()),
        "",
    ]


def probe_table() -> list[str]:
    states = list(State)
    lines = ["| | " + " | ".join(states) + " |", "|---" * (len(states) + 1) + "|"]
    for endpoint, rules in probes.TABLE.items():
        cells = " | ".join(rules[state].value for state in states)
        lines.append(f"| `/{endpoint}` | {cells} |")
    return [*lines, ""]


def page() -> str:
    """The whole page."""
    lines = [
        *(HEAD, "## An engine", "", *page_of(engine_edges()), *ignored_by_engines()),
        *("### Probes of an engine", "", *probe_table()),
        "*First* means that no incarnation of this engine has reached standby in this pod yet.",
        *("", "## A lock", "", *page_of(lock.TABLE.edges())),
        "No engine is granted a lock in `releasing` or `recovering`, however long that lasts.",
        *("", "## A session with the GPU memory service", "", *page_of(session_edges())),
        "## A region: an epoch of weights, or a pool of KV memory",
        *("", *page_of(region.TURNS.edges())),
        "`gms status` shows an epoch that is `making` as `staging`, `served` as `committed`, and",
        "`retired` as `superseded` while a session reads it, else as `releasing`.",
        *("", "## A request at the gateway", "", *page_of(gateway_states.TABLE.edges())),
        "Something was sent to the client in `streaming`, `relaying`, `parked`, `resuming` and",
        "`replaying`. `waiting`, `sent` and `answering` never follow these, so nothing is sent",
        "twice.",
        *("", "## A model in a pool", "", *phase_table()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write(page: Path, text: str) -> int:
    """Write it, or with `--check` only say whether it is stale; the exit code."""
    if "--check" not in sys.argv[1:]:
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        print(f"docs/{page.name} is stale; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(write(PAGE, page()))
