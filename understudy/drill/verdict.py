"""The verdict of a drill: records in, report out. Pure; nothing here measures or waits.

`RULES` is the verdict: each rule names what must not be found. A drill that measured nothing must
not look like one that found nothing, so rules also cover what could not be checked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec

from understudy.drill.outcomes import (
    Spread,
    doubled_pieces,
    failover_pauses,
    first_answers,
    outcome_of,
    pauses_in,
    phases_of,
    spread,
    switchover_pause,
    times_away,
)
from understudy.drill.records import (
    PHASES,
    Exchange,
    Kill,
    Outcome,
    Records,
    StatedBound,
)
from understudy.drill.targets import (
    GMS,
    PARTS,
    POOL,
)

ENGINES_MIN = 2  # an active engine and a standby
CUT_CODE = "pool.cut"  # the marked error of a request that could neither finish nor be parked

# Causes of deaths that an upgrade or a pool wants. A supervisor that exits may be gone before its
# last event is read.
WANTED_BY_UPGRADE = frozenset({"", "sigterm", "second_signal", "drained", "hand_over"})
WANTED_BY_POOL = frozenset({"", "asked_to_be_cold"})


# Of the report of a drill without adoption, in the document of the one that it is compared with.
COMPARED = ("passed", "requests", "kills", "resumed", "failover_ms", "pause_ms")

ONE_MODEL, IN_POOL = "gateway", "pool"  # the modes of a drill
EVERY, PODS, POOLS = (ONE_MODEL, IN_POOL), (ONE_MODEL,), (IN_POOL,)


class Evidence:
    """The records of a drill, with what follows from them."""

    def __init__(self, records: Records, kills_wanted: int, switches_wanted: int = 0) -> None:
        self.records, self.mode = records, records.mode
        self.kills_wanted, self.switches_wanted = kills_wanted, switches_wanted
        self.outcomes = [(each, outcome_of(each, records)) for each in records.exchanges]
        self.bounds = Bounds(records.bounds)

    def of(self, *outcomes: Outcome) -> list[Exchange]:
        return [exchange for exchange, outcome in self.outcomes if outcome in outcomes]

    @cached_property
    def failovers(self) -> list[tuple[Kill, Exchange | None]]:
        """Each kill of an engine's process, and the first answer after it."""
        kills = self.records.engine_kills
        return list(zip(kills, first_answers(kills, self.records.exchanges), strict=True))

    @cached_property
    def failovers_ms(self) -> list[float]:
        return [
            first.first_token_ms - kill.killed_ms
            for kill, first in self.failovers
            if first is not None and first.first_token_ms is not None
        ]

    @cached_property
    def parked(self) -> list[float]:
        """How long each stream paused that continued in its model's next turn."""
        away = {name: times_away(self.records.moments, name) for name in self.records.models}
        return [
            pause.length_ms
            for each in self.records.exchanges
            for pause in pauses_in(each, away.get(each.model, ()))
        ]

    @cached_property
    def waits(self) -> list[tuple[Exchange, float]]:
        """Each request's time until its first text, or until its end if it got none."""
        return [
            (each, (each.ended_ms if each.first_token_ms is None else each.first_token_ms))
            for each in self.records.exchanges
        ]

    def longest_wait(self, model: str | None = None) -> float | None:
        """The longest wait, as a share of the bound that the pool stated for it."""
        return _longest(
            self.bounds.share(each.model, each.sent_ms, until_ms)
            for each, until_ms in self.waits
            if model in (None, each.model)
        )

    def longest_pause(self) -> float | None:
        return _longest(
            self.bounds.share(each.model, *max(pairwise(each.text_ms), key=lambda g: g[1] - g[0]))
            for each in self.records.exchanges
            if len(each.text_ms) > 1
        )


class Bounds:
    """The bounds that the pool stated, by model and time."""

    def __init__(self, stated: Iterable[StatedBound]) -> None:
        self._stated: dict[str, list[StatedBound]] = {}
        for each in sorted(stated, key=lambda one: one.at_ms):
            self._stated.setdefault(each.model, []).append(each)

    def share(self, model: str, from_ms: float, to_ms: float) -> float | None:
        """A time of waiting, divided by the largest bound that was stated from just before it until
        it was over; None: none was, or there is no bound."""
        stated = self._stated.get(model, [])
        first = max(0, bisect_right(stated, from_ms, key=lambda each: each.at_ms) - 1)
        last = bisect_right(stated, to_ms, key=lambda each: each.at_ms)
        found = [each.bound_ms for each in stated[first : max(last, first + 1)] if each.bound_ms]
        return (to_ms - from_ms) / max(found) if found else None


def _longest(shares: Iterable[float | None]) -> float | None:
    known = [each for each in shares if each is not None]
    return round(max(known), 4) if known else None


# ------------------------------------------------------------------ the rules


