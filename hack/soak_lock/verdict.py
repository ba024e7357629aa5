"""The result of a soak: counts, times, and every violation of the fence's order."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from hack.report import spread
from hack.soak_lock.supervisor import Plan

SHOWN_MAX = 20  # violations that are reported in full


@dataclass
class Soaked:
    """Passed if there are no violations."""

    kills: int = 0
    violations: list[dict[str, Any]] = field(default_factory=list)
    spent_early: int = 0
    token: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    by_processes: Counter[int] = field(default_factory=Counter)
    took_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def granted(self, grants: list[dict[str, Any]]) -> None:
        """All reports of one grant: there must be one, with a new token."""
        if len(grants) > 1:
            self.violate("two supervisors were granted", grants)
        for grant in grants:
            if grant["token"] <= self.token:
                self.violate(f"the token did not grow beyond {self.token}", grant)
        self.token = max(grant["token"] for grant in grants)

    def killed(self, kind: str, plan: Plan, found: dict[str, Any], began_ms: float) -> None:
        """What the new holder saw of the old tree when it was granted."""
        self.kills += 1
        self.by_kind[kind] += 1
        self.by_processes[1 + plan.backends] += 1
        self.took_ms[kind].append(found["mono_ms"] - began_ms)
        self.spent_early += len(found["spent_early"])
        if found["watched"] == 0:
            self.violate("no process was watched", found)
        if found["alive"]:
            self.violate(f"{kind}: processes {found['alive']} of {plan} were alive", found)
        if found["witness_held"]:
            self.violate(f"{kind}: the witness of {plan} was held", found)

    def violate(self, what: str, seen: Any) -> None:
        self.violations.append({"what": what, "at": time.monotonic(), "seen": seen})

    def to_dict(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "violations": len(self.violations),
            "first_violations": self.violations[:SHOWN_MAX],
            "spent_but_not_yet_reported_ended": self.spent_early,
            "kills_by_kind": dict(self.by_kind),
            "kills_by_processes": {str(n): k for n, k in sorted(self.by_processes.items())},
            "kill_to_grant_ms": {
                kind: spread(values) for kind, values in self.took_ms.items() if len(values) > 1
            },
        }
