"""What is wrong with a drill, as sentences: what died or was lost without a kill, and what could
not be checked. Pure, like the verdict that they are part of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from understudy.drill.records import EngineDeath, EngineKill, Exchange, Outcome, Records

ENGINES_MIN = 2  # an active engine and a standby

# Of the deaths that an upgrade causes: it ends engines by SIGTERM and by a switchover. A supervisor
# that exits may be gone before its last event is read.
UPGRADED = frozenset({"", "sigterm", "second_signal", "drained", "hand_over"})


def false_deaths(records: Records) -> list[EngineDeath]:
    """Deaths of engines that the drill did not cause."""
    killed = {kill.incarnation for kill in records.kills}
    expected = UPGRADED if records.upgrade is not None else frozenset()
    return [
        death
        for death in records.deaths
        if death.incarnation not in killed and death.cause not in expected
    ]


def burn_problems(records: Records) -> list[str]:
    """Why the machine was not as busy as it should have been."""
    burn = records.burn
    if burn is None or not burn.ended:
        return []
    return [f"{burn.ended} of {burn.processes} busy loops ended before the drill stopped them"]


def upgrade_problems(records: Records, pause_ms: float | None) -> list[str]:
    """Why an upgrade of both engines under load is not complete or not proven."""
    upgrade = records.upgrade
    if upgrade is None:
        return []
    problems = []
    old = [engine for engine, is_upgraded in upgrade.engines.items() if not is_upgraded]
    if old:
        problems.append(f"{', '.join(old)} does not run with {upgrade.setting} in every process")
    if len(upgrade.engines) < ENGINES_MIN:
        problems.append("the upgrade was not completed")
    if not records.grants_checked:
        problems.append("the grant could not be checked against the old processes")
    if pause_ms is None:
        problems.append("no requests were answered both before and after the switchover")
    return problems


def outside_problems(records: Records, outcomes: Sequence[tuple[Exchange, Outcome]]) -> list[str]:
    """What an address outside the pod refused, and how."""
    refused = [each for each, outcome in outcomes if outcome is Outcome.REFUSED]
    if not records.url or not refused:
        return []
    answers = Counter(f"HTTP {each.status}" if each.status else str(each.end) for each in refused)
    kinds = ", ".join(f"{count} × {answer}" for answer, count in answers.most_common())
    return [f"{records.url} refused {len(refused)} of {len(outcomes)} requests ({kinds})"]


def part_problems(records: Records) -> list[str]:
    """Effects of the deaths of other parts, which should have none."""
    problems, use = list(records.disturbed), records.memory
    away = [kill.target for kill in records.part_kills if kill.back_ms is None]
    if away:
        problems.append(f"{', '.join(away)} did not come back")
    if use is None:
        return problems
    lost = sum(kill.recovered_ms is None for kill in records.memory_kills)
    if lost:
        problems.append(f"after {lost} kills the memory service did not recover completely")
    if not use.peak_bytes:
        problems.append("the physical memory of the weights is not visible here")
    elif use.peak_bytes > use.committed_bytes + use.device_bytes_min // 2:
        problems.append(
            f"the weights used up to {use.peak_bytes} bytes, but only {use.committed_bytes} are"
            " committed: something was loaded a second time"
        )
    return problems


def problems_of(
    records: Records,
    outcomes: Sequence[tuple[Exchange, Outcome]],
    failovers: Sequence[float],
    kills_wanted: int,
) -> list[str]:
    problems = [
        f"{death.engine} died although nothing had been killed: {death.message}"
        for death in false_deaths(records)
    ]
    kills = len(records.kills)
    made = kills + len(records.memory_kills) + len(records.part_kills)
    if made < kills_wanted:
        problems.append(f"only {made} of {kills_wanted} kills were made")
    if len(failovers) < kills:
        problems.append(f"no request was answered after {kills - len(failovers)} kills")
    if records.grants_checked < kills:
        missing = kills - records.grants_checked
        problems.append(f"{missing} grants could not be checked against the old processes")
    hung = sum(outcome is Outcome.HUNG for _, outcome in outcomes)
    if hung:
        problems.append(f"{hung} requests got neither an answer nor an error")
    if not any(outcome is Outcome.OK for _, outcome in outcomes):
        problems.append("no request was answered in full")
    lost = [each for each, outcome in outcomes if outcome in (Outcome.LOST, Outcome.BROKEN)]
    if lost and not records.is_direct:
        problems.append(
            f"{len(lost)} requests were lost, which the gateway had to continue ({lost[0].detail})"
        )
    stray = [
        exchange
        for exchange in lost
        if not any(_explains(kill, exchange) for kill in records.kills)
    ]
    if stray:
        problems.append(
            f"{len(stray)} requests were lost although nothing had been killed ({stray[0].detail})"
        )
    return problems


def _explains(kill: EngineKill, exchange: Exchange) -> bool:
    """Whether this kill can explain the loss of this request, which ran on the killed engine."""
    if exchange.token is not None:
        return exchange.token == kill.old_token and exchange.ended_ms >= kill.killed_ms
    # Accepted without a byte of an answer: by an engine that was dying.
    until_ms = kill.active_ms if kill.active_ms is not None else math.inf
    return exchange.ended_ms >= kill.killed_ms and exchange.sent_ms <= until_ms