@dataclass(frozen=True, slots=True)
class Check:
    """What must not be found in drills of `modes`. `sentence`: the problem, with {count} and {all}
    or {first} of what was found, or one problem for {each}; empty: the count says it."""

    name: str
    found: Callable[[Evidence], Sequence[object]]
    sentence: str = "{each}"
    modes: tuple[str, ...] = EVERY

    def problems(self, evidence: Evidence) -> list[str]:
        found = [str(each) for each in self.found(evidence)]
        if not found or not self.sentence or evidence.mode not in self.modes:
            return []
        if "{each}" in self.sentence:
            return [self.sentence.format(each=each) for each in found]
        names = {"count": len(found), "first": found[0], "all": ", ".join(found)}
        return [self.sentence.format(**names)]


def _details(exchanges: Iterable[Exchange]) -> list[str]:
    return [f"{each.model}: {each.detail}" if each.model else each.detail for each in exchanges]


def _with(*outcomes: Outcome) -> Callable[[Evidence], list[str]]:
    """The last words of the requests with these outcomes. A pool's cut is counted apart,
    whether a client saw it as a status or in its stream."""

    def find(evidence: Evidence) -> list[str]:
        is_pool = evidence.mode == IN_POOL
        found = evidence.of(*outcomes)
        return _details(each for each in found if not (is_pool and CUT_CODE in each.detail))

    return find


def _cut(evidence: Evidence) -> list[Exchange]:
    return [each for each in evidence.records.exchanges if CUT_CODE in each.detail]


def _doubled(evidence: Evidence) -> list[int]:
    """A number for each piece of text that came twice."""
    expected = evidence.records.expected
    exchanges = evidence.records.exchanges
    return list(range(sum(doubled_pieces(each, expected.get(each.prompt)) for each in exchanges)))


def _double_active(evidence: Evidence) -> list[str]:
    return evidence.records.overlaps


def _false_deaths(evidence: Evidence) -> list[str]:
    """Deaths of engines that neither the drill nor the pool wanted."""
    records = evidence.records
    killed = {kill.incarnation for kill in records.engine_kills}
    wanted = WANTED_BY_UPGRADE if records.upgrade is not None else frozenset()
    wanted = WANTED_BY_POOL if evidence.mode == IN_POOL else wanted
    return [
        f"{death.engine} died although nothing had been killed: {death.message}"
        for death in records.deaths
        if death.incarnation not in killed and death.cause not in wanted
    ]


def _fewer(made: int, wanted: int) -> list[str]:
    return [f"only {made} of {wanted}"] if made < wanted else []


def _starved(evidence: Evidence) -> list[str]:
    """Models, or the only one, that gave no whole answer."""
    whole = {each.model for each in evidence.of(Outcome.OK)}
    models = evidence.records.models
    return [name for name in models if name not in whole] if models else ["the pod"] * (not whole)


def _few_switches(evidence: Evidence) -> list[str]:
    return _fewer(len(evidence.records.switches), evidence.switches_wanted)


def _few_takeovers(evidence: Evidence) -> list[str]:
    return _fewer(len(evidence.failovers_ms), len(evidence.failovers))


def _unchecked(evidence: Evidence) -> list[str]:
    return _fewer(evidence.records.grants_checked, len(evidence.failovers))


def _no_bound(evidence: Evidence) -> list[str]:
    return [] if evidence.records.bounds else ["the pool"]


def _away(evidence: Evidence) -> list[str]:
    """Victims that did not come back; an engine with a standby is judged by its successor."""
    return [
        kill.victim
        for kill in evidence.records.kills
        if kill.back_ms is None and (kill.engine is None or evidence.mode == IN_POOL)
    ]


def _unseen_memory(evidence: Evidence) -> list[str]:
    use = evidence.records.memory
    return ["the weights"] if use is not None and not use.peak_bytes else []


def _second_copy(evidence: Evidence) -> list[str]:
    use = evidence.records.memory
    if use is None or use.peak_bytes <= use.committed_bytes + use.device_bytes_min // 2:
        return []
    return [f"up to {use.peak_bytes} bytes, but only {use.committed_bytes} are committed"]


def _ended_loops(evidence: Evidence) -> list[str]:
    burn = evidence.records.burn
    return [f"{burn.ended} of {burn.processes}"] if burn is not None and burn.ended else []


def _upgrade(evidence: Evidence) -> list[str]:
    """Why an upgrade of both engines under load is not complete or not proven."""
    upgrade, records = evidence.records.upgrade, evidence.records
    if upgrade is None:
        return []
    old = [engine for engine, is_upgraded in upgrade.engines.items() if not is_upgraded]
    checks = {
        f"{', '.join(old)} does not run with {upgrade.setting} in every process": bool(old),
        "the upgrade was not completed": len(upgrade.engines) < ENGINES_MIN,
        "the grant could not be checked against the old processes": not records.grants_checked,
        "no requests were answered both before and after the switchover": switchover_pause(
            upgrade, records.exchanges
        )
        is None,
    }
    return [sentence for sentence, is_broken in checks.items() if is_broken]


def _refused_outside(evidence: Evidence) -> list[str]:
    """What an address outside the pod refused, and how."""
    refused, url = evidence.of(Outcome.REFUSED), evidence.records.url
    if not url or not refused:
        return []
    replies = Counter(f"HTTP {each.status}" if each.status else str(each.end) for each in refused)
    kinds = ", ".join(f"{count} × {reply}" for reply, count in replies.most_common())
    return [f"{url} refused {len(refused)} of {len(evidence.outcomes)} requests ({kinds})"]


def _late(share: float | None) -> list[str]:
    return [f"{share:.1%}"] if share is not None and share > 1.0 else []


LOST = "{count} requests were lost, which the gateway had to continue ({first})"
BROKEN = "{count} streams were broken, which the gateway had to continue ({first})"
HUNG = "{count} requests got neither an answer nor an error"
UNCHECKED = "{each} grants could be checked against the old processes"
# Their counts are keys of the JSON document, in drills of their modes.
COUNTS = (
    Check("lost", _with(Outcome.LOST), LOST, POOLS),
    Check("lost_in_flight", _with(Outcome.LOST, Outcome.BROKEN), LOST, PODS),
    Check("broken_streams", _with(Outcome.BROKEN), BROKEN),
    Check("refused", _with(Outcome.REFUSED), ""),
    Check("cut", _cut, "", POOLS),
    Check("wrong_tokens", _with(Outcome.WRONG), ""),
    Check("doubled_tokens", _doubled, ""),
    Check("double_active", _double_active),
    Check("false_deaths", _false_deaths),
)
CHECKS = (
    Check("hung", lambda e: e.of(Outcome.HUNG), HUNG),
    Check("starved", _starved, "{all} answered no request in full"),
    Check("outside", _refused_outside),
    Check(
        "kills", lambda e: _fewer(len(e.records.kills), e.kills_wanted), "{each} kills were made"
    ),
    Check("switches", _few_switches, "{each} switches were seen", POOLS),
    Check("takeovers", _few_takeovers, "{each} kills were followed by an answer", PODS),
    Check("unchecked", _unchecked, UNCHECKED, PODS),
    Check("disturbed", lambda e: e.records.disturbed),
    Check("not back", _away, "{all} did not come back"),
    Check("memory", _unseen_memory, "the physical memory of {all} is not visible here"),
    Check("copy", _second_copy, "the weights used {all}: something was loaded a second time"),
    Check("upgrade", _upgrade),
    Check("burn", _ended_loops, "{all} busy loops ended before the drill stopped them"),
    Check("no bound", _no_bound, "{all} stated no bound, so no wait could be compared", POOLS),
    Check("late", lambda e: _late(e.longest_wait()), "the longest wait took {all} of its bound"),
    Check(
        "paused", lambda e: _late(e.longest_pause()), "the longest pause took {all} of its bound"
    ),
)
RULES = (*COUNTS, *CHECKS)


# ------------------------------------------------------------------ the report


@dataclass(slots=True)
class DrillReport:
    """What a drill found: the values of its JSON document, by key, and the failover times.

    `problems`: why it did not pass, as sentences. `lost_in_flight` includes `broken_streams`, and
    `wrong_tokens` the answers with doubled ones.
    """

    values: dict[str, Any]
    failovers_ms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    without_adoption: DrillReport | None = None  # the same drill of a pod that adopts no KV block

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def mode(self) -> str:
        return str(self.values["mode"])

    @property
    def faults(self) -> dict[str, int]:
        """The counts that must be zero."""
        return {each.name: self.values[each.name] for each in COUNTS if self.mode in each.modes}

    @property
    def passed(self) -> bool:
        return not any(self.faults.values()) and not self.problems

    def to_dict(self, backend: str, machine: dict[str, Any]) -> dict[str, Any]:
        """The JSON document of `understudy drill --json`."""
        document = {"passed": self.passed, "problems": self.problems, **self.values}
        document |= {"backend": backend, "machine": machine}
        if self.without_adoption is not None:
            other = self.without_adoption.to_dict(backend, machine)
            document["without_adoption"] = {name: other[name] for name in COMPARED}
        return document


def judge(records: Records, kills_wanted: int, switches_wanted: int = 0) -> DrillReport:
    """The report of a whole drill."""
    evidence = Evidence(records, kills_wanted, switches_wanted)
    mode, pauses = evidence.mode, failover_pauses(records)
    pause_ms = spread(pause.length_ms for pause in pauses)
    values: dict[str, Any] = {
        "mode": mode,
        "requests": len(records.exchanges),
        "kills": len(records.kills),
        "killed": _killed(records),
        **{each.name: len(each.found(evidence)) for each in COUNTS if mode in each.modes},
        "lost_in_gateway": len(evidence.of(Outcome.LOST_IN_GATEWAY)),
        "resumed": len(pauses),
        "lasted_s": round(records.lasted_s, 3),
    }
    if records.burn is not None:
        values["burn"] = msgspec.structs.asdict(records.burn)
    values |= (
        _pool_values(evidence, pause_ms) if records.models else _pod_values(evidence, pause_ms)
    )
    problems = [problem for rule in RULES for problem in rule.problems(evidence)]
    return DrillReport(values, evidence.failovers_ms, problems)


def _killed(records: Records) -> dict[str, int]:
    """The number of kills by target; those that every drill of such a pod makes are always in."""
    made = Counter(kill.target for kill in records.kills)
    if records.models:
        return dict(made)
    always = {*records.targets, *([GMS] if records.memory is not None else [])}
    names = dict.fromkeys([*records.targets, *made, *PARTS])
    return {name: made[name] for name in names if made[name] or name in always}


def _pod_values(evidence: Evidence, pause_ms: Spread) -> dict[str, Any]:
    records, phases = evidence.records, [phases_of(*each) for each in evidence.failovers]
    found = {
        "failover_ms": spread(evidence.failovers_ms),
        "pause_ms": pause_ms,
        "phases_ms": {
            name: spread(each[name] for each in phases if name in each) for name in PHASES
        },
        **kv_share(records.kills),
    }
    if records.url:
        found["url"] = records.url
    if records.memory is not None:
        back = [kill.took_ms for kill in records.kills if kill.target == GMS and kill.took_ms]
        found["gms"] = {
            "recovery_ms": spread(back),
            "committed_bytes": records.memory.committed_bytes,
            "peak_physical_bytes": records.memory.peak_bytes,
        }
    if (upgrade := records.upgrade) is not None:
        found["upgrade"] = {
            "setting": upgrade.setting,
            "engines": upgrade.engines,
            "from": upgrade.source,
            "to": upgrade.target,
            "switchover_ms": upgrade.switchover_ms,
            "pause_ms": switchover_pause(upgrade, records.exchanges),
        }
    return found


def kv_share(kills: Iterable[Kill]) -> dict[str, Any]:
    """The blocks of the KV cache that survived their engines, over the kills whose successor
    reported what it adopted. What an engine published after its last status counts if it was
    adopted. `adopted_share` is None if nothing was published."""
    known = [kill for kill in kills if kill.adopted_blocks is not None]
    adopted = sum(kill.adopted_blocks or 0 for kill in known)
    published = sum(max(kill.kept_blocks, kill.adopted_blocks or 0) for kill in known)
    share = round(adopted / published, 4) if published else None
    return {"adopted_blocks": adopted, "published_blocks": published, "adopted_share": share}


def _pool_values(evidence: Evidence, pause_ms: Spread) -> dict[str, Any]:
    records = evidence.records
    back = [kill.took_ms for kill in records.kills if kill.target == POOL]
    return {
        "switches": len(records.switches),
        "parked": len(evidence.parked),
        "longest_wait_of_bound": evidence.longest_wait(),
        "longest_pause_of_bound": evidence.longest_pause(),
        "models": {name: _model_values(name, evidence) for name in records.models},
        "outcomes": pool_kills(records),
        "not_reached": list(records.not_reached),
        "switch_ms": spread(each.length_ms for each in records.switches),
        "wait_ms": spread(until_ms - each.sent_ms for each, until_ms in evidence.waits),
        "pause_ms": spread(evidence.parked),
        "failover_pause_ms": pause_ms,
        "pool_back_ms": spread(took_ms for took_ms in back if took_ms),
    }


def _model_values(name: str, evidence: Evidence) -> dict[str, Any]:
    waits = [until_ms - e.sent_ms for e, until_ms in evidence.waits if e.model == name]
    return {
        "answered": sum(each.model == name for each in evidence.of(Outcome.OK)),
        "switches": sum(each.model == name for each in evidence.records.switches),
        "longest_wait_ms": round(max(waits, default=0.0), 1),
        "longest_wait_of_bound": evidence.longest_wait(name),
    }


def pool_kills(records: Records) -> list[dict[str, Any]]:
    """Every kill of a pool's drill, as the JSON document has it."""
    return [
        {
            "number": number,
            "target": kill.target,
            "engine": kill.engine,
            "model": kill.model,
            "phase": kill.phase,
            "at_ms": round(kill.killed_ms - records.began_ms, 1),
            "outcome": kill.result,
            "back_ms": None if kill.took_ms is None else round(kill.took_ms, 1),
        }
        for number, kill in enumerate(records.kills, 1)
    ]
